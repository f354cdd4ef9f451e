"""`launch`: run a job of several processes on this machine, or its part of a job of several hosts,
and start it again when it fails.

The next attempt may have the same number of processes, fewer, or more.
"""

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from shardopt.core import CORRUPTED, calling, check_count, check_number, plural
from shardopt.runtime._agreement import process_text
from shardopt.runtime._files import acquire_lock, release_lock
from shardopt.runtime._hosts import ALONE, Hosts
from shardopt.runtime._processes import FailurePipe, failures, handled_signals
from shardopt.runtime._progress import HANG_TIMEOUT, HUNG, LISTEN_ADDRESS, STACKS, STACKS_SIGNAL
from shardopt.runtime._stored_programs import (
    FOLDER_NAME,
    has_mixing_jaxlib,
    open_folder,
    runs_on_cpus,
)
from shardopt.runtime._vault import Vaults
from shardopt.runtime._watch import Hang, Watch, describe, process_state

_FOLLOW = Path(__file__).with_name("_follow.py")
_GLOO_PREFIX = b"[Gloo] Rank "
"""The start of lines that gloo writes for each connection. They are only in the log, not on the
screen.
"""
_SHOWN_LINES = 12
"""How many last lines of the log of the first failed process are shown."""
_GRACE = 3.0
"""Seconds between SIGTERM and the kill. A process that waits in a collective for a dead one cannot
handle SIGTERM.
"""
GRACE = 120.0
"""Seconds that processes have to save after a signal by default: the longest notice of clouds."""
_CAUSE_SECONDS = 0.5
"""Seconds after the first failure in which other failures are collected: one of them may be the
cause.
"""
_COPY_SECONDS = 5.0
"""Seconds to wait, after a process has ended, until its output is copied."""
_STACKS_SECONDS = 1.0
"""Seconds for processes to write their stacks. A signal handler writes them, which takes
milliseconds.
"""


RESTART = "SHARDOPT_RESTART"
HUNG_SECONDS = "SHARDOPT_HUNG_SECONDS"
PLACE = "SHARDOPT_PLACE"
"""Environment variables of a process: the number of restarts, the seconds of the hang before it,
and its place.
"""
BEGAN = "SHARDOPT_BEGAN"
"""Environment variable of each process: when it got its rank, in seconds since 1970."""


class _Member(NamedTuple):
    """A process of an attempt."""

    rank: int
    process: subprocess.Popen[bytes]  # the leader of its own process group
    log: Path
    # copy the output to log and screen; empty if the output is not shown
    readers: tuple[threading.Thread, ...]

    def report_exit(self, finished: "queue.Queue[tuple[int, int]]") -> None:
        """Wait until the process ends; put its rank and exit code into a queue."""
        finished.put((self.rank, self.process.wait()))


class _AttemptResult(NamedTuple):
    """The result of an attempt."""

    # rank and exit code (negative for a signal) of the process that failed first
    failed: tuple[int, int] | None
    # how many ended by a signal from elsewhere, caused the hang, or have a device that computes
    # wrong
    killed: int
    logs: dict[int, Path]  # by rank
    hang_text: str = ""  # the message about a hang
    hang_seconds: float = 0.0  # seconds of the hang
    corrupted: tuple[int, ...] = ()  # the ranks that have a device that computes wrong


@dataclasses.dataclass(frozen=True)
class LaunchedJob:
    r"""A command that runs as several processes of one job on this machine.

    Each process gets its place in the environment (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES,
    JAX_PROCESS_ID), which `so.initialize()` reads. The output of the first process is shown, and
    the output of each process is in its log. When a process fails, the others are ended within
    seconds, the failure is shown, and the job is started again if `max_restarts` allows it. A
    restart is fast:

    - Compiled programs come from jax's cache (`compiled` in `log_dir`, unless
      JAX_COMPILATION_CACHE_DIR is set).
    - The train state comes from the memory of programs that outlive the processes, if
      `so.Checkpoints(memory_every=...)` puts it there.

    A process that ends with code 117 has a device that computes wrong (`fit(cross_check_every=...)`).
    The next attempt runs without it. If that is not possible, the job ends with code 117.
    SHARDOPT_PLACE is JAX_PROCESS_ID at first. No later process gets the place of a wrong one. So a
    command that chooses its device by its place (`CUDA_VISIBLE_DEVICES=$SHARDOPT_PLACE`) never uses
    that device again.

    With `fewer` the job is elastic. It continues with the processes and the snapshots that
    are left. Each attempt builds its mesh of the available devices.

    SIGTERM and Ctrl-C are passed on to all processes, once, as SIGTERM. Processes that still run
    after `grace` seconds are killed; a second Ctrl-C kills them at once.
    If this process is killed, Linux kills the processes too, but not the programs that they
    started.

    Attributes:
      command_of: returns the command of an attempt; attempts are counted from 0.
      processes: how many processes.
      log_dir: the folder for `process-0.log` and so on; a later attempt writes
        `process-0.restart-1.log`. While the job or any program that it started runs, no other job
        can use the same folder.
      max_restarts: how often the job is started again after a failure.
      fewer: smaller numbers of processes with which the job may continue. The next attempt runs
        without each process that was killed, or has a device that computes wrong, with the largest
        possible number. By default every attempt has all processes.
      hang_timeout: seconds without progress of a live process that count as a hang; by default
        hangs are not detected. After a hang the stacks of all processes are written next to the
        logs (`process-0.stacks`), and the process that delays the others is named. Then the job
        ends as after a failure, with exit code 124. An action that happens for the first time may
        compile, so it may take ten times as long. `fit` and `so.runtime.report_progress` report
        progress, in processes that called `so.initialize()`.
      grace: seconds that the processes have to save and to end after SIGTERM or Ctrl-C. Then the
        processes that still run are named and killed.
      hosts: the hosts that run the same command, each with `processes` processes. By default this
        machine alone.
      say: prints messages about failures and restarts.

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

    command_of: Callable[[int], Sequence[str]]
    processes: int
    log_dir: Path
    max_restarts: int = 0
    fewer: Collection[int] = ()
    hang_timeout: float | None = None
    grace: float = GRACE
    hosts: Hosts = ALONE
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def usable_count(self, available: int) -> int:
        """Return the largest usable number of processes, at most `available`.

        0 if there is none.
        """
        counts = (self.processes, *self.fewer)
        return max((count for count in counts if count <= available), default=0)


@calling("launch")
def launch(command_of: Callable[[int], Sequence[str]], **settings: Any) -> int:
    """Run a `LaunchedJob` with these settings, and return its exit code.

    Returns:
      0, or the exit code of the process that failed first; 128 + n for signal n; 130 after a second
      Ctrl-C.

    Raises:
      ValueError: if a number is out of range, or another job uses the folder for its logs.
      OSError: if the command cannot be started, or the logs cannot be written.
    """
    job = LaunchedJob(command_of, **settings)
    _check_job(job)
    with (
        _locked_folder(job) as lock_descriptor,
        _catch_signals() as signals,
        failures() as failure_pipe,
        # of several hosts each has a `shardopt vault`, which outlives the launchers
        contextlib.closing(
            Vaults(job.processes if job.max_restarts and job.hosts.are_one else 0)
        ) as vaults,
    ):
        descriptors = (lock_descriptor, failure_pipe.descriptor)
        return _Launcher(job, signals, failure_pipe, vaults, descriptors, job.processes).run()


@dataclasses.dataclass
class _Launcher:
    """Runs the attempts of a job.

    Attributes:
      job: the job.
      signals: the received signals.
      failures: the pipe through which processes report that they fail.
      vaults: the vaults of snapshots; none if no restart is allowed.
      descriptors: the descriptors that all processes inherit.
      count: the number of processes of the current attempt.
      attempt: the number of attempts before it.
      num_failures: the number of attempts that failed.
      environment: the environment variables of the attempt.
      dropped_places: the places that had a device that computes wrong. No later process gets one of
        them.
    """

    job: LaunchedJob
    signals: "_Signals"
    failures: FailurePipe
    vaults: Vaults
    descriptors: Sequence[int]
    count: int
    attempt: int = 0
    num_failures: int = 0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped_places: set[int] = dataclasses.field(default_factory=set)

    def run(self) -> int:
        """Run attempts until the job has ended; return its exit code."""
        while True:
            result = self._run_attempt()
            if self.signals.kill_requested:
                return 130
            if result.failed is None:
                return 0
            code = self._count_failure(result, result.failed[1])
            if code is None:
                code = self._prepare_attempt(result)
            if code is not None:
                return code

    def _prepare_attempt(self, result: _AttemptResult) -> int | None:
        """Choose the processes of the next attempt.

        Return the exit code of the job if there can be none.
        """
        job = self.job
        remaining = job.usable_count(self.count - result.killed)
        if result.corrupted and not remaining:
            job.say(
                f"launch: the job cannot go on without {plural(result.killed, 'process')} of"
                f" {self.count}."
            )
            return CORRUPTED
        wrong_places = [self._places()[rank] for rank in result.corrupted]
        self.dropped_places.update(wrong_places)
        self.attempt += 1
        self.environment = {RESTART: str(self.attempt), HUNG_SECONDS: str(result.hang_seconds)}
        self.count = remaining or self.count
        without = f" without place {', '.join(map(str, wrong_places))}" if wrong_places else ""
        job.say(
            f"launch: starting again with {plural(self.count, 'process')}{without}, restart"
            f" {self.num_failures} of {job.max_restarts}."
        )
        return None

    def _places(self) -> dict[int, int]:
        """Return the place of each process of this machine by rank: the lowest numbers that are not
        dropped.
        """
        places = (place for place in itertools.count() if place not in self.dropped_places)
        first_rank = self.job.hosts.number * self.count
        return dict(zip(range(first_rank, first_rank + self.count), places, strict=False))

    def _count_failure(self, result: _AttemptResult, code: int) -> int | None:
        """Show a failure, and count it.

        Return the exit code of the job if it must not start again.
        """
        # of several hosts another one may have got the signal
        if (self.signals.end_requested or not self.job.hosts.are_one) and _obeys_signal(code):
            return 128 + self.signals.first
        has_hint = code > 0 and not result.hang_text
        hint = _size_hint(self.count, self.job.processes) if has_hint else ""
        self.job.say(_failure_text(result, self.count, self.job.hosts) + hint)
        if self.signals.end_requested or self.num_failures == self.job.max_restarts:
            return code if code > 0 else 128 - code
        self.num_failures += 1
        return None

    def _run_attempt(self) -> _AttemptResult:
        """Run the processes of an attempt until all have succeeded, or until a failure or a hang
        ends them all.
        """
        job = self.job
        if job.max_restarts:
            self.environment |= self.vaults.environment() | _cache_environment(job.log_dir)
        watch = None
        # on several hosts `initialize` starts a watchdog
        if job.hang_timeout is not None and job.hosts.are_one:
            watch = Watch(self.count, job.hang_timeout, say=job.say)
        with contextlib.closing(watch) if watch else contextlib.nullcontext():
            return self._run_processes(job.command_of(self.attempt), watch)

    def _run_processes(self, command: Sequence[str], watch: Watch | None) -> _AttemptResult:
        hosts = self.job.hosts
        total = self.count * len(hosts.names)
        address = hosts.coordinator(self.attempt)
        members = []
        # no SimpleQueue: in CPython 3.11 a signal at the end of its timeout makes it wait for ever
        finished: queue.Queue[tuple[int, int]] = queue.Queue()
        hang = None
        hang_text = ""
        self.failures.ranks()  # discard the reports of the previous attempt
        try:
            for rank, own_place in self._places().items():
                restart = f".restart-{self.attempt}" if self.attempt else ""
                log = self.job.log_dir / f"process-{rank}{restart}.log"
                place = (
                    _place_environment(rank, total, address)
                    | self.failures.environment
                    | self.environment
                )
                place[PLACE] = str(own_place)
                place[LISTEN_ADDRESS] = hosts.address
                place[HANG_TIMEOUT] = str(self.job.hang_timeout or "")
                if watch is not None:
                    place |= watch.environment | {STACKS: str(_stacks_file(log))}
                members.append(_start(command, rank, log, place, self.descriptors))
                threading.Thread(
                    target=members[-1].report_exit, args=(finished,), daemon=True
                ).start()
            exits, hang = self._wait_for_exits(members, finished, watch)
            if hang is not None and watch is not None:
                hang_text = _hang_text(hang, members, watch)
            reported_ranks = self.failures.ranks()
        finally:
            _end_members(
                members,
                grace=0.0 if all(member.process.poll() == 0 for member in members) else _GRACE,
            )
        logs = {member.rank: member.log for member in members}
        if hang is not None:
            return _AttemptResult(
                (hang.ranks[0], HUNG), len(hang.ranks) % self.count, logs, hang_text, hang.seconds
            )
        codes = {rank: code for rank, code in exits if code}
        corrupted = _corrupted_ranks(codes)
        failed = _first_failure(codes, reported_ranks)
        killed = len(corrupted or _killed_ranks(codes))
        return _AttemptResult(failed, killed, logs, corrupted=tuple(corrupted))

    def _wait_for_exits(
        self,
        members: Sequence[_Member],
        finished: "queue.Queue[tuple[int, int]]",
        watch: Watch | None,
    ) -> tuple[list[tuple[int, int]], Hang | None]:
        """Wait until all processes have ended, or until shortly after a failure, or until a hang.

        Args:
          members: the processes.
          finished: gets (rank, exit code) of each process that ends.
          watch: finds hangs, or None.

        Returns:
          (rank, exit code) of the processes in the order of their exits, and the hang or None.
        """
        exits: list[tuple[int, int]] = []
        has_failed = False
        end = _EndOfProcesses(self.job, members)
        while len(exits) < len(members):
            signal_number = self.signals.take()
            if signal_number is not None:
                end.send(signal_number)
            end.check()
            try:
                exits.append(finished.get(timeout=_CAUSE_SECONDS if has_failed else 0.1))
            except queue.Empty:
                if has_failed and not self.signals.end_requested:
                    break
                if watch is not None and (hang := watch.check()) is not None:
                    return exits, hang
                continue
            if watch is not None:
                watch.forget(exits[-1][0])
            has_failed = has_failed or bool(exits[-1][1])
        return exits, None


@dataclasses.dataclass
class _EndOfProcesses:
    """Passes signals on to processes, and kills processes that run on after the grace.

    Attributes:
      job: the job.
      members: the processes.
      deadline: when they are killed, on the clock of `time.monotonic`; infinite without a signal.
    """

    job: LaunchedJob
    members: Sequence[_Member]
    deadline: float = math.inf

    def send(self, signal_number: signal.Signals) -> None:
        """Send a signal to all processes. The grace runs from the first one."""
        self.deadline = min(self.deadline, time.monotonic() + self.job.grace)
        for member in self.members:
            _send_signal(member, signal_number)

    def check(self) -> None:
        """Kill the processes that still run when the grace is over."""
        if time.monotonic() < self.deadline:
            return
        self.deadline = math.inf
        running = [member for member in self.members if member.process.poll() is None]
        if running:
            names = process_text([member.rank for member in running])
            self.job.say(
                f"launch: {names} did not end within {self.job.grace:g} s after the signal, and"
                f" {'was' if len(running) == 1 else 'were'} killed (--grace)."
            )
        for member in running:
            _send_signal(member, signal.SIGKILL)


def _check_job(job: LaunchedJob) -> None:
    check_count("--processes", min([job.processes, *job.fewer]))
    check_count("--max-restarts", job.max_restarts, minimum=0)
    check_number("--grace", job.grace)
    if job.hang_timeout is not None:
        check_number("--hang-timeout", job.hang_timeout, positive=True)


@contextlib.contextmanager
def _locked_folder(job: LaunchedJob) -> Iterator[int]:
    """Lock the folder of the logs for this host, and yield the descriptor of the lock, which the
    processes inherit.
    """
    job.log_dir.mkdir(parents=True, exist_ok=True)
    instead = "choose another --log-dir (of train, another --run-dir)"
    name = f".launch{job.hosts.number or ''}.lock"
    lock = acquire_lock(
        "launch", job.log_dir, name=name, instead=instead
    )  # .lock is the lock of Checkpoints in the same folder
    try:
        assert lock.descriptor is not None
        yield lock.descriptor
    finally:
        release_lock(lock)


def _failure_text(result: _AttemptResult, count: int, hosts: Hosts) -> str:
    assert result.failed is not None
    if result.hang_text:
        return result.hang_text
    rank, code = result.failed
    event = f"ended with exit code {code}"
    if code < 0:
        event = f"was killed by {signal.Signals(-code).name}"
    output = "It said nothing."
    last_lines = _last_lines(result.logs[rank], _SHOWN_LINES)
    if last_lines:
        output = "\n  ".join(["Its last lines:", *last_lines])
    text = (
        f"launch: process {rank} of {count * len(hosts.names)} {event}; the others were ended.\n{output}\n"
        f"All of it: {result.logs[rank]}"
    )
    if not hosts.are_one:
        text += f"\nThe hosts, {plural(count, 'process')} each: {', '.join(hosts.names)}."
        if silent_hosts := hosts.silent():
            text += f"\nNo answer from {', '.join(silent_hosts)}: dead, or cut off."
    return text


def _size_hint(count: int, processes: int) -> str:
    """Return a hint for a job that failed with fewer processes than it began with, else an empty
    text.
    """
    if count == processes:
        return ""
    fix = (
        f"if {count} of {processes} processes do not fit its mesh or its batch, name those that do:"
        " --processes 1,2,4."
    )
    return f"\nFix: {fix}"


def _last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, without blank lines, lines of gloo and frames of C++."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    left_out = (_GLOO_PREFIX.decode(), "    @ ")
    return [line for line in lines if line.strip() and not line.startswith(left_out)][-count:]


class _Signals:
    """The received signals.

    The first one is passed on to the processes; a second Ctrl-C kills them.
    """

    def __init__(self) -> None:
        self.end_requested = False
        self.kill_requested = False
        self._unsent = []
        self.first = signal.SIGTERM

    def record(self, number: int, frame: object) -> None:
        if not self.end_requested:
            self.first = signal.Signals(number)
        if number == signal.SIGINT and self.end_requested:
            self.kill_requested = True
            self._unsent.append(signal.SIGKILL)
        else:
            self.end_requested = True
            self._unsent.append(signal.SIGTERM)

    def take(self) -> signal.Signals | None:
        return self._unsent.pop(0) if self._unsent else None


@contextlib.contextmanager
def _catch_signals() -> Iterator[_Signals]:
    """Record SIGTERM and SIGINT while the context lasts; only the main thread can do so."""
    signals = _Signals()
    with handled_signals((signal.SIGTERM, signal.SIGINT), signals.record):
        yield signals


def _hang_text(hang: Hang, members: Sequence[_Member], watch: Watch) -> str:
    """Let all processes write their stacks, and return the message about the hang."""
    reports = watch.reports()
    files = {member.rank: _stacks_file(member.log) for member in members}
    for member in members:
        # a process that never reported has no handler and would die
        if reports.get(member.rank) is not None:
            _send_signal(member, STACKS_SIGNAL)
    time.sleep(_STACKS_SECONDS)
    stacks = {
        rank: file.read_text(errors="replace") for rank, file in files.items() if file.is_file()
    }
    states = {member.rank: process_state(member.process.pid) for member in members}
    return (
        describe("launch", hang, reports, len(members), stacks, states)
        + f"\nAll stacks: {files[0].parent}/*.stacks"
    )


def _stacks_file(log: Path) -> Path:
    return log.with_suffix(".stacks")


def _first_failure(codes: dict[int, int], reported_ranks: Sequence[int]) -> tuple[int, int] | None:
    """Return the rank and exit code of the process that failed first.

    The other processes fail because they miss it. A process that was killed comes first. Otherwise,
    if the process whose exit was seen first reported a failure, the first process that reported one
    comes first.

    Args:
      codes: exit codes by rank, in the order of the exits.
      reported_ranks: the ranks that reported a failure, in order.
    """
    if not codes:
        return None
    first_seen = next(iter(codes))
    candidates = [*_corrupted_ranks(codes), *_killed_ranks(codes)]
    if first_seen in reported_ranks:
        candidates += [rank for rank in reported_ranks if rank in codes]
    first_failed = [*candidates, first_seen][0]
    return first_failed, codes[first_failed]


def _obeys_signal(code: int) -> bool:
    """Return whether a process ended as it was asked to: by the signal, or by the exit code of the
    signal after a save.
    """
    return code in (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def _killed_ranks(codes: dict[int, int]) -> list[int]:
    """Return the ranks that were killed by a signal.

    jax aborts a process (SIGABRT) that misses another one. So an aborted process counts only if its
    exit was seen first.
    """
    first_seen = next(iter(codes), None)
    return [
        rank
        for rank, code in codes.items()
        if code < 0 and (code != -signal.SIGABRT or rank == first_seen)
    ]


def _corrupted_ranks(codes: dict[int, int]) -> list[int]:
    """Return the ranks whose devices compute wrong.

    All processes of the job found that together, and end.
    """
    return [rank for rank, code in codes.items() if code == CORRUPTED]


def _start(
    command: Sequence[str],
    rank: int,
    log: Path,
    environment: Mapping[str, str],
    inherited_descriptors: Sequence[int],
) -> _Member:
    """Start one process, which dies with this thread.

    Its output goes to a log.

    The output of the first process is also copied to the screen.

    Args:
      command: the command.
      rank: the rank of the process.
      log: the log file.
      environment: variables in addition to the environment of this process.
      inherited_descriptors: the descriptors that the process inherits.
    """
    if shutil.which(command[0]) is None:
        error_number = errno.EACCES if Path(command[0]).exists() else errno.ENOENT
        raise OSError(error_number, os.strerror(error_number), command[0])
    log.parent.mkdir(parents=True, exist_ok=True)
    is_shown = rank == 0
    with log.open("wb") as file:
        output = subprocess.PIPE if is_shown else file
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_FOLLOW), str(os.getpid()), *command],
            env=os.environ | environment,
            pass_fds=inherited_descriptors,
            stdin=subprocess.DEVNULL,
            # only the launcher gets Ctrl-C, and a kill reaches the children too
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
    readers = []
    if is_shown:
        log_file = log.open("ab", buffering=0)
        for pipe, screen in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None  # a pipe
            readers.append(
                threading.Thread(target=_copy, args=(pipe, log_file, screen), daemon=True)
            )
        for reader in readers:
            reader.start()
        threading.Thread(target=_close_after, args=(readers, log_file), daemon=True).start()
    return _Member(rank, process, log, tuple(readers))


def _cache_environment(log_dir: Path) -> dict[str, str]:
    """Return the variables of jax's compilation cache for the next attempt, where programs can be
    stored.

    The user's values take precedence.
    """
    if runs_on_cpus() and has_mixing_jaxlib():
        return {}
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(open_folder(log_dir / FOLDER_NAME)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def _place_environment(rank: int, count: int, address: str) -> dict[str, str]:
    """Return the variables with a process's place in the job, for `so.initialize`, and the common
    variables.

    SHARDOPT_LAUNCHED is the id of the launcher. A process with this variable ends at once when it
    fails, since others would wait for it, and dies with the launcher; see `so.initialize`.
    """
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        BEGAN: str(time.time()),
        "SHARDOPT_LAUNCHED": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
        **_malloc_environment(),
    }


# XLA:CPU allocates its temporaries again in every step. By default glibc returns freed memory to
# the system, and each page causes a fault that fills it with zeros. These settings use pages of 2
# MB, and keep freed pieces of up to 32 MB. Larger pieces are mapped and returned. XLA:CPU frees the
# temporaries of a step a little after its results, and the next step has often taken its own by
# then. If glibc kept them, small allocations would split the holes, and the heap would grow to four
# or five copies. Hosts with an accelerator do without these settings: with one arena for all
# threads, compiling took four times as long there, and these were not measured.
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1099511627776"


def _malloc_environment() -> dict[str, str]:
    is_free = "GLIBC_TUNABLES" not in os.environ
    return {"GLIBC_TUNABLES": _MALLOC} if is_free and runs_on_cpus() else {}


def _end_members(members: Sequence[_Member], *, grace: float) -> None:
    """Ask all running processes to end, wait `grace` seconds, and kill the others with their
    children.
    """
    for member in members:
        _send_signal(member, signal.SIGTERM)
    waiter = threading.Thread(
        target=lambda: [member.process.wait() for member in members], daemon=True
    )
    waiter.start()
    waiter.join(grace)
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(member.process.pid, signal.SIGKILL)
        member.process.wait()
        for reader in member.readers:
            reader.join(_COPY_SECONDS)


def _send_signal(member: _Member, signal_number: signal.Signals) -> None:
    """Send a signal to a process if it still runs."""
    if member.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            member.process.send_signal(signal_number)


def _copy(pipe: IO[bytes], log: IO[bytes], screen: TextIO) -> None:
    with pipe:
        for line in pipe:
            log.write(line)
            if not line.startswith(_GLOO_PREFIX):
                # the log continues if the screen is closed
                with contextlib.suppress(OSError, ValueError):
                    screen.write(line.decode(errors="replace"))
                    screen.flush()


def _close_after(readers: Sequence[threading.Thread], file: IO[bytes]) -> None:
    for reader in readers:
        reader.join()
    file.close()
