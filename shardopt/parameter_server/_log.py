"""The event log of a run, from which the run can be repeated bit for bit."""

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from shardopt.core import calling, value_error
from shardopt.parameter_server._views import Segment, summarize, timeline
from shardopt.runtime._files import write_atomic

KINDS = ("join", "pull", "push", "refuse", "leave", "resume")


class Event(NamedTuple):
    """One entry of the log.

    Attributes:
      kind: "join", "pull", "push" or "leave". Or "refuse" for a push that was not used because it
        was not finite. Or "resume" for a worker that continues after the server was restored from a
        checkpoint, and gives up its step in flight.
      worker: the number of the worker.
      clock: the step that a pull begins or a push finishes; for other kinds the worker's next step.
      version: the number of updates applied to the parameters, after this event.
      pulled: for a push, the version that it was computed from; otherwise `version`.
      staleness: by how many *clocks* the worker was ahead of the slowest when it began this step: 0
        to max_staleness.
      time: seconds since the run began, measured or virtual. The mathematics does not depend on it.
      waited: for a pull or a leave, for how many seconds before it the bound held back the worker,
        which was ready.
    """

    kind: str
    worker: int
    clock: int
    version: int
    pulled: int
    staleness: int = 0
    time: float = 0.0
    waited: float = 0.0

    def without_times(self) -> "Event":
        """Return the event with its times set to 0, as the server makes it."""
        return self._replace(time=0.0, waited=0.0)

    @property
    def ends_round(self) -> bool:
        """Whether the worker has finished a round of its data.

        It draws a round that it did not finish again.
        """
        return self.kind in ("push", "refuse")

    @property
    def delay(self) -> int:
        """Versions that passed between the pull and the push, without the version that the push
        made.

        With a bound of s clocks and n workers that stay, the delay is at most (n - 1)(2s + 1). Each
        of the other workers may be s steps behind at the pull and s + 1 steps ahead at the push.
        With max_staleness=0 the delay is 0, because all pushes of a clock are applied as one
        update.
        """
        return max(0, self.version - self.pulled - (self.kind == "push"))


FORMAT = 1
_COLUMNS = Event._fields


Header = Mapping[str, Any]
"""The settings of a run, and checksums of its parameters, as JSON."""


class Log:
    """The events of a run in order, and the settings of the run.

    An event takes about 64 bytes of memory.

    Attributes:
      header: the settings that a replay needs, and checksums of the parameters. The settings are
        `max_staleness`, `rule`, `nonfinite`, `rng` and the `devices` of each worker. The checksums
        are `initial` and `final`, which is None for a run that was interrupted.

    Example:
      >>> from shardopt.parameter_server._log import Event
      >>> log = Log({"max_staleness": 0})
      >>> log.append(Event("join", worker=0, clock=0, version=0, pulled=0))
      >>> len(log), log[0].kind
      (1, 'join')
    """

    def __init__(self, header: Header):
        self.header = dict(header)
        # integers, and the two times as floats
        # Columns and not tuples: a run of days has millions of events.
        self._columns = tuple(map(array, "qqqqqqdd"))

    def append(self, event: Event) -> None:
        """Add an event at the end."""
        for column, value in zip(self._columns, (KINDS.index(event.kind), *event[1:]), strict=True):
            column.append(value)

    def summary(self) -> dict[str, Any]:
        """Return the summary of a run: counts, rates, histograms and waiting times.

        Returns:
          A dict with these entries.

          - "seconds", "updates" (versions of the parameters), "pushes" (without refused ones) and
            "refused";
          - "updates_per_second" and "pushes_per_second";
          - "staleness" {clocks: pushes} and "delay" {versions: pushes};
          - "wait_seconds" {worker: seconds that the bound held it back};
          - "step_seconds" {worker: seconds between pulls and their pushes};
          - "data_seconds" {worker: seconds between its steps, without waiting}.

        Example:
          >>> import shardopt as so
          >>> workers = [so.parameter_server.SimulatedWorker(step_seconds=s) for s in (1.0, 3.0)]
          >>> summary = so.parameter_server.simulate(workers, num_updates=4).log.summary()
          >>> {name: summary[name] for name in ("seconds", "pushes", "staleness", "wait_seconds")}
          {'seconds': 12.0, 'pushes': 8, 'staleness': {0: 8}, 'wait_seconds': {0: 8.0, 1: 0.0}}
        """
        return summarize(self)

    def timeline(self) -> list[Segment]:
        """Return the periods when each worker computed or waited, in the order of their ends.

        Example:
          >>> import shardopt as so
          >>> so.parameter_server.simulate(2, num_updates=1).log.timeline()[0]
          Segment(worker=0, doing='step', start=0.0, end=1.0)
        """
        return timeline(self)

    def columns(self) -> dict[str, np.ndarray]:
        """Return a copy of the events as arrays, one for each field of `Event`.

        Kinds are numbers.
        """
        return {
            name: np.array(column) for name, column in zip(_COLUMNS, self._columns, strict=True)
        }

    @classmethod
    def from_columns(cls, header: Header, columns: Mapping[str, np.ndarray]) -> "Log":
        """Return the log that has these `columns`."""
        log = cls(header)
        for name, column in zip(_COLUMNS, log._columns, strict=True):
            column.frombytes(np.ascontiguousarray(columns[name], column.typecode).tobytes())
        return log

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Event:
        kind, *values = (column[index] for column in self._columns)
        return Event(KINDS[kind], *values)

    def __iter__(self) -> Iterator[Event]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Log):
            return NotImplemented
        return (self.header, self._columns) == (other.header, other._columns)

    __hash__ = None  # type: ignore[assignment]  # a log is mutable

    def __repr__(self) -> str:
        return f"Log({len(self)} events, max_staleness={self.header.get('max_staleness')})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON lines: the header, then one list per event, in the order that the header's
        `columns` names.

        A file at `path` is always complete.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"format": FORMAT, "events": len(self), "columns": _COLUMNS, **self.header}
        events = (json.dumps(event, separators=(",", ":")) for event in self)
        write_atomic(path, "\n".join([json.dumps(header), *events, ""]))

    @classmethod
    @calling("parameter_server.Log.load")
    def load(cls, path: str | os.PathLike[str]) -> "Log":
        """Read a log that `save` wrote.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if the file is not a log, is cut off, or a line cannot be read.
        """
        with Path(path).open(encoding="utf-8") as file:
            lines = file.read().splitlines()
        header = _parse(lines[0]) if lines else None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            problem = f"{os.fspath(path)} is no event log of format {FORMAT}."
            raise value_error(problem, fix="pass a file that Log.save wrote.")
        count = header.pop("events")
        del header["format"], header["columns"]
        log = cls(header)
        for number, line in enumerate(lines[1:], start=2):
            event = _parse(line)
            if not _is_event(event):
                raise value_error(f"line {number} of {os.fspath(path)} is no event: {line[:80]!r}.")
            log.append(Event(*event))
        if len(log) != count:
            raise value_error(
                f"{os.fspath(path)} has {len(log)} events, and its header says {count}."
            )
        return log


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _is_event(value: object) -> TypeGuard[list[Any]]:
    return (
        isinstance(value, list)
        and len(value) == len(_COLUMNS)
        and value[0] in KINDS
        and all(type(number) is int for number in value[1:-2])
        and all(type(number) in (int, float) for number in value[-2:])
    )
