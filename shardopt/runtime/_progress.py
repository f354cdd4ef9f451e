"""The progress of this process for a watch: marks of step and phase, and a thread that reports
them.

The threads that train and save make marks; the reporting thread only reads them. So a collective
that hangs does not stop the reports. `watch` distinguishes the causes of missing reports: SIGSTOP,
a dead host or network, and native code that holds the interpreter lock. This file imports only the
standard library.
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
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NamedTuple

MAIN = "main"
SAVING = "saving"
"""Lanes: a lane is the work of one thread, in the same order on all processes."""

START = "start"
"""The phase until a loop reports. Its duration is unknown, but other processes may wait for this
one.
"""

STACKS_SIGNAL = signal.SIGUSR2
"""This signal makes a reporting process write the stacks of its threads to its file, even in native
code.
"""

ADDRESS = "SHARDOPT_WATCH"
TOKEN = "SHARDOPT_WATCH_TOKEN"
BEAT = "SHARDOPT_WATCH_BEAT"
STACKS = "SHARDOPT_WATCH_STACKS"
"""Environment variables: address of the watch ("host:port"), token, seconds between reports, file
for stacks.
"""

HANG_TIMEOUT = "SHARDOPT_HANG_TIMEOUT"
"""The environment variable with the seconds of `so.runtime.watchdog`, which `initialize` then calls."""

LISTEN_ADDRESS = "SHARDOPT_LISTEN_ADDRESS"
"""The environment variable with the only address at which a process listens."""


def listen_address() -> str:
    """Return the address at which a program next to a job listens; by default all addresses."""
    return os.environ.get(LISTEN_ADDRESS, "0.0.0.0")


HUNG = 124
"""Exit code of a process that was ended because the job hangs; timeout(1) uses it too."""


class ProgressMark(NamedTuple):
    """The phase that a lane began last.

    Attributes:
      step: steps taken.
      number: how many marks were made in this step before. All processes make the same marks, so
        `step` and `number` tell which process is behind.
      phase: the name of the phase, "data", "step", "wait", "checkpoint", "evaluate", ...; "" if the
        lane has no work.
      began: seconds: `time.monotonic` in this process, seconds ago in a report.
      expected_seconds: how long this phase may take, from its earlier durations in this process. It
        is negative if the phase never ended before: then it may compile.
      thread: the id of the thread.
    """

    step: int
    number: int
    phase: str
    began: float
    expected_seconds: float
    thread: int

    @property
    def position(self) -> tuple[int, int]:
        """How far the lane is."""
        return self.step, self.number


_lanes: dict[str, ProgressMark] = {}
_durations: dict[tuple[str, str], tuple[int, float]] = {}
"""By lane and phase: how often the phase ended, and how many seconds it may take."""
_send_lock = threading.Lock()
_reported = threading.Event()
_exiting = threading.Event()


def report_progress(step: int, phase: str = "step") -> None:
    """Report the progress of your own training loop, for `shardopt launch --hang-timeout` and
    `so.runtime.watchdog`.

    `fit` calls this itself. In your own loop call it at least once a step, on every process in the
    same way. The process whose last report is behind the others is the one that is named. A call
    costs about a microsecond and sends no message: a thread sends the last report about once a
    second.

    Args:
      step: steps taken.
      phase: the phase that begins now, such as "data", "step", "checkpoint" or "evaluate"; "" to
        stop being watched.

    Raises:
      TypeError: if `step` is not an integer or `phase` not a string.

    Example:
      >>> import shardopt as so
      >>> so.runtime.report_progress(0, "data")
      >>> so.runtime.report_progress(0, "step")
      >>> so.runtime.report_progress(1, "")
    """
    if not isinstance(step, int) or not isinstance(phase, str):
        raise TypeError(
            f"report_progress: step must be an integer and phase a string, got {step!r} and"
            f" {phase!r}."
        )
    mark(phase, step)


def mark(
    phase: str, step: int | None = None, *, lane: str = MAIN, interrupts: bool = False
) -> None:
    """Record that a lane begins a phase; by default the step is the lane's current step.

    A phase that is interrupted has not ended. If it was the first one, it may still compile.
    """
    now = time.monotonic()
    previous = _lanes.get(lane)
    if step is None:
        step = previous.step if previous else 0
    if previous is not None and not interrupts:
        _note_duration(lane, previous.phase, now - previous.began)
    expected_seconds = -1.0 if phase == START else _durations.get((lane, phase), (0, -1.0))[1]
    number = previous.number + 1 if previous is not None and previous.step == step else 0
    _lanes[lane] = ProgressMark(step, number, phase, now, expected_seconds, threading.get_ident())


def _note_duration(lane: str, phase: str, seconds: float) -> None:
    """Update how long a phase may take: three times its longest duration, without the first one.

    The first duration may include compilation. Until the second one is known, the phase may take
    twice the first.
    """
    count, expected_seconds = _durations.get((lane, phase), (0, -1.0))
    if count == 0:
        expected_seconds = 2 * seconds
    elif count == 1:
        expected_seconds = 3 * seconds
    else:
        expected_seconds = max(expected_seconds, 3 * seconds)
    _durations[lane, phase] = (count + 1, expected_seconds)


@contextlib.contextmanager
def waiting(phase: str) -> Iterator[None]:
    """ProgressMark that this thread waits for the other processes.

    At the end, mark that it continues its previous phase.

    A thread without a lane makes no marks.
    """
    thread = threading.get_ident()
    lane = next(
        (name for name, last in list(_lanes.items()) if last.thread == thread and last.phase), None
    )
    if lane is None:
        yield
        return
    phase_before = _lanes[lane].phase
    mark(phase, lane=lane, interrupts=True)
    try:
        yield
    finally:
        mark(phase_before, lane=lane)


def current() -> dict[str, object]:
    """Return the current report as JSON values."""
    now = time.monotonic()
    lanes = {name: last._replace(began=now - last.began) for name, last in list(_lanes.items())}
    return {"pid": os.getpid(), "host": socket.gethostname(), "lanes": lanes}


def start_reports(rank: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Start a thread that reports to the watch in the environment.

    Return False if there is no watch.
    """
    if ADDRESS not in environment:
        return False
    stacks = open_stacks(Path(environment[STACKS])) if STACKS in environment else None
    _reported.set()
    mark(START, 0)
    arguments = (rank, environment, stacks)
    threading.Thread(target=_report, args=arguments, daemon=True, name="progress").start()
    return True


def is_reported() -> bool:
    """Return whether a thread reports the progress of this process."""
    return _reported.is_set()


def open_stacks(path: Path) -> int:
    """From now on let `STACKS_SIGNAL` write the stacks of all threads to a file.

    Return its descriptor.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
    # the file is for the stacks of this process, not of its forks
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(STACKS_SIGNAL))
    return descriptor


def _report(rank: int, environment: Mapping[str, str], stacks: int | None) -> None:
    """Report until the watch is gone, and answer its requests."""
    host, _, port = environment[ADDRESS].rpartition(":")
    timeout = float(environment[HANG_TIMEOUT])
    try:
        with Client((host, int(port)), authkey=environment[TOKEN].encode()) as watch:
            _limit_silence(watch, timeout)
            atexit.register(_send_bye, watch, rank, os.getpid())
            while True:
                _send(watch, {"rank": rank, **current()})
                if watch.poll(float(environment[BEAT])):
                    _answer(watch, rank, watch.recv_bytes(64), stacks)
    except (OSError, EOFError) as error:  # the watch is gone
        # a launcher with an address of its own reports it
        if not _exiting.is_set() and ADDRESS not in os.environ:
            last = _lanes[MAIN]
            problem = type(error).__name__
            if isinstance(error, TimeoutError):
                problem = (
                    f"nothing was heard for {timeout:g} s from {host}, the host of process 0:"
                    " it died, or its network did"
                )
            print(
                f"watchdog: process {rank} is no longer watched, at step {last.step} in phase"
                f" {last.phase!r}: {problem}.",
                file=sys.stderr,
            )


def _limit_silence(connection: Connection, seconds: float) -> None:
    """Let a connection fail whose other host has not acknowledged a message for so long.

    Linux can say so; elsewhere the system decides, after minutes.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def _answer(watch: Connection, rank: int, request: bytes, stacks: int | None) -> None:
    if request == b"end":
        os._exit(HUNG)
    if request == b"stacks" and stacks is not None:
        start = os.lseek(stacks, 0, os.SEEK_END)
        faulthandler.dump_traceback(stacks, all_threads=True)
        text = os.pread(stacks, 2**18, start).decode(errors="replace")
        _send(watch, {"rank": rank, "stacks": text})


def _send_bye(watch: Connection, rank: int, pid: int) -> None:
    _exiting.set()
    if os.getpid() != pid:  # a fork ends, and this process goes on
        return
    with contextlib.suppress(OSError):
        _send(watch, {"rank": rank, "bye": True})


def _send(watch: Connection, message: dict[str, object]) -> None:
    with _send_lock:
        watch.send_bytes(json.dumps(message).encode())
