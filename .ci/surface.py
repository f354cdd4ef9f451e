"""Count what a user can meet: public names, arguments and options, next to the limits in
CONTRIBUTING.md.

Usage: python .ci/surface.py

A public name is in the `__all__` of shardopt, or of a module that is reached from there. The exit
code is 1 if a count is above its limit.
"""

import contextlib
import inspect
import io
import re
import sys
from types import ModuleType

from limits import compare

import shardopt as so
from shardopt.cli import main as shardopt_command

FUNCTIONS = ("ddp", "zero", "fsdp", "hybrid", "fit")
WINGS = ("planning", "parameter_server", "reducers", "training")


def public_modules(module: ModuleType) -> list[ModuleType]:
    """Return a module and the modules in its `__all__`, in theirs, and so on."""
    values = [getattr(module, name) for name in module.__all__]
    inner_modules = [value for value in values if hasattr(value, "__all__")]
    return [module, *(found for inner in inner_modules for found in public_modules(inner))]


def counts() -> dict[str, int]:
    """Return what is counted -> its number, as the first column of the table says it."""
    names = {
        "names in `shardopt.__all__`": len(so.__all__),
        "public names in all": sum(len(module.__all__) for module in public_modules(so)),
    }
    wings = {f"names in `{wing}`": len(getattr(so, wing).__all__) for wing in WINGS}
    arguments = {
        f"arguments of `{function}`": len(inspect.signature(getattr(so, function)).parameters)
        for function in FUNCTIONS
    }
    return names | wings | arguments | {"options of `shardopt train --help`": len(shown_options())}


def shown_options() -> list[str]:
    """Return the options that the help of `shardopt train` shows, without `--help`."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # rows begin with a line of a box
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        shardopt_command(["train", "--help"])
    out.seek(0)
    return re.findall(r"^│ (--[\w-]+)", out.read(), re.MULTILINE)


def main() -> int:
    """Print the table, and return the exit code."""
    remedy = (
        "Which question does the new name or argument answer that no existing one answers? Say it"
        " in the commit message that raises the limit, or take another one away."
    )
    return compare(counts(), "The surface", remedy)


if __name__ == "__main__":
    sys.exit(main())
