"""Programs next to the processes of a run: a vault, a watch. They start without importing shardopt.

`python _program.py MODULE ARGUMENTS...` calls `main(*ARGUMENTS)` of a module of this folder. These
modules import only the standard library, and each other.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def start(module: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program, with pipes for its input and output."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


if __name__ == "__main__":
    folder = ModuleType("shardopt.runtime")
    folder.__path__ = [str(Path(__file__).parent)]
    sys.modules[folder.__name__] = folder
    module, *arguments = sys.argv[1:]
    sys.exit(importlib.import_module(f"{folder.__name__}.{module}").main(*arguments))
