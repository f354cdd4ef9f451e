"""Break a function of shardopt on purpose, wherever it is called from."""

import sys


def break_function(patch, function, broken, *, callers=()):
    """Replace `function` by `broken` in each module of shardopt that holds it, or in `callers`
    alone.

    A caller that moves to another module gets the broken function as well.
    """
    modules = callers or [
        module for name, module in sys.modules.items() if name.partition(".")[0] == "shardopt"
    ]
    holders = [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if value is function
    ]
    assert holders, f"no module of shardopt holds {function!r}"
    for module, name in holders:
        patch.setattr(module, name, broken)
