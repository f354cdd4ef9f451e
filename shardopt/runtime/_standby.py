"""A spare process: it has imported jax and shardopt, and waits for its place in the next attempt.

`python standby.py` reads one line of JSON, {"environment", "words"}, and then runs as `python
WORDS...` would. If its input ends without a line, the spare is not needed and ends.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
from pathlib import Path


def stand_by() -> None:
    """Import slow modules, including those imported lazily.

    Then wait for a place; then run the command.
    """
    for name in (
        "shardopt",
        "orbax.checkpoint",
        "jax.experimental.multihost_utils",
        "rich.console",
        "tyro",
        "grain",
    ):
        with contextlib.suppress(ModuleNotFoundError):  # a package of an extra may be missing
            importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        return
    assignment = json.loads(line)
    os.environ.update(assignment["environment"])
    dev_null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(dev_null, 0)
    program, *arguments = assignment["words"]
    if program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = assignment["words"]
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    stand_by()
