"""Views of a run: the summary and the timeline of its log, and the current activity of its
workers.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from shardopt.core import MAX_LISTED, plural

if TYPE_CHECKING:
    from shardopt.parameter_server._log import Event


def summarize(log: Iterable["Event"]) -> dict[str, Any]:
    """Return the summary of a run; see `Log.summary`."""
    staleness = Counter()
    delay = Counter()
    kinds = Counter()
    seconds = 0.0
    updates = 0
    workers = set()
    events = list(log)
    for event in events:
        kinds[event.kind] += 1
        seconds = event.time
        updates = event.version
        workers.add(event.worker)
        if event.ends_round:
            staleness[event.staleness] += 1
            delay[event.delay] += 1
    seconds_doing = {
        doing: dict.fromkeys(sorted(workers), 0.0) for doing in ("wait", "step", "data", "lost")
    }
    for segment in timeline(events):
        seconds_doing[segment.doing][segment.worker] += segment.end - segment.start
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
        "wait_seconds": seconds_doing["wait"],
        "step_seconds": seconds_doing["step"],
        "data_seconds": seconds_doing["data"],
    }


_SHORTEST = 1e-9
"""Seconds; a shorter segment is only a rounding error of a difference of times."""


class Segment(NamedTuple):
    """A period of a worker's time.

    Attributes:
      worker: the number of the worker.
      doing: "step", from a pull to its push, with transfers. Or "lost", a step that was never
        pushed. Or "wait", when the bound held it back. Or "data", between its steps without
        waiting, for instance while it loads its next batch.
      start: seconds since the run began.
      end: seconds since the run began.
    """

    worker: int
    doing: str
    start: float
    end: float


def timeline(log: Iterable["Event"]) -> list[Segment]:
    """Return the periods when each worker computed or waited, in the order of their ends."""
    segments: list[Segment] = []
    # worker -> ("step" or "between" steps, the time since which it is)
    since: dict[int, tuple[str, float]] = {}
    last_time = 0.0

    def add(worker: int, doing: str, start: float, end: float) -> None:
        if end - start > _SHORTEST:
            segments.append(Segment(worker, doing, start, end))

    for event in log:
        worker = event.worker
        last_time = event.time
        if worker in since:
            activity, start = since.pop(worker)
            if activity == "step":
                add(
                    worker,
                    "lost" if event.kind in ("leave", "resume") else "step",
                    start,
                    last_time,
                )
            else:
                asked_at = last_time - event.waited
                asked_at = start if asked_at - start <= _SHORTEST else asked_at
                add(worker, "data", start, asked_at)
                add(worker, "wait", asked_at, last_time)
        if event.kind != "leave":
            since[worker] = ("step" if event.kind == "pull" else "between", last_time)
    for worker, (activity, start) in sorted(since.items()):
        add(worker, "lost" if activity == "step" else "wait", start, last_time)
    return segments


class WorkerStatus(NamedTuple):
    """The current activity of one worker.

    Attributes:
      worker: the number of the worker.
      doing: "computes", "waits" (held back by the bound), "loads" (between its steps, without
        waiting) or "gone".
      clock: the number of its current step.
      pushes: the pushes taken from it so far, without refused ones.
      is_new: whether it has pushed nothing since it joined, and may be compiling.
    """

    worker: int
    doing: str
    clock: int = 0
    pushes: int = 0
    is_new: bool = False


class Status(NamedTuple):
    """The state of a run at one moment.

    Attributes:
      seconds: seconds since the run began.
      updates: updates that the server has made.
      num_updates: updates that the server will make in total.
      workers: all workers that ever joined, in order.
    """

    seconds: float
    updates: int
    num_updates: int
    workers: tuple[WorkerStatus, ...]


class WorkerStats:
    """The last event and the pushes of each worker, from the events so far.

    Example:
      >>> from shardopt.parameter_server._log import Event
      >>> stats = WorkerStats([Event("join", 3, 0, 0, 0), Event("pull", 3, 0, 0, 0)])
      >>> stats.workers(waits=lambda worker: False)
      (WorkerStatus(worker=3, doing='computes', clock=0, pushes=0, is_new=True),)
    """

    def __init__(self, events: Iterable["Event"] = ()):
        self._last_event: dict[int, Event] = {}
        # up to the last event; `doing` is not known
        self._stats: dict[int, WorkerStatus] = {}
        for event in events:
            self.record(event)

    def record(self, event: "Event") -> None:
        """Count an event."""
        worker = event.worker
        kind = event.kind
        stats = self._stats.get(worker) or WorkerStatus(worker, "")
        self._last_event[worker] = event
        self._stats[worker] = stats._replace(
            clock=event.clock + event.ends_round,
            pushes=stats.pushes + (kind == "push"),
            is_new=stats.is_new if kind == "pull" else kind in ("join", "resume"),
        )

    def workers(self, waits: Callable[[int], bool]) -> tuple[WorkerStatus, ...]:
        """Return the current status of each worker.

        `waits(worker)`: does the bound hold back a worker between its steps?
        """

        def status_of(worker: int) -> WorkerStatus:
            last = self._last_event[worker]
            between_steps = (
                "waits" if last.kind not in ("pull", "leave") and waits(worker) else "loads"
            )
            doing = {"pull": "computes", "leave": "gone"}.get(last.kind, between_steps)
            return self._stats[worker]._replace(doing=doing)

        return tuple(map(status_of, sorted(self._last_event)))


_LINE_SECONDS = 10.0


def make_show(caller: str, *, shown: bool) -> Callable[..., None]:
    """Return `show(status, last=False)`, which prints a run as a line, now and then; or prints
    nothing.

    It may be called very often, and calls `status()` only for a line: if enough time has passed
    since the previous one, or if it is the `last`.
    """
    last_shown = -float("inf")

    def show_if_due(status: Callable[[], Status], last: bool = False) -> None:
        nonlocal last_shown
        now = time.monotonic()
        if shown and (last or now - last_shown >= _LINE_SECONDS):
            last_shown = now
            print(progress_line(caller, status()), file=sys.stderr, flush=True)

    return show_if_due


def progress_line(caller: str, status: Status) -> str:
    """Return the state of a run as one line."""
    groups: dict[str, list[str]] = {}
    for worker in status.workers:
        # New, but with pushes: those are of an earlier incarnation.
        has_restarted = worker.is_new and worker.pushes and worker.doing != "gone"
        doing = "restarts" if has_restarted else worker.doing
        groups.setdefault(doing, []).append(str(worker.worker))
    texts = []
    for doing, numbers in groups.items():
        verb = doing.removesuffix("s") if len(numbers) > 1 else doing
        names = f" ({', '.join(numbers[:MAX_LISTED])})" if doing in ("restarts", "gone") else ""
        texts.append(f"{len(numbers)} {verb}{names}")
    present = [worker for worker in status.workers if worker.doing != "gone"]
    by_clock = sorted(present, key=lambda worker: worker.clock)
    if by_clock and by_clock[0].clock < by_clock[-1].clock:
        behind = by_clock[-1].clock - by_clock[0].clock
        texts.append(f"slowest {by_clock[0].worker} ({plural(behind, 'step')} behind)")
    rate = sum(worker.pushes for worker in status.workers) / max(status.seconds, 1e-9)
    return (
        f"{caller}: update {status.updates}/{status.num_updates}  {rate:.4g} pushes/s "
        f" workers: {', '.join(texts)}"
    )
