"""Goodput: which part of the time went into steps that count, and what the rest was lost to, across restarts.

    goodput = seconds of steps taken for the first time / seconds since the run began

Every second belongs to one cause. The account is in `goodput.json` beside the checkpoints, one entry for each attempt; where
an attempt did not end well, or its launcher ended it to go on with more processes, the time until the next one began was lost too.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from shardopt.runtime import progress
from shardopt.runtime.files import write_atomic
from shardopt.runtime.launch import BEGAN, HUNG_SECONDS, RESTART

FILE = "goodput.json"

CAUSES = ("start", "compile", "checkpoint", "evaluate", "redone", "restart", "hang")
"""What time is lost to, in the order of `Goodput.lost`."""

_STEP = ("data", "step", "wait", "log", "agree")
"""Phases of `fit` that make a step."""

_EVERY = 1.0
"""Seconds between writes, at least; what came after the last write of a killed process counts as lost to the restart."""


class Goodput(NamedTuple):
    """How much of its time a run spent on steps that count.

    Attributes:
      fraction: `useful` / `seconds`.
      useful: seconds of steps taken for the first time, waiting for data and for each other included.
      seconds: since the run began, without the time after an attempt that ended by itself or was told to end.
      lost: seconds by cause, only those that cost any: "start" (until the first step began), "compile" (the first step of
        each attempt, which compiles), "checkpoint" (training stood still for it), "evaluate", "redone" (steps that an earlier
        attempt had taken, after its last checkpoint), "restart" (from the end of an attempt that failed, or from what it last
        accounted for, until the next one has restored), "hang" (until `shardopt launch --hang-timeout` noticed).
      restarts: attempts after the first.
    """

    fraction: float
    useful: float
    seconds: float
    lost: dict[str, float]
    restarts: int

    def __str__(self) -> str:
        lost = ", ".join(f"{name} {_percent(seconds / self.seconds)}" for name, seconds in self.lost.items())
        return f"goodput {_percent(self.fraction)} of {self.seconds:.0f} s" + (f"; lost to {lost}" if lost else "")


class _Attempt(NamedTuple):
    began: float
    until: float
    step: int
    ended_well: bool
    seconds: dict[str, float]  # by cause, and "useful"


class Ledger:
    """The account of one call of `fit`, and of the attempts before it; marks its phases for whoever watches too."""

    def __init__(self, folder: Path | None):
        """Begin to count; with a folder go on with the account there, and write to it."""
        self._path = None if folder is None else folder / FILE
        self._earlier = _read(self._path)
        self._furthest = max((one.step for one in self._earlier), default=0)
        relaunched = RESTART in os.environ and not _counted
        self._began = _start_of_job()
        self._seconds: dict[str, float] = {}
        last = self._earlier[-1] if self._earlier else None
        again = last is not None and (relaunched or not last.ended_well)
        if last is not None and again:
            gap = max(0.0, self._began - last.until)
            hung = min(gap, float(os.environ.get(HUNG_SECONDS, "0")))
            self._seconds = {"hang": hung, "restart": gap - hung}
        self._beginning = "restart" if again else "start"
        self._seconds[self._beginning] = self._seconds.get(self._beginning, 0.0) + time.time() - self._began
        self._phase, self._since, self._step, self._compiled, self._written = "begin", time.monotonic(), 0, False, 0.0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase of `fit`; a step is counted by the steps taken before it."""
        progress.mark(phase, step)
        now = time.monotonic()
        cause = self._cause()
        self._seconds[cause] = self._seconds.get(cause, 0.0) + now - self._since
        self._compiled = self._compiled or self._phase == "step"
        self._phase, self._since = phase, now
        self._step = self._step if step is None else step
        self.write()

    def total(self) -> Goodput:
        """Return the account so far, up to the last phase that ended."""
        attempts = [*self._earlier, self._attempt(ended_well=False)]
        sums: dict[str, float] = {}
        for one in attempts:
            for name, seconds in one.seconds.items():
                sums[name] = sums.get(name, 0.0) + seconds
        useful, wall = sums.get("useful", 0.0), max(sum(sums.values()), 1e-9)
        lost = {name: sums[name] for name in CAUSES if sums.get(name, 0.0) > 0}
        return Goodput(useful / wall, useful, wall, lost, len(self._earlier))

    def write(self, *, ended_well: bool = False) -> None:
        """Write the account, unless it was written just now or this attempt has ended."""
        if self._path is None or (not ended_well and time.monotonic() - self._written < _EVERY):
            return
        self._written = time.monotonic()
        attempts = [one._asdict() for one in (*self._earlier, self._attempt(ended_well=ended_well))]
        with contextlib.suppress(
            OSError
        ):  # a full disk, a deleted folder: no reason to stop, and said by what needs them
            write_atomic(self._path, json.dumps({"attempts": attempts}, indent=1) + "\n")

    def _cause(self) -> str:
        if self._phase == "begin":
            return self._beginning
        if self._phase == "step" and not self._compiled:
            return "compile"
        if self._phase in _STEP:
            return "redone" if self._step < self._furthest else "useful"
        return self._phase if self._phase in CAUSES else "useful"

    def _attempt(self, *, ended_well: bool) -> _Attempt:
        done = self._step + (self._compiled and self._phase not in ("data", "step", "wait"))
        furthest = max(done, self._furthest)
        return _Attempt(self._began, time.time(), furthest, ended_well, self._seconds)


def _read(path: Path | None) -> list[_Attempt]:
    """Return the attempts so far; none where the account is missing or damaged, for it is only an account."""
    if path is None:
        return []
    try:
        found = [_Attempt(**one) for one in json.loads(path.read_text())["attempts"]]
        return [one._replace(seconds={str(k): float(v) for k, v in one.seconds.items()}) for one in found]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


_counted: list[float] = []


def _start_of_job() -> float:
    """Return when this attempt began, in seconds since 1970: of the first `fit` of a launched process its start, else now."""
    if BEGAN in os.environ and not _counted:
        _counted.append(float(os.environ[BEGAN]))
        return _counted[0]
    return time.time()


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"
