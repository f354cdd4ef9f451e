"""What this process is doing, for whoever watches it: marks of step and phase, and a thread that reports them.

Marks are made by the threads that train and save; the thread that reports only reads them, so a collective that hangs
does not stop it. What does stop it is told apart by `watch`: SIGSTOP, a dead host or network, native code that keeps the
interpreter. Only the standard library is imported here.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NamedTuple

MAIN, SAVING = "main", "saving"
"""Lanes: what goes on in one thread, in the same order on all processes."""

START = "start"
"""The phase until a loop reports: nobody knows how long it may take, but others may wait for who stays in it."""

OWN = ("data", "log")
"""Phases that a process spends on its own work, not on waiting for devices or others."""

STACKS_SIGNAL = signal.SIGUSR2
"""Asks a process that reports to write the stacks of its threads to its file; works in native code too."""

ADDRESS, TOKEN, BEAT, STACKS = "SHARDOPT_WATCH", "SHARDOPT_WATCH_TOKEN", "SHARDOPT_WATCH_BEAT", "SHARDOPT_WATCH_STACKS"
"""Names in the environment: where to report ("host:port"), the run's token, seconds between reports, file for stacks."""

HUNG = 124
"""Exit code of a process that was ended because the job hangs, as that of timeout(1)."""


class Mark(NamedTuple):
    """The last thing that a lane was seen to begin.

    Attributes:
      step: steps taken.
      nth: marks made in this step; with `step` it says who is behind, as all processes make the same marks.
      phase: what began, "data", "step", "wait", "checkpoint", "evaluate", ...; "" while the lane has nothing to do.
      at: when, in seconds; of `time.monotonic` here, seconds ago in a report.
      usual: seconds that this phase may well take, by what it took before in this process; negative if it never ended
        here: then it may compile.
      thread: the number of the thread.
    """

    step: int
    nth: int
    phase: str
    at: float
    usual: float
    thread: int


_lanes: dict[str, Mark] = {}
_usual: dict[tuple[str, str], tuple[int, float]] = {}
"""How often a phase of a lane ended, and what it may well take."""
_own: float = 0.0
_steps: int = 0
_devices: tuple[int, list[float]] = (0, [])
"""How often the devices were probed, and the seconds that each needed last."""
_sending = threading.Lock()
_reported, _ending = threading.Event(), threading.Event()


def report_progress(step: int, phase: str = "step") -> None:
    """Say that a loop of your own has come so far, for `shardopt launch --hang-timeout` and `so.watchdog`.

    `fit` does this by itself. In a loop of your own say it at least once a step, on every process alike: a process whose
    last report stays behind those of others is the one that is named. It costs about a microsecond, and nothing is sent:
    a thread reports it once a second or so.

    Args:
      step: steps taken.
      phase: what begins now, such as "data", "step", "checkpoint" or "evaluate"; "" where nothing more is to be watched.
        What is spent in "data" and "log" counts as this process's own time, by which a slow one is found.

    Raises:
      TypeError: if `step` is not an integer or `phase` not a string.

    Example:
      >>> import shardopt as so
      >>> so.report_progress(0, "data")
      >>> so.report_progress(0, "step")
      >>> so.report_progress(1, "")
    """
    if not isinstance(step, int) or not isinstance(phase, str):
        raise TypeError(f"report_progress: step must be an integer and phase a string, got {step!r} and {phase!r}.")
    mark(phase, step)


def mark(phase: str, step: int | None = None, *, lane: str = MAIN) -> None:
    """Note that a lane begins a phase, in the step it was in where none is given."""
    global _own, _steps
    now, last = time.monotonic(), _lanes.get(lane)
    step = (last.step if last else 0) if step is None else step
    ahead = last is None or step != last.step
    if lane == MAIN and last is not None:
        _own += now - last.at if last.phase in OWN else 0.0
        _steps += ahead
    if last is not None:
        _note_duration(lane, last.phase, now - last.at)
    usual = -1.0 if phase == START else _usual.get((lane, phase), (0, -1.0))[1]
    nth = 0 if ahead or last is None else last.nth + 1
    _lanes[lane] = Mark(step, nth, phase, now, usual, threading.get_ident())


def _note_duration(lane: str, phase: str, seconds: float) -> None:
    """Let a phase take three times the longest so far; after the first time, which may have compiled, twice that once."""
    times, usual = _usual.get((lane, phase), (0, -1.0))
    usual = (2 * seconds, 3 * seconds, max(usual, 3 * seconds))[min(times, 2)]
    _usual[lane, phase] = (times + 1, usual)


def report_devices(seconds: list[float]) -> None:
    """Note how long each device of this process took for what takes equal devices equally long."""
    global _devices
    _devices = (_devices[0] + 1, seconds)


@contextlib.contextmanager
def waiting(phase: str) -> Iterator[None]:
    """Mark that this thread waits for the other processes, and then that it goes on with what it did.

    A thread that has made no marks makes none here.
    """
    thread = threading.get_ident()
    lane = next((name for name, one in list(_lanes.items()) if one.thread == thread and one.phase), None)
    if lane is None:
        yield
        return
    before = _lanes[lane].phase
    mark(phase, lane=lane)
    try:
        yield
    finally:
        mark(before, lane=lane)


def current() -> dict[str, object]:
    """Return what is reported: JSON."""
    now = time.monotonic()
    lanes = {name: one._replace(at=now - one.at) for name, one in list(_lanes.items())}
    found = {"pid": os.getpid(), "host": socket.gethostname(), "lanes": lanes, "own": _own, "steps": _steps}
    return {**found, "devices": _devices}


def start_reports(rank: int, environment: "os._Environ[str] | dict[str, str]" = os.environ) -> bool:
    """Report to the watch that the environment names, from a thread; return whether there is one."""
    if ADDRESS not in environment:
        return False
    host, _, port = environment[ADDRESS].rpartition(":")
    stacks = open_stacks(Path(environment[STACKS])) if STACKS in environment else None
    where = (host, int(port))
    arguments = (rank, where, environment[TOKEN].encode(), float(environment[BEAT]), stacks)
    _reported.set()
    mark(START, 0)
    threading.Thread(target=_report, args=arguments, daemon=True, name="progress").start()
    return True


def is_reported() -> bool:
    """Return whether a thread reports on this process."""
    return _reported.is_set()


def open_stacks(path: Path) -> int:
    """Let `STACKS_SIGNAL` write the stacks of all threads to a file, from now on; return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def _report(rank: int, where: tuple[str, int], token: bytes, beat: float, stacks: int | None) -> None:
    """Report until the watch is gone; do what it asks for."""
    try:
        with Client(where, authkey=token) as watch:
            atexit.register(_say_bye, watch, rank)
            while True:
                _send(watch, {"rank": rank, **current()})
                if watch.poll(beat):
                    _answer(watch, rank, watch.recv_bytes(64), stacks)
    except (OSError, EOFError) as error:  # nobody watches any more
        if not _ending.is_set() and "SHARDOPT_LAUNCHED" not in os.environ:  # whose launcher knows
            print(f"watchdog: process {rank} is no longer watched ({type(error).__name__}).", file=sys.stderr)


def _answer(watch: Connection, rank: int, asked: bytes, stacks: int | None) -> None:
    if asked == b"end":
        os._exit(HUNG)
    if asked == b"stacks" and stacks is not None:
        begin = os.lseek(stacks, 0, os.SEEK_END)
        faulthandler.dump_traceback(stacks, all_threads=True)
        text = os.pread(stacks, 2**18, begin).decode(errors="replace")
        _send(watch, {"rank": rank, "stacks": text})


def _say_bye(watch: Connection, rank: int) -> None:
    _ending.set()
    with contextlib.suppress(OSError):
        _send(watch, {"rank": rank, "bye": True})


def _send(watch: Connection, message: dict[str, object]) -> None:
    with _sending:
        watch.send_bytes(json.dumps(message).encode())
