"""A schedule as a picture: one row per stage, time to the right."""

import os
from typing import TYPE_CHECKING

import numpy as np

from shardopt.core.extras import require
from shardopt.pipeline.ticks import Ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_COLORS = {"forward": (0.20, 0.42, 0.70), "backward": (0.13, 0.55, 0.42), "weight": (0.87, 0.55, 0.13)}
_INK, _IDLE = "#22272e", "#eceef2"
_HALF = 0.43  # of a box's height, in stages
_PALEST = 0.65  # how far the last chunk's colour is on its way to white
_UNIT = 0.27  # inches that a pass takes, unless the picture becomes too wide or too narrow
_CHUNK = 0.18  # where it works on a part of the stage, and takes a part of the time
_LEGIBLE = 4  # points; smaller numbers are left out
_WIDTHS = 6.5, 60.0


def plot(ticks: Ticks, heading: tuple[str, str], path: str | os.PathLike[str] | None) -> "Figure":
    """Draw the lockstep program, every tick as long as its busiest stage; see `Schedule.plot`."""
    require("matplotlib", extra="plot", who="plot")
    from matplotlib.figure import Figure  # not pyplot: no backend, no window, nothing to close

    starts = np.concatenate([[0], np.cumsum(ticks.tick_costs())])
    width = float(np.clip((_UNIT if ticks.num_chunks == 1 else _CHUNK) * starts[-1], *_WIDTHS))
    figure = Figure(figsize=(width + 0.9, 0.36 * ticks.num_stages + 1.4), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    _draw_ticks(axes, ticks, starts)
    _draw_passes(axes, ticks, starts, inches=width / starts[-1])
    axes.set_xlim(0, starts[-1])
    axes.set_ylim(ticks.num_stages - 0.5, -0.5)
    axes.set_yticks(range(ticks.num_stages), [f"stage {stage}" for stage in range(ticks.num_stages)])
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    axes.spines[:].set_visible(False)
    axes.set_title(heading[0], loc="left", color=_INK, fontsize=11, fontweight="bold", pad=34)
    axes.annotate(heading[1], (0, 1), (0, 20), "axes fraction", "offset points", color=_INK, fontsize=8)
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.02), "borderaxespad": 0, "borderpad": 0.4}
    axes.legend(handles=_legend(ticks), **place, ncols=6, frameon=False, fontsize=8, labelcolor=_INK)
    if path is not None:
        figure.savefig(path)
    return figure


def _draw_ticks(axes: "Axes", ticks: Ticks, starts: np.ndarray) -> None:
    """A pale band per stage, on which what stays empty is the bubble, cut into numbered ticks."""
    for stage in range(ticks.num_stages):
        axes.broken_barh([(0, starts[-1])], (stage - _HALF, 2 * _HALF), facecolor=_IDLE, zorder=0)
    axes.vlines(starts, -0.5, ticks.num_stages - 0.5, color="white", linewidth=1, zorder=1)
    every = max(1, round(ticks.num_ticks / 60))
    middles = (starts[:-1] + starts[1:]) / 2
    axes.xaxis.tick_top()
    axes.set_xticks(middles[::every], map(str, range(0, ticks.num_ticks, every)))
    axes.annotate("tick", (0, 1), (-3, 4), "axes fraction", "offset points", color=_INK, fontsize=8, ha="right")


def _draw_passes(axes: "Axes", ticks: Ticks, starts: np.ndarray, inches: float) -> None:
    """One box per pass, as long as it takes, in the order within its tick; `inches` is the length of a unit."""
    size = min(8.0, 72 * inches / (0.75 * len(str(ticks.num_micro_batches - 1)) + 0.3))
    costs, shades = ticks.pass_costs(), _shades(ticks)
    done = np.zeros((ticks.num_ticks, ticks.num_stages))
    for kind, when in ticks.passes.items():
        for v, stage in enumerate(ticks.stage_of):
            color = shades[kind][ticks.chunk_of[v]]
            left = starts[when[v]] + done[when[v], stage]
            boxes = [(x, costs[kind]) for x in left]
            axes.broken_barh(
                boxes, (stage - _HALF, 2 * _HALF), facecolor=color, edgecolor="white", linewidth=0.6, zorder=2
            )
            ink = "white" if np.dot(color, (0.299, 0.587, 0.114)) < 0.62 else _INK
            for m, x in enumerate(left if size >= _LEGIBLE else ()):
                label = axes.text(x + costs[kind] / 2, stage, str(m), color=ink, fontsize=size, zorder=3)
                label.set(ha="center", va="center_baseline", in_layout=False)
        np.add.at(done, (when, np.asarray(ticks.stage_of)[:, None]), costs[kind])


def _shades(ticks: Ticks) -> dict[str, np.ndarray]:
    """The colour of each kind, paler from chunk to chunk."""
    white = np.linspace(0, _PALEST, ticks.num_chunks)[:, None]
    return {kind: np.asarray(color) * (1 - white) + white for kind, color in _COLORS.items()}


def _legend(ticks: Ticks) -> list["Patch"]:
    from matplotlib.patches import Patch

    names = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}
    if ticks.weight is not None:
        names["backward"] = "input gradient"
    shades = _shades(ticks)
    handles = [Patch(facecolor=shades[kind][0], label=names[kind]) for kind in ticks.passes]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    if ticks.num_chunks > 1:
        last = ticks.num_chunks - 1
        handles += [Patch(facecolor=shades["forward"][c], label=f"chunk {c}") for c in sorted({0, last})]
    return handles
