"""`plot_norms`: the norms of gradients, updates and parameters as heat maps over layers and steps."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardopt.core._errors import calling, error_text
from shardopt.core._figures import FilePath, new_figure, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {"gradient_norm": "gradient", "update_norm": "update", "param_norm": "parameters"}
_LAYER = "layer_"
_NOT_FINITE, _ZERO, _MISSING = "#e4003a", "#22272e", "#e6e8eb"
_MOST_LABELS = 24


class HeatMap(NamedTuple):
    """The norms of one kind.

    Attributes:
      rows: the names of the rows: leaves that are not stacked, then layers.
      num_leaves: how many of the rows are leaves.
      steps: the steps, ascending.
      values: [rows, steps]; not finite where the log is, and -1 where it has no value.
    """

    rows: tuple[str, ...]
    num_leaves: int
    steps: np.ndarray
    values: np.ndarray


@calling("plot_norms")
def plot_norms(
    log: str | os.PathLike[str] | Sequence[Mapping[str, float]], *, path: FilePath = None
) -> "Figure":
    """Draw the norms that `so.fit(norms_every=...)` logged as heat maps over layers and steps,
    with logarithmic colours.

    The row of a layer is the norm of all its leaves together. Leaves that are not stacked have rows
    of their own. A norm that is NaN or infinite is red, a norm of zero is black.

    Args:
      log: the file of `so.training.jsonl`, or its lines as dicts.
      path: file to save the picture to; the suffix chooses the format, PNG without one.

    Returns:
      A matplotlib figure.

    Raises:
      ModuleNotFoundError: if matplotlib, of the extra "plot", is not installed.
      ValueError: if the log has no norms.

    Example:
      >>> lines = [{"step": n, "gradient_norm/blocks/w/layer_0": 0.5, "gradient_norm/blocks/w/layer_1": 2.0} for n in (10, 20)]
      >>> [axes.get_title("left") for axes in plot_norms(lines).axes if axes.get_title("left")]
      ['gradient']
    """
    lines = _lines(log)
    maps = {
        title: heat_map
        for kind, title in _KINDS.items()
        if (heat_map := read_norms(lines, kind)) is not None
    }
    if not maps:
        fix = "train with so.fit(..., norms_every=10, log=so.training.jsonl(path))."
        raise ValueError(error_text("the log has no norms.", fix=fix))
    height = max(1.9, min(4.5, 0.17 * max(len(heat_map.rows) for heat_map in maps.values()) + 0.7))
    figure = new_figure(10, height * len(maps) + 0.5, dpi=150)
    all_axes = figure.subplots(len(maps), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, heat_map) in zip(all_axes, maps.items(), strict=True):
        _draw(axes, title, heat_map)
    all_axes[-1].set_xlabel("step")
    _legend(figure, list(maps.values()))
    return saved(figure, path)


def read_norms(lines: Sequence[Mapping[str, float | None]], kind: str) -> HeatMap | None:
    """Return the norms of a kind, such as "gradient_norm", in the lines of a log.

    None if there are none.
    """
    norms: dict[str, dict[int, float]] = {}
    for line in lines:
        row_norms: dict[str, float] = {}
        for name, norm in line.items():
            if not name.startswith(f"{kind}/"):
                continue
            leaf_path = name.removeprefix(f"{kind}/")
            last = leaf_path.rpartition("/")[2]
            row = (
                last
                if last.removeprefix(_LAYER).isdigit() and last.startswith(_LAYER)
                else leaf_path
            )
            row_norms[row] = math.hypot(row_norms.get(row, 0.0), math.nan if norm is None else norm)
        for row, norm in row_norms.items():
            # a step that was taken again counts once
            norms.setdefault(row, {})[int(line["step"] or 0)] = norm
    if not norms:
        return None
    layers = sorted(
        (row for row in norms if row.startswith(_LAYER)), key=lambda row: int(row[len(_LAYER) :])
    )
    leaves = [row for row in norms if not row.startswith(_LAYER)]
    steps = sorted({step for by_step in norms.values() for step in by_step})
    values = [[norms[row].get(step, -1.0) for step in steps] for row in [*leaves, *layers]]
    return HeatMap((*leaves, *layers), len(leaves), np.array(steps), np.array(values))


def _lines(
    log: str | os.PathLike[str] | Sequence[Mapping[str, float]],
) -> Sequence[Mapping[str, float | None]]:
    if isinstance(log, str | os.PathLike):
        return [json.loads(line) for line in Path(log).read_text().splitlines()]
    return log


def _draw(axes: "Axes", title: str, heat_map: HeatMap) -> None:
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    edges, values = _edges(heat_map.steps), heat_map.values
    rows = np.arange(len(heat_map.rows) + 1) - 0.5
    is_drawn = np.isfinite(values) & (values > 0)
    low, high = (values[is_drawn].min(), values[is_drawn].max()) if is_drawn.any() else (1.0, 1.0)
    low, high = (low, high) if high > low * 1.01 else (low / 2, high * 2)
    axes.set_facecolor(_MISSING)
    norm, colours = LogNorm(low, high), "viridis"
    mesh = axes.pcolormesh(
        edges, rows, np.ma.array(values, mask=~is_drawn), cmap=colours, norm=norm, rasterized=True
    )
    for colour, cells in ((_NOT_FINITE, ~np.isfinite(values)), (_ZERO, values == 0)):
        if cells.any():
            cells_mesh = np.ma.array(np.ones(values.shape), mask=~cells)
            axes.pcolormesh(edges, rows, cells_mesh, cmap=ListedColormap([colour]), rasterized=True)
    if 0 < heat_map.num_leaves < len(heat_map.rows):
        axes.axhline(heat_map.num_leaves - 0.5, color="white", linewidth=2)
    axes.set_ylim(len(heat_map.rows) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    labelled = _labelled(heat_map)
    axes.set_yticks(labelled, [heat_map.rows[i].replace("_", " ", 1) for i in labelled], fontsize=7)
    axes.tick_params(length=0, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, aspect=15)
    bar.set_label("norm (log scale)", fontsize=8)
    decades = math.log10(high / low)
    bar.ax.yaxis.set_major_locator(
        LogLocator(subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0), numticks=8)
    )
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.tick_params(labelsize=7)


def _edges(steps: np.ndarray) -> np.ndarray:
    """Return the boundaries of the columns: half way between steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middles[0]], middles, [2 * steps[-1] - middles[-1]]])


def _labelled(heat_map: HeatMap) -> list[int]:
    """Return the rows with a label: all, or evenly spaced ones of the leaves and of the layers."""
    count, first = len(heat_map.rows), heat_map.num_leaves
    stride = -(-count // _MOST_LABELS)
    return [*range(0, first, stride), *range(first, count, stride)]


def _legend(figure: "Figure", maps: Sequence[HeatMap]) -> None:
    from matplotlib.patches import Patch

    values = np.concatenate([heat_map.values.ravel() for heat_map in maps])
    shown = {
        "NaN or infinite": (_NOT_FINITE, ~np.isfinite(values)),
        "zero": (_ZERO, values == 0),
        "not logged": (_MISSING, values == -1),
    }
    patches = [
        Patch(color=colour, label=label) for label, (colour, cells) in shown.items() if cells.any()
    ]
    if patches:
        figure.legend(
            handles=patches,
            loc="outside upper right",
            ncols=len(patches),
            fontsize=8,
            frameon=False,
        )
