"""Goodput: the share of time spent on steps that count, and the causes of the lost time, across
restarts.

    goodput = seconds of steps taken for the first time / seconds since the run began

Every second belongs to one cause. The account is in `goodput.json` next to the checkpoints, with
one entry per attempt. The time between two attempts is lost too if the first one failed.
"""

import contextlib
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from shardopt.runtime import _progress as progress
from shardopt.runtime._files import write_atomic
from shardopt.runtime._launch import BEGAN, HUNG_SECONDS

FILE = "goodput.json"

CAUSES = ("start", "compile", "checkpoint", "evaluate", "redone", "restart", "hang")
"""The causes of lost time, in the order of `Goodput.lost`."""

_STEP_PHASES = ("data", "step", "wait", "log", "agree")
"""The phases of `fit` that belong to a step."""

_WRITE_SECONDS = 1.0
"""Minimum seconds between writes. Time after the last write of a killed process counts as lost to
the restart.
"""


class Goodput(NamedTuple):
    """How much of its time a run spent on steps that count.

    Attributes:
      fraction: `useful` / `seconds`.
      useful: seconds of steps taken for the first time, including waits for batches and for other
        processes.
      seconds: seconds since the run began, without the time after an attempt that ended normally or
        was told to end.
      lost: seconds by cause, only causes with lost time:

        - "start": until the first step began;
        - "compile": the first step of each attempt, which compiles;
        - "checkpoint": training waited for a checkpoint;
        - "evaluate": evaluations;
        - "redone": steps that an earlier attempt had already taken, after its last checkpoint;
        - "restart": from the end of a failed attempt, or from its last write, until the next
          attempt has restored;
        - "hang": until `shardopt launch --hang-timeout` noticed a hang.

      restarts: attempts after the first.
    """

    fraction: float
    useful: float
    seconds: float
    lost: dict[str, float]
    restarts: int

    def __str__(self) -> str:
        lost = ", ".join(
            f"{name} {_percent(seconds / self.seconds)}" for name, seconds in self.lost.items()
        )
        share = f"goodput {_percent(self.fraction)} of {self.seconds:.0f} s"
        text = f"{share}, in steps taken for the first time"
        return f"{text}; lost to {lost}" if lost else text


class _Attempt(NamedTuple):
    began: float
    until: float
    step: int
    ended_well: bool
    seconds: dict[str, float]  # by cause, and "useful"


class Ledger:
    """The account of one call of `fit` and of the attempts before it.

    It also marks phases for the watch of the job.

    Args:
      folder: the folder of the run, whose account is continued; None keeps the account in memory
        only.
    """

    def __init__(self, folder: Path | None):
        self._path = None if folder is None else folder / FILE
        self._earlier = _read(self._path)
        self._highest_step = max((attempt.step for attempt in self._earlier), default=0)
        self._start_time = _start_of_job()
        self._seconds: dict[str, float] = defaultdict(float)
        previous = self._earlier[-1] if self._earlier else None
        is_restart = previous is not None and not previous.ended_well
        if previous is not None and is_restart:
            gap = max(0.0, self._start_time - previous.until)
            hung_seconds = min(gap, float(os.environ.get(HUNG_SECONDS, "0")))
            self._seconds |= {"hang": hung_seconds, "restart": gap - hung_seconds}
        self._first_cause = "restart" if is_restart else "start"
        self._seconds[self._first_cause] += time.time() - self._start_time
        self._phase = "begin"
        self._phase_start = time.monotonic()
        self._step = 0
        self._has_compiled = False
        self._written = 0.0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase of `fit`.

        Args:
          phase: the name of the phase.
          step: the steps taken before it; by default the step of the previous phase.
        """
        progress.mark(phase, step)
        now = time.monotonic()
        self._seconds[self._cause()] += now - self._phase_start
        self._has_compiled = self._has_compiled or self._phase == "step"
        self._phase = phase
        self._phase_start = now
        self._step = self._step if step is None else step
        self.write()

    def total(self) -> Goodput:
        """Return the account so far, up to the last finished phase."""
        attempts = [*self._earlier, self._attempt(ended_well=False)]
        sums: dict[str, float] = defaultdict(float)
        for attempt in attempts:
            for name, seconds in attempt.seconds.items():
                sums[name] += seconds
        useful = sums["useful"]
        total_seconds = max(sum(sums.values()), 1e-9)
        lost = {name: sums[name] for name in CAUSES if sums[name] > 0}
        return Goodput(useful / total_seconds, useful, total_seconds, lost, len(self._earlier))

    def write(self, *, ended_well: bool = False) -> None:
        """Write the account, unless the last write was less than a second ago.

        Always write if `ended_well`.
        """
        if self._path is None or (
            not ended_well and time.monotonic() - self._written < _WRITE_SECONDS
        ):
            return
        self._written = time.monotonic()
        attempts = [
            attempt._asdict() for attempt in (*self._earlier, self._attempt(ended_well=ended_well))
        ]
        # A full disk or a deleted folder does not stop training; the code that needs the folder
        # raises the error.
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps({"attempts": attempts}, indent=1) + "\n")

    def _cause(self) -> str:
        if self._phase == "begin":
            return self._first_cause
        if self._phase == "step" and not self._has_compiled:
            return "compile"
        if self._phase in _STEP_PHASES:
            # An earlier attempt took this step, and lost it with the state.
            return "redone" if self._step < self._highest_step else "useful"
        return self._phase if self._phase in CAUSES else "useful"

    def _attempt(self, *, ended_well: bool) -> _Attempt:
        steps_done = self._step + (
            self._has_compiled and self._phase not in ("data", "step", "wait")
        )
        highest_step = max(steps_done, self._highest_step)
        return _Attempt(self._start_time, time.time(), highest_step, ended_well, self._seconds)


def _read(path: Path | None) -> list[_Attempt]:
    """Return the earlier attempts, or [] if the account is missing or damaged: training does not
    depend on it.
    """
    if path is None:
        return []
    try:
        attempts = [_Attempt(**attempt) for attempt in json.loads(path.read_text())["attempts"]]
        return [
            attempt._replace(seconds={str(k): float(v) for k, v in attempt.seconds.items()})
            for attempt in attempts
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


_counted_starts: list[float] = []


def _start_of_job() -> float:
    """Return when this attempt began, in seconds since 1970.

    For the first `fit` of a launched process it is the start of the process, else now.
    """
    if BEGAN in os.environ and not _counted_starts:
        _counted_starts.append(float(os.environ[BEGAN]))
        return _counted_starts[0]
    return time.time()


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%" if fraction < 0.1 else f"{100 * fraction:.0f}%"
