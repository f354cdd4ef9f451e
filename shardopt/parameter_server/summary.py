"""What a log says of a run: rates, how stale, who waited."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardopt.parameter_server.events import Event

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
