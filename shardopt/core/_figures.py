"""Figures of matplotlib, of the extra "plot"."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardopt.core._extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FilePath = str | os.PathLike[str] | None
"""The file to save a picture to; None saves none."""


def new_figure(width: float, height: float, *, dpi: int = 160) -> "Figure":
    """Return an empty figure of so many inches.

    Raises:
      ModuleNotFoundError: if matplotlib is not installed.
    """
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # not pyplot: no backend, no window, nothing to close

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def saved(figure: "Figure", path: FilePath) -> "Figure":
    """Save the figure if there is a path, as PNG if the path has no suffix, and return it."""
    if path is not None:
        figure.savefig(path, format=None if Path(path).suffix else "png")
    return figure
