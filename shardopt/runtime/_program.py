"""Programs next to the processes of a run: a vault, a watch. They start without importing shardopt.

`python _program.py MODULE ARGUMENTS...` calls `main(*ARGUMENTS)` of a module of this folder. These
modules import only the standard library, and each other.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def command(module: str, *arguments: object) -> list[str]:
    """Return the words that start a program."""
    return [sys.executable, "-I", "-S", __file__, module, *map(str, arguments)]


if __name__ == "__main__":
    folder = ModuleType("shardopt.runtime")
    folder.__path__ = [str(Path(__file__).parent)]
    sys.modules[folder.__name__] = folder
    module, *arguments = sys.argv[1:]
    sys.exit(importlib.import_module(f"{folder.__name__}.{module}").main(*arguments))
