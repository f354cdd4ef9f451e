"""What the log of a run says: its summary, its timeline and a picture of it, and who is doing what right now."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shardopt.core.errors import format_error
from shardopt.core.extras import is_installed, require
from shardopt.parameter_server.log import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table


def summarize(log: Iterable[Event]) -> dict[str, Any]:
    """Return the figures of a run: counts, rates, histograms and waiting times.

    Args:
      log: the event log.

    Returns:
      A dict of "seconds"; "updates" (versions of the parameters) and "pushes" (of workers, refused ones not counted),
      "refused"; "updates_per_second", "pushes_per_second"; "staleness" {clocks: pushes}; "delay" {versions: pushes};
      "wait_seconds" (held back by the bound), "step_seconds" (from pull to push) and "data_seconds" (of its own, between
      steps) {worker: seconds}.

    Example:
      >>> import shardopt as so
      >>> workers = [so.parameter_server.SimulatedWorker(step_seconds=s) for s in (1.0, 3.0)]
      >>> result = so.parameter_server.simulate(workers, num_updates=4)
      >>> {name: result.metrics[name] for name in ("seconds", "pushes", "staleness", "wait_seconds")}
      {'seconds': 12.0, 'pushes': 8, 'staleness': {0: 8}, 'wait_seconds': {0: 8.0, 1: 0.0}}
    """
    staleness, delay, kinds = Counter(), Counter(), Counter()
    seconds, updates, members = 0.0, 0, set()
    events = list(log)
    for event in events:
        kinds[event.kind] += 1
        seconds, updates = event.time, event.version
        members.add(event.worker)
        if event.kind in ("push", "refuse"):
            staleness[event.staleness] += 1
            delay[event.delay] += 1
    spent = {doing: dict.fromkeys(sorted(members), 0.0) for doing in ("wait", "step", "data", "lost")}
    for segment in timeline(events):
        spent[segment.doing][segment.worker] += segment.end - segment.start
    rate = 1 / seconds if seconds > 0 else 0.0
    return {
        "seconds": seconds,
        "updates": updates,
        "pushes": kinds["push"],
        "refused": kinds["refuse"],
        "updates_per_second": updates * rate,
        "pushes_per_second": kinds["push"] * rate,
        "staleness": dict(sorted(staleness.items())),
        "delay": dict(sorted(delay.items())),
        "wait_seconds": spent["wait"],
        "step_seconds": spent["step"],
        "data_seconds": spent["data"],
    }


_SHORTEST = 1e-9
"""Seconds; what is shorter is the rounding of a difference of times."""


class Segment(NamedTuple):
    """A stretch of a worker's time.

    Attributes:
      worker: whose.
      doing: "step", from a pull to the push (transfers included); "lost", a step that was never pushed; "wait", held
        back by the bound; "data", between its steps with something of its own, such as its next batch.
      start: seconds since the run began.
      end: the same.
    """

    worker: int
    doing: str
    start: float
    end: float


def timeline(log: Iterable[Event]) -> list[Segment]:
    """Return who computed and who waited when, from a log, in the order in which the stretches end.

    Example:
      >>> import shardopt as so
      >>> result = so.parameter_server.simulate(2, num_updates=1)
      >>> timeline(result.log)[0]
      Segment(worker=0, doing='step', start=0.0, end=1.0)
    """
    segments: list[Segment] = []
    since: dict[int, tuple[str, float]] = {}  # worker -> in a "step" or between steps, and from when on
    last = 0.0

    def add(worker: int, doing: str, start: float, end: float) -> None:
        if end - start > _SHORTEST:
            segments.append(Segment(worker, doing, start, end))

    for event in log:
        worker, last = event.worker, event.time
        if worker in since:
            was, start = since.pop(worker)
            if was == "step":
                add(worker, "lost" if event.kind in ("leave", "resume") else "step", start, last)
            else:
                asked = last - event.waited
                asked = start if asked - start <= _SHORTEST else asked
                add(worker, "data", start, asked)
                add(worker, "wait", asked, last)
        if event.kind != "leave":
            since[worker] = ("step" if event.kind == "pull" else "between", last)
    for worker, (was, start) in sorted(since.items()):
        add(worker, "lost" if was == "step" else "wait", start, last)
    return segments


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
    events, who = list(log), "plot_timeline"
    require("matplotlib", extra="plot", who=who)
    from matplotlib.figure import Figure  # not pyplot: no backend, no window, nothing to close
    from matplotlib.patches import Patch

    workers = sorted({event.worker for event in events})
    if not events:
        raise ValueError(f"{who}: the log has no events.")
    if len(workers) > _MOST:
        what = f"{len(workers)} workers are more rows than can be told apart, at most {_MOST}."
        raise ValueError(format_error(who, what, fix="pick some: [event for event in log if event.worker < 32]."))
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


def _dress(axes: "Axes", workers: list[int], figures: dict[str, Any], end: float) -> None:
    title = f"{figures['updates']} updates in {figures['seconds']:.3g} s, {len(workers)} workers"
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlim(0, end or 1.0)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_yticks(range(len(workers)), [f"worker {worker}" for worker in workers])
    axes.set_xlabel("seconds", color=_INK, fontsize=8, loc="left")
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    axes.spines[:].set_visible(False)


class WorkerStatus(NamedTuple):
    """One worker.

    Attributes:
      worker: its number.
      doing: "computes", "waits" (held back by the bound), "loads" (between its steps, by itself) or "gone".
      seconds: since when it is doing that.
      clock: the step that it is at.
      staleness: by how many clocks it was ahead of the slowest when it began its last step.
      pushes: taken from it so far; refused ones not counted.
      waited: for how many seconds the bound has held it back.
      is_new: whether it has pushed nothing since it joined, and may be compiling.
    """

    worker: int
    doing: str
    seconds: float
    clock: int
    staleness: int
    pushes: int
    waited: float
    is_new: bool = False


class Status(NamedTuple):
    """A run at one moment.

    Attributes:
      seconds: since it began.
      updates: made by the server.
      num_updates: to be made.
      workers: all that ever joined, in order.
    """

    seconds: float
    updates: int
    num_updates: int
    workers: tuple[WorkerStatus, ...]


class WorkerStats:
    """What the events so far say of each worker.

    Example:
      >>> stats = WorkerStats([Event("join", 3, 0, 0, 0, time=1.0), Event("pull", 3, 0, 0, 0, time=2.5, waited=0.5)])
      >>> stats.workers(now=4.0, waits=lambda worker: False)
      (WorkerStatus(worker=3, doing='computes', seconds=1.5, clock=0, staleness=0, pushes=0, waited=0.5, is_new=True),)
    """

    def __init__(self, events: Iterable[Event] = ()):
        self._last: dict[int, Event] = {}
        self._pushes: dict[int, int] = {}
        self._waited: dict[int, float] = {}
        self._ahead: dict[int, int] = {}
        self._new: set[int] = set()
        for event in events:
            self.record(event)

    def record(self, event: Event) -> None:
        """Take note of one more event."""
        worker = event.worker
        self._last[worker] = event
        self._pushes[worker] = self._pushes.get(worker, 0) + (event.kind == "push")
        self._waited[worker] = self._waited.get(worker, 0.0) + event.waited
        if event.kind == "pull":
            self._ahead[worker] = event.staleness
        elif event.kind in ("join", "resume"):
            self._new.add(worker)
        else:
            self._new.discard(worker)

    def workers(self, now: float, waits: Callable[[int], bool]) -> tuple[WorkerStatus, ...]:
        """Return the workers as they are; `waits(worker)`: would the bound hold back one that is between its steps?"""

        def one(worker: int) -> WorkerStatus:
            last = self._last[worker]
            between = "waits" if last.kind not in ("pull", "leave") and waits(worker) else "loads"
            doing = {"pull": "computes", "leave": "gone"}.get(last.kind, between)
            at = last.clock + (last.kind in ("push", "refuse"))
            ahead = self._ahead.get(worker, 0)
            pushes, waited = self._pushes[worker], self._waited[worker]
            return WorkerStatus(worker, doing, now - last.time, at, ahead, pushes, waited, worker in self._new)

        return tuple(one(worker) for worker in sorted(self._last))


class Show(Protocol):
    """Shows a run, as often as one likes: `status()` is called only when something is to be shown."""

    def __call__(self, status: Callable[[], Status], last: bool = False) -> None:
        """Show it if it is time, and in any case if it is the `last`."""
        ...


_TABLE_SECONDS, _LINE_SECONDS = 0.25, 10.0
_MOST_ROWS = 32
_STYLES = {"computes": "green", "waits": "yellow", "loads": "blue", "gone": "dim"}


@contextmanager
def show_workers(who: str, *, shown: bool, console: "Console | None" = None) -> Iterator[Show]:
    """Show a run for as long as the context lasts."""
    if not shown:
        yield lambda status, last=False: None
        return
    if console is None and not is_installed("rich"):
        yield _now_and_then(
            _LINE_SECONDS, lambda status: print(progress_line(who, status), file=sys.stderr, flush=True)
        )
        return
    from rich.console import Console

    out = console or Console(stderr=True)
    if not (out.is_terminal or out.is_jupyter):
        yield _now_and_then(
            _LINE_SECONDS, lambda status: out.print(progress_line(who, status), markup=False, highlight=False)
        )
        return
    from rich.live import Live

    with Live(console=out, auto_refresh=False) as live:
        yield _now_and_then(_TABLE_SECONDS, lambda status: live.update(progress_table(who, status), refresh=True))


def progress_line(who: str, status: Status) -> str:
    """Return a run as one line."""
    doing = Counter(one.doing for one in status.workers)
    workers = ", ".join(f"{count} {what.removesuffix('s') if count > 1 else what}" for what, count in doing.items())
    return f"{who}: update {status.updates}/{status.num_updates}  {_rate(status):.4g} pushes/s  workers: {workers}"


def progress_table(who: str, status: Status) -> "Table":
    """Return a run as a table, one row a worker; of more than 32 those that pushed least."""
    from rich.table import Table

    seconds = max(status.seconds, 1e-9)
    title = f"{who}: update {status.updates} of {status.num_updates}, {_rate(status):.4g} pushes/s, {seconds:.0f} s"
    found = Table(title=title, title_justify="left")
    for name in ("worker", "doing", "for s", "step", "ahead", "pushes", "pushes/s", "waited"):
        found.add_column(name, justify="left" if name == "doing" else "right")
    slowest = sorted(status.workers, key=lambda one: one.pushes)[:_MOST_ROWS]
    for one in sorted(slowest):
        numbers = (one.clock, one.staleness, one.pushes, f"{one.pushes / seconds:.3g}", f"{one.waited / seconds:.0%}")
        doing = f"[{_STYLES[one.doing]}]{one.doing}[/]"
        found.add_row(str(one.worker), doing, f"{one.seconds:.1f}", *map(str, numbers))
    if len(status.workers) > _MOST_ROWS:
        found.caption = f"and {len(status.workers) - _MOST_ROWS} more"
    return found


def _rate(status: Status) -> float:
    return sum(one.pushes for one in status.workers) / max(status.seconds, 1e-9)


def _now_and_then(seconds: float, show: Callable[[Status], None]) -> Show:
    shown = [-float("inf")]

    def maybe(status: Callable[[], Status], last: bool = False) -> None:
        now = time.monotonic()
        if last or now - shown[0] >= seconds:
            shown[0] = now
            show(status())

    return maybe
