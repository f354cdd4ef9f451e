"""Who is doing what right now: the run in a few numbers a worker, counted event by event."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardopt.parameter_server.events import Event


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
    """

    worker: int
    doing: str
    seconds: float
    clock: int
    staleness: int
    pushes: int
    waited: float


class Status(NamedTuple):
    """A run under way.

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


class Tally:
    """What the events so far say of each worker.

    Example:
      >>> tally = Tally([Event("join", 3, 0, 0, 0, time=1.0), Event("pull", 3, 0, 0, 0, time=2.5, waited=0.5)])
      >>> tally.workers(now=4.0, waits=lambda worker: False)
      (WorkerStatus(worker=3, doing='computes', seconds=1.5, clock=0, staleness=0, pushes=0, waited=0.5),)
    """

    def __init__(self, events: Iterable[Event] = ()):
        self._last: dict[int, Event] = {}
        self._pushes: dict[int, int] = {}
        self._waited: dict[int, float] = {}
        self._ahead: dict[int, int] = {}
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

    def workers(self, now: float, waits: Callable[[int], bool]) -> tuple[WorkerStatus, ...]:
        """Return the workers as they are; `waits(worker)`: would the bound hold back one that is between its steps?"""

        def one(worker: int) -> WorkerStatus:
            last = self._last[worker]
            between = "waits" if last.kind not in ("pull", "leave") and waits(worker) else "loads"
            doing = {"pull": "computes", "leave": "gone"}.get(last.kind, between)
            at = last.clock + (last.kind in ("push", "refuse"))
            ahead = self._ahead.get(worker, 0)
            return WorkerStatus(worker, doing, now - last.time, at, ahead, self._pushes[worker], self._waited[worker])

        return tuple(one(worker) for worker in sorted(self._last))
