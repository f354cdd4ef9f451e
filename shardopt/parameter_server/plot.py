"""A run as a picture: one row a worker, who computed, who waited, who was lost."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardopt.core.errors import complaint
from shardopt.parameter_server.events import Event
from shardopt.parameter_server.summary import summarize, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"step": "#3369b2", "wait": "#dfa63a", "data": "#8fa3b8", "lost": "#c04a3a"}
_NAMES = {
    "step": "step, from pull to push",
    "wait": "waits for others",
    "data": "gets its data",
    "lost": "step never pushed",
}
_INK, _IDLE = "#22272e", "#eceef2"
_MOST = 64  # rows that can be told apart


def plot_timeline(
    log: Iterable[Event], path: str | os.PathLike[str] | None = None, *, until: float | None = None
) -> "Figure":
    """Draw who computed and who waited when.

    Args:
      log: the event log of a run, or of a simulation.
      path: where to write the picture; the ending says in which format.
      until: draw this many seconds from the start; by default all.

    Returns:
      The matplotlib figure.

    Raises:
      ValueError: if the log has no events, or more than 64 workers.

    Example:
      >>> import shardopt as so
      >>> result = so.parameter_server.simulate(2, num_updates=3)
      >>> plot_timeline(result.log).axes[0].get_title(loc="left")
      '3 updates in 3 s, 2 workers'
    """
    from matplotlib.figure import Figure  # not pyplot: no backend, no window, nothing to close
    from matplotlib.patches import Patch

    events, who = list(log), "plot_timeline"
    workers = sorted({event.worker for event in events})
    if not events:
        raise ValueError(f"{who}: the log has no events.")
    if len(workers) > _MOST:
        what = f"{len(workers)} workers are more rows than can be told apart, at most {_MOST}."
        raise ValueError(complaint(who, what, fix="pick some: [event for event in log if event.worker < 32]."))
    figures, segments = summarize(events), timeline(events)
    end = figures["seconds"] if until is None else until
    figure = Figure(figsize=(11, 0.34 * len(workers) + 1.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for row, worker in enumerate(workers):
        axes.broken_barh([(0, end)], (row - 0.4, 0.8), facecolor=_IDLE, zorder=0)
        for doing, color in _COLORS.items():
            mine = [one for one in segments if (one.worker, one.doing) == (worker, doing) and one.start < end]
            bars = [(one.start, min(one.end, end) - one.start) for one in mine]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=0.3)
    _dress(axes, workers, figures, end)
    handles = [Patch(facecolor=color, label=_NAMES[doing]) for doing, color in _COLORS.items()]
    handles.append(Patch(facecolor=_IDLE, label="not there"))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=8, labelcolor=_INK)
    if path is not None:
        figure.savefig(path)
    return figure


def _dress(axes: Any, workers: list[int], figures: dict[str, Any], end: float) -> None:
    title = f"{figures['updates']} updates in {figures['seconds']:.3g} s, {len(workers)} workers"
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlim(0, end or 1.0)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_yticks(range(len(workers)), [f"worker {worker}" for worker in workers])
    axes.set_xlabel("seconds", color=_INK, fontsize=8, loc="left")
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    axes.spines[:].set_visible(False)
