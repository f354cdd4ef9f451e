"""How far each worker is in its data, as the log says."""

from collections.abc import Iterable

from shardopt.parameter_server.events import Event


class Positions:
    """The rounds of data that each worker has taken since it joined; a step that a resumed run gave up is not one.

    Example:
      >>> where = Positions([Event(kind, 0, 0, 0, 0) for kind in ("join", "pull", "push", "pull", "resume")])
      >>> where.of(0)
      1
    """

    def __init__(self, events: Iterable[Event] = ()):
        self._taken: dict[int, int] = {}
        self._busy: set[int] = set()
        for event in events:
            self.record(event)

    def record(self, event: Event) -> None:
        """Take note of one more event."""
        worker = event.worker
        if event.kind == "join":
            self._taken[worker] = 0
        elif event.kind == "pull":
            self._taken[worker] += 1
            self._busy.add(worker)
        elif event.kind == "resume" and worker in self._busy:
            self._taken[worker] -= 1
        if event.kind != "pull":
            self._busy.discard(worker)

    def of(self, worker: int) -> int:
        """Return the rounds that a worker has taken."""
        return self._taken[worker]
