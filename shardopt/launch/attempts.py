"""A job that is started anew when it fails, with as many processes or with fewer."""

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardopt.core import lock
from shardopt.core.errors import complaint
from shardopt.launch.group import Ended, run_group
from shardopt.launch.member import last_lines

LOCK = ".launch.lock"

_SHOWN = 12
"""Lines of the log of the process that failed first."""


def launch(
    command_of: Callable[[int], Sequence[str]],
    *,
    processes: int,
    log_dir: Path,
    max_restarts: int = 0,
    min_processes: int | None = None,
    can_share: Callable[[int], bool] = lambda count: True,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    r"""Run a command as several processes of one job on this machine, and return its exit code.

    Each process finds its place in the environment (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), where
    `so.initialize()` looks for it. What the first one says is shown; what each says is in its log. When one fails
    the others are ended within seconds, the failure is shown, and the job is started anew, if it may be.

    SIGTERM and Ctrl-C are passed on to all, once, as SIGTERM; a second Ctrl-C kills them. Where this process is killed
    itself, Linux kills the processes as well, but not what they started on their own.

    Args:
      command_of: gives the command of an attempt, counted from 0.
      processes: how many.
      log_dir: gets `process-0.log` and so on; of an attempt after the first `process-0.restart-1.log`. While the job
        runs, or anything that it started, nobody else may launch one with the same folder.
      max_restarts: how often it is started anew after a failure.
      min_processes: with how few: each process that was killed is left out of the next attempt, down to this. By
        default none is.
      can_share: whether so many processes can do the work; of those that are left as many as can go on.
      say: is told, line by line, what failed and what is done about it.

    Returns:
      0, or the exit code of the process that failed first; 128 + n for signal n; 130 after a second Ctrl-C.

    Raises:
      ValueError: if a number is out of range, or another job has its logs there.
      OSError: if the command cannot be started, or the logs cannot be written.

    Example:
      >>> import pathlib, sys, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> code = "import os; print(os.environ['JAX_PROCESS_ID'], 'of', os.environ['JAX_NUM_PROCESSES'])"
      >>> launch(lambda attempt: [sys.executable, "-c", code], processes=2, log_dir=folder)
      0 of 2
      0
      >>> (folder / "process-1.log").read_text()
      '1 of 2\n'
    """
    _check(processes, max_restarts, min_processes)
    attempt = 0
    with _taken(log_dir) as held, _signals() as stop:
        while True:
            log_of = functools.partial(_log, log_dir, attempt)
            ended = run_group(command_of(attempt), processes, log_of, stop.take, keep=(held,))
            if stop.twice:
                return 130
            if ended.failed is None:
                return 0
            code = ended.failed[1]
            if not (stop.asked and code == -signal.SIGTERM):
                say(_failure(ended, processes))
            if stop.asked or attempt == max_restarts:
                return code if code > 0 else 128 - code
            attempt += 1
            processes = _left(processes, ended.killed, min_processes, can_share)
            many = "1 process" if processes == 1 else f"{processes} processes"
            say(f"launch: starting anew with {many}, restart {attempt} of {max_restarts}.")


def _left(processes: int, killed: int, least: int | None, can_share: Callable[[int], bool]) -> int:
    """Return how many begin anew: all; or without those that were killed, as many as can share the work."""
    if least is None:
        return processes
    return next((count for count in range(processes - killed, least - 1, -1) if can_share(count)), processes)


def _log(folder: Path, attempt: int, rank: int) -> Path:
    return folder / (f"process-{rank}.restart-{attempt}.log" if attempt else f"process-{rank}.log")


def _check(processes: int, max_restarts: int, min_processes: int | None) -> None:
    least = {"processes": (processes, 1), "max-restarts": (max_restarts, 0)}
    if min_processes is not None:
        least["min-processes"] = (min_processes, 1)
    wrong = [f"--{name} must be at least {low}, got {value}" for name, (value, low) in least.items() if value < low]
    if not wrong and min_processes is not None and min_processes > processes:
        wrong = [f"--min-processes {min_processes} is more than --processes {processes}"]
    if wrong:
        raise ValueError(complaint("launch", "the numbers of processes cannot be used.", wrong))


def _failure(ended: Ended, processes: int) -> str:
    assert ended.failed is not None
    rank, code = ended.failed
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = last_lines(ended.logs[rank], _SHOWN)
    head = f"launch: process {rank} of {processes} {how}; the others were ended."
    said = ["Its last lines:", *(f"  {line}" for line in lines)] if lines else ["It said nothing."]
    return "\n".join([head, *said, f"All of it: {ended.logs[rank]}"])


@contextlib.contextmanager
def _taken(folder: Path) -> Iterator[int]:
    """Take the folder of the logs, and give the descriptor that holds it: who writes there inherits it."""
    folder.mkdir(parents=True, exist_ok=True)
    instead = "choose another --log-dir (of train, another --run-dir)"
    held = lock.acquire("launch", folder, name=LOCK, instead=instead)  # .lock is for whoever has checkpoints there
    try:
        assert held.descriptor is not None
        yield held.descriptor
    finally:
        lock.release(held)


class _Stop:
    """What signals asked for: the first is passed on to the processes, a second Ctrl-C kills them."""

    def __init__(self) -> None:
        self.asked, self.twice, self._waiting = False, False, []

    def note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.asked:
            self.twice = True
            self._waiting.append(signal.SIGKILL)
        else:
            self.asked = True
            self._waiting.append(signal.SIGTERM)

    def take(self) -> signal.Signals | None:
        return self._waiting.pop(0) if self._waiting else None


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    """Note SIGTERM and SIGINT while the context lasts; elsewhere than in the main thread nothing is caught."""
    stop, previous = _Stop(), {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                previous[number] = signal.signal(number, stop.note)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
