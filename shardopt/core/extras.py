"""Packages that only an extra of shardopt brings: asked for where they are used, never at import."""

import importlib.util

from shardopt.core.errors import format_error


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # by an import hook that blocks it
        return False


def require(module: str, *, extra: str, who: str) -> None:
    """Refuse to go on without a package that is not among shardopt's own dependencies; called before it is imported.

    Args:
      module: the name it is imported by, such as "matplotlib".
      extra: the extra of shardopt that brings it, such as "plot".
      who: the public function that needs it, for the message.

    Raises:
      ModuleNotFoundError: if it is not installed; the message names the extra.

    Example:
      >>> require("no_such_package", extra="plot", who="plot_plans")
      Traceback (most recent call last):
      ...
      ModuleNotFoundError: plot_plans: no_such_package is needed, which is not installed.
      Fix: pip install 'shardopt[plot]'
    """
    if not is_installed(module):
        what = f"{module} is needed, which is not installed."
        raise ModuleNotFoundError(format_error(who, what, fix=f"pip install 'shardopt[{extra}]'"), name=module)
