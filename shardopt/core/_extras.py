"""Packages of shardopt's extras (`shardopt[data]`): required when a function uses them, never at
import.
"""

import importlib.metadata
import importlib.util
import re

from shardopt.core._errors import error_text


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised by import hooks that block a module
        return False


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a version; () if it is unknown, which is older than all."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-z+]", version or "")[0])))


def require(module: str, *, extra: str) -> None:
    """Raise an error unless a package of an extra is installed.

    Called before that package is imported.

    Args:
      module: the import name of the package, such as "grain".
      extra: the extra of shardopt that installs the package, such as "data".

    Raises:
      ModuleNotFoundError: if the package is not installed; the message names the extra.

    Example:
      >>> from shardopt.core._errors import calling
      >>> with calling("batches"):
      ...     require("no_such_package", extra="data")
      Traceback (most recent call last):
      ...
      ModuleNotFoundError: batches: no_such_package is needed, which is not installed.
      Fix: pip install 'shardopt[data]'
    """
    if not is_installed(module):
        problem = f"{module} is needed, which is not installed."
        raise ModuleNotFoundError(
            error_text(problem, fix=f"pip install 'shardopt[{extra}]'"), name=module
        )
