"""Scripts of benchmarks/ and .ci/, imported for a test and forgotten afterwards."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.paths import ROOT


@contextlib.contextmanager
def imported(name: str, folder_name: str = "benchmarks") -> Iterator[ModuleType]:
    """Import a script, and forget it, its modules and the flags that it sets afterwards."""
    folder = str(ROOT / folder_name)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
            patch.setenv(variable, os.environ.get(variable, ""))
        try:
            yield importlib.import_module(name)
        finally:
            for module in set(sys.modules) - before:
                if (getattr(sys.modules[module], "__file__", None) or "").startswith(folder):
                    del sys.modules[module]
