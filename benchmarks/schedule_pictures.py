"""Draw the schedule of a pipeline: one row per stage, with time to the right.

`draw(schedule, path)` draws the lockstep program. `pace="own"` draws the times of `table_time`.
`benchmarks/schedules.py --pictures` draws those of the docs.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np

from shardopt.core._errors import plural
from shardopt.pipeline import Schedule
from shardopt.pipeline._ticks import Ticks
from shardopt.pipeline._timing import PassTimes, Times, own_pace, pass_times, program_begins

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_COLORS = {
    "forward": (0.20, 0.42, 0.70),
    "backward": (0.13, 0.55, 0.42),
    "weight": (0.87, 0.55, 0.13),
}
_INK = "#22272e"
_IDLE = "#eceef2"
_HALF_HEIGHT = 0.43  # half the height of a box, in stages
_PALEST = 0.65  # the share of white in the colour of the last chunk
_PASS_INCHES = 0.27  # inches per pass, unless the picture becomes too wide or too narrow
# inches per pass of a chunk, which is a part of a stage and takes a part of the time
_CHUNK_INCHES = 0.18
_MIN_FONT_SIZE = 4  # points; smaller numbers are left out
_WIDTH_RANGE = 6.5, 60.0


def draw(
    schedule: Schedule,
    path: str | None = None,
    *,
    pace: Literal["own", "lockstep"] = "lockstep",
    **times_of_passes: Times,
) -> "Figure":
    """Draw which pass each stage runs when.

    Args:
      schedule: the schedule.
      path: where to save the picture.
      pace: "lockstep": the times of `program_time`. "own": the times of `table_time`.
      **times_of_passes: as for `table_time`.
    """
    from matplotlib.figure import Figure

    ticks = schedule.ticks
    times = pass_times(schedule.ticks, **times_of_passes)
    heading = str(schedule).partition("\n")[0], _summary(schedule, pace, times_of_passes)
    lefts, edges = (
        _lockstep_boxes(ticks, times) if pace == "lockstep" else _own_pace_boxes(ticks, times)
    )
    # a pass of one unit has the same width on every picture
    unit = sum(map(sum, times.passes.values())) / (3 * len(ticks.stage_of)) or 1.0
    inches = (_PASS_INCHES if ticks.num_chunks == 1 else _CHUNK_INCHES) * edges[-1] / unit
    width = float(np.clip(inches, *_WIDTH_RANGE))
    size = width + 0.9, 0.36 * ticks.num_stages + 1.4
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    axes = figure.add_subplot()
    _draw_background(axes, ticks, edges, "tick" if len(edges) > 2 else "time")
    _draw_passes(axes, ticks, times, lefts, inches=width / edges[-1])
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(ticks.num_stages - 0.5, -0.5)
    axes.set_yticks(
        range(ticks.num_stages), [f"stage {stage}" for stage in range(ticks.num_stages)]
    )
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    axes.spines[:].set_visible(False)
    axes.set_title(heading[0], loc="left", color=_INK, fontsize=11, fontweight="bold", pad=34)
    axes.annotate(
        heading[1], (0, 1), (0, 20), "axes fraction", "offset points", color=_INK, fontsize=8
    )
    legend_position = {
        "loc": "upper left",
        "bbox_to_anchor": (0, -0.02),
        "borderaxespad": 0,
        "borderpad": 0.4,
    }
    axes.legend(
        handles=_legend(ticks),
        **legend_position,
        ncols=6,
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
    )
    if path is not None:
        figure.savefig(path)
    return figure


def _summary(schedule: Schedule, pace: str, times: dict[str, Times]) -> str:
    program_kind = " in lockstep" if schedule.ticks.message_ticks == 1 else ", messages sent ahead"
    duration = (
        plural(schedule.num_ticks, "tick") + program_kind
        if pace == "lockstep"
        else "stages at their own pace"
    )
    peak = plural(max(schedule.peak_activations), "activation")
    idle_share = schedule.bubble_rate(pace=pace, **times)
    return f"{duration}, {idle_share:.1%} idle, at most {peak} per stage"


def _lockstep_boxes(ticks: Ticks, times: PassTimes) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return where the boxes [V, M] of each kind begin, and the edges of all ticks.

    Passes of one tick follow each other.

    If messages are sent ahead, stages begin a tick at different times: the edges are only the
    beginning and the end of all.
    """
    begins = program_begins(ticks, times)
    stage = np.asarray(ticks.stage_of)[:, None]
    lefts = {}
    busy_time = np.zeros((ticks.num_ticks, ticks.num_stages))
    for kind, pass_ticks in ticks.passes.items():
        lefts[kind] = begins[pass_ticks, stage] + busy_time[pass_ticks, stage]
        np.add.at(
            busy_time,
            (pass_ticks, stage),
            np.broadcast_to(np.asarray(times.passes[kind])[:, None], pass_ticks.shape),
        )
    return lefts, begins[:, 0] if ticks.message_ticks == 1 else np.asarray([0.0, begins[-1].max()])


def _own_pace_boxes(ticks: Ticks, times: PassTimes) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return where the boxes [V, M] of each kind begin, and the beginning and the end of the
    picture.
    """
    lefts = {kind: np.asarray(begins) for kind, begins in own_pace(ticks, times).items()}
    end = max(
        (lefts[kind] + np.asarray(durations)[:, None]).max()
        for kind, durations in times.passes.items()
    )
    return lefts, np.asarray([0.0, end])


def _draw_background(axes: "Axes", ticks: Ticks, edges: np.ndarray, unit: str) -> None:
    """Draw a pale band per stage, where gaps between boxes show the bubble.

    In lockstep, also draw numbered ticks.
    """
    for stage in range(ticks.num_stages):
        axes.broken_barh(
            [(0, edges[-1])], (stage - _HALF_HEIGHT, 2 * _HALF_HEIGHT), facecolor=_IDLE, zorder=0
        )
    axes.xaxis.tick_top()
    if unit == "tick":
        axes.vlines(edges, -0.5, ticks.num_stages - 0.5, color="white", linewidth=1, zorder=1)
        step = max(1, round(ticks.num_ticks / 60))
        middles = (edges[:-1] + edges[1:]) / 2
        axes.set_xticks(middles[::step], map(str, range(0, ticks.num_ticks, step)))
    axes.annotate(
        unit,
        (0, 1),
        (-3 if unit == "tick" else -8, 4),
        "axes fraction",
        "offset points",
        color=_INK,
        fontsize=8,
        ha="right",
    )


def _draw_passes(
    axes: "Axes", ticks: Ticks, times: PassTimes, lefts: dict[str, np.ndarray], inches: float
) -> None:
    """Draw one box per pass, as wide as its time; `inches` is the width of one unit of time."""
    shortest = min(
        (x for durations in times.passes.values() for x in durations if x > 0), default=1.0
    )
    size = min(8.0, 72 * inches * shortest / (0.75 * len(str(ticks.num_micro_batches - 1)) + 0.3))
    shades = _shades(ticks)
    for kind, rows in lefts.items():
        for v, stage in enumerate(ticks.stage_of):
            color = shades[kind][ticks.chunk_of[v]]
            cost = times.passes[kind][v]
            boxes = [(x, cost) for x in rows[v]]
            axes.broken_barh(
                boxes,
                (stage - _HALF_HEIGHT, 2 * _HALF_HEIGHT),
                facecolor=color,
                edgecolor="white",
                linewidth=0.6,
                zorder=2,
            )
            ink = "white" if np.dot(color, (0.299, 0.587, 0.114)) < 0.62 else _INK
            for m, x in enumerate(rows[v] if size >= _MIN_FONT_SIZE else ()):
                label = axes.text(x + cost / 2, stage, str(m), color=ink, fontsize=size, zorder=3)
                label.set(ha="center", va="center_baseline", in_layout=False)


def _shades(ticks: Ticks) -> dict[str, np.ndarray]:
    """Return the colours of each kind, [chunks, 3], paler from chunk to chunk."""
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
        handles += [
            Patch(facecolor=shades["forward"][c], label=f"chunk {c}") for c in sorted({0, last})
        ]
    return handles
