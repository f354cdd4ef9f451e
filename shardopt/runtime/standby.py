"""A process that stands by: it has imported jax and shardopt, and waits for its place in the next attempt.

`python standby.py` reads one line of JSON, {"environment", "words"}, and becomes what `python WORDS...` would be. Its input
ends without a line where it is not needed.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
from pathlib import Path


def stand_by() -> None:
    """Import what takes seconds, also what is imported only when it is needed, then wait, then run."""
    for name in ("shardopt", "orbax.checkpoint", "jax.experimental.multihost_utils", "rich.console", "tyro", "grain"):
        with contextlib.suppress(ModuleNotFoundError):  # of an extra
            importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        return
    place = json.loads(line)
    os.environ.update(place["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    first, *others = place["words"]
    if first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = place["words"]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    stand_by()
