"""`launch`: a job of several processes on this machine, started again when it fails, with as many, with fewer, with more."""

import contextlib
import errno
import functools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from shardopt.core.errors import format_error, plural
from shardopt.runtime.discovery import Discovery
from shardopt.runtime.files import acquire_lock, release_lock
from shardopt.runtime.processes import Failures, failures
from shardopt.runtime.progress import HUNG, STACKS, STACKS_SIGNAL
from shardopt.runtime.vault import Vaults
from shardopt.runtime.watch import Hang, Watch, describe, process_state

_LOCK = ".launch.lock"
_FOLLOW = Path(__file__).with_name("follow.py")
_STANDBY = Path(__file__).with_name("standby.py")
_GLOO = b"[Gloo] Rank "
"""Begins lines that gloo writes for each connection; they are in the log alone."""
_SHOWN = 12
"""Lines that are shown of the log of the process that failed first."""
_GRACE = 3.0
"""Seconds between the request to end and the kill. Who waits for a dead process in a collective cannot answer."""
_LULL = 0.5
"""Seconds in which a failure is looked for that was the cause of the first one seen."""
_DRAIN = 5.0
"""Seconds that are waited, once a process has ended, until what it wrote is copied."""
_SPARES_AFTER, _SPARES_APART = 5.0, 0.5
"""Seconds from the start of an attempt to that of the first process that stands by, and between two: the job goes first."""
_PAUSE = 1.0
"""Seconds between two questions whether enough processes can run."""
_DUMP = 1.0
"""Seconds that processes get to write their stacks. They do in a signal handler: those that can need milliseconds."""


RESTART, HUNG_SECONDS = "SHARDOPT_RESTART", "SHARDOPT_HUNG_SECONDS"
"""In the environment of a process that was started again: how often, and for how long the job had stood still before."""
BEGAN = "SHARDOPT_BEGAN"
"""In the environment of each process: when it was given its place, in seconds since 1970."""


class _Member(NamedTuple):
    """A process that was started."""

    rank: int
    process: subprocess.Popen[bytes]  # the leader of a process group of its own
    log: Path
    readers: tuple[threading.Thread, ...]  # copy what it says to the screen too; none for one that is not shown


class _Attempt(NamedTuple):
    """What the processes of an attempt get, beside their command and place."""

    environment: Mapping[str, str]
    watch: Watch | None
    heard: Failures
    spares: "_Spares"
    keep: Sequence[int]  # descriptors that they inherit
    can_grow: Callable[[], bool]  # whether more could run by now


class _Ended(NamedTuple):
    """How an attempt ended."""

    failed: tuple[int, int] | None  # rank and exit code (negative for a signal) of the process that failed first
    killed: int  # how many ended by a signal that we did not send, or made the others wait
    logs: tuple[Path, ...]
    hang: str = ""  # what is said of a job that stood still
    hung: float = 0.0  # seconds for which it did
    grows: bool = False  # whether it was asked to end, so that more can run


def launch(
    command_of: Callable[[int], Sequence[str]],
    *,
    processes: int,
    log_dir: Path,
    max_restarts: int = 0,
    min_processes: int | None = None,
    hang_timeout: float | None = None,
    spares: int = 0,
    can_share: Callable[[int], bool] = lambda count: True,
    discovery_script: str | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    r"""Run a command as several processes of one job on this machine, and return its exit code.

    Each process finds its place in the environment (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), where
    `so.initialize()` looks for it. What the first one says is shown; what each says is in its log. When one fails
    the others are ended within seconds, the failure is shown, and the job is started again, if it may be. Then compiled
    programs come from jax's cache (`compiled` in `log_dir`, unless JAX_COMPILATION_CACHE_DIR says otherwise), and the train
    state from the memory of programs that outlive the processes, where `so.Checkpoints(memory_every=...)` puts it.

    With `min_processes` it is elastic: it goes on with those that are left, from the snapshots in memory that are left, and
    with `discovery_script` with more when there are more. Each attempt builds its mesh of the devices that it finds.

    SIGTERM and Ctrl-C are passed on to all, once, as SIGTERM; a second Ctrl-C kills them. Where this process is killed
    itself, Linux kills the processes as well, but not what they started on their own.

    Args:
      command_of: gives the command of an attempt, counted from 0.
      processes: how many.
      log_dir: gets `process-0.log` and so on; of an attempt after the first `process-0.restart-1.log`. While the job
        runs, or anything that it started, nobody else may launch one with the same folder.
      max_restarts: how often it is started again after a failure.
      min_processes: with how few: each process that was killed is left out of the next attempt, down to this, unless one
        stands by in its place. By default none is.
      hang_timeout: seconds without progress of a process that is alive, after which the stacks of all are written beside the
        logs (`process-0.stacks`), the one that makes the others wait is named, and the job ends as after a failure, with exit
        code 124. What a process does for the first time may compile, and may take ten times as long. Progress is what `fit` or
        `so.report_progress` report, in processes that called `so.initialize()`. By default hangs are not looked for.
      spares: how many processes stand by, having imported jax and shardopt, and take the first places of the next attempt. Each
        takes the memory of an interpreter with jax. For commands of this interpreter that run a script or a module.
      can_share: whether so many processes can do the work; of those that are left as many as can go on.
      discovery_script: a shell command that prints how many processes can run now. It is asked when the job starts again; where
        fewer than `min_processes` can, it waits. While fewer train than `processes` it is asked every few seconds; when it says
        twice that more can, they are sent SIGTERM, at which `fit` writes a checkpoint, and the job starts again with more.
      say: gets the lines that tell what failed and what is done about it.

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
    _check(processes, max_restarts, min_processes, hang_timeout, spares)
    attempt, failed, environment, count = 0, 0, {}, processes
    with _locked(log_dir) as held, _signals() as stop, contextlib.ExitStack() as cleanup:
        heard = cleanup.enter_context(failures())
        vaults = cleanup.enter_context(contextlib.closing(Vaults(processes))) if max_restarts else None
        waiting = cleanup.enter_context(contextlib.closing(_Spares(spares, (held, heard.descriptor))))
        discovery = None
        if discovery_script is not None:
            discovery = cleanup.enter_context(contextlib.closing(Discovery(discovery_script, say=say)))

        def most(available: int) -> int:
            """Return with how many processes the job goes on, of those that can run; 0 for none."""
            least = processes if min_processes is None else min_processes
            return next((n for n in range(min(available, processes), least - 1, -1) if can_share(n)), 0)

        while True:
            if vaults is not None:
                environment |= vaults.environment() | _cache(log_dir)
            log_of = functools.partial(_log, log_dir, attempt)
            watch = None if hang_timeout is None else Watch(count, hang_timeout, say=say)
            with contextlib.closing(watch) if watch else contextlib.nullcontext():
                command = command_of(attempt)
                waiting.check(command)
                waiting.begin(environment if failed < max_restarts or discovery else None)

                if discovery is not None:
                    discovery.active, discovery.steady = count < processes, 0

                def can_grow(count: int = count) -> bool:
                    return discovery is not None and most(discovery.steady) > count

                how = _Attempt(environment, watch, heard, waiting, (held, heard.descriptor), can_grow)
                ended = _run_attempt(command, count, log_of, stop.take, how)
            if stop.twice:
                return 130
            if ended.failed is None and (stop.asked or not ended.grows):
                return 0
            grows = ended.grows and (ended.failed is None or ended.failed[1] == -signal.SIGTERM)
            if not grows or stop.asked:
                assert ended.failed is not None
                code = ended.failed[1]
                if not (stop.asked and code == -signal.SIGTERM):
                    say(_failure(ended, count) + (_hint(count, processes) if code > 0 and not ended.hang else ""))
                if stop.asked or failed == max_restarts:
                    return code if code > 0 else 128 - code
                failed += 1
            attempt += 1
            environment = {RESTART: str(attempt), HUNG_SECONDS: str(ended.hung)}
            left = count if grows else count - max(0, ended.killed - waiting.ready())
            count = _available(discovery, most, left, stop, say) if discovery else most(left) or count
            if not count:
                return 128 + signal.SIGTERM
            which = "to have more" if grows else f"restart {failed} of {max_restarts}"
            say(f"launch: starting again with {plural(count, 'process')}, {which}.")


def _available(
    discovery: Discovery, most: Callable[[int], int], left: int, stop: "_Stop", say: Callable[[str], None]
) -> int:
    """Return with how many processes the job goes on, once enough can run; 0 if it is asked to end before."""
    waits = False
    while not stop.asked:
        available = discovery.ask()
        if available is None:
            return most(left) or left
        if count := most(available):
            return count
        if not waits:
            waits = True
            say(f"launch: {plural(available, 'process')} can run, which is too few: waiting for more.")
        time.sleep(_PAUSE)
    return 0


def _check(
    processes: int, max_restarts: int, min_processes: int | None, hang_timeout: float | None, spares: int
) -> None:
    least = {"processes": (processes, 1), "max-restarts": (max_restarts, 0), "spares": (spares, 0)}
    if min_processes is not None:
        least["min-processes"] = (min_processes, 1)
    wrong = [f"--{name} must be at least {low}, got {value}" for name, (value, low) in least.items() if value < low]
    if not wrong and min_processes is not None and min_processes > processes:
        wrong = [f"--min-processes {min_processes} is more than --processes {processes}"]
    if wrong:
        raise ValueError(format_error("launch", "the numbers of processes cannot be used.", wrong))
    if hang_timeout is not None and not hang_timeout > 0:
        raise ValueError(format_error("launch", f"--hang-timeout must be more than 0 seconds, got {hang_timeout:g}."))


def _log(folder: Path, attempt: int, rank: int) -> Path:
    return folder / (f"process-{rank}.restart-{attempt}.log" if attempt else f"process-{rank}.log")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock the folder of the logs, and give the descriptor of the lock: who writes there inherits it."""
    folder.mkdir(parents=True, exist_ok=True)
    instead = "choose another --log-dir (of train, another --run-dir)"
    held = acquire_lock("launch", folder, name=_LOCK, instead=instead)  # .lock is for whoever has checkpoints there
    try:
        assert held.descriptor is not None
        yield held.descriptor
    finally:
        release_lock(held)


def _failure(ended: _Ended, processes: int) -> str:
    assert ended.failed is not None
    if ended.hang:
        return ended.hang
    rank, code = ended.failed
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = _last_lines(ended.logs[rank], _SHOWN)
    head = f"launch: process {rank} of {processes} {how}; the others were ended."
    said = ["Its last lines:", *(f"  {line}" for line in lines)] if lines else ["It said nothing."]
    return "\n".join([head, *said, f"All of it: {ended.logs[rank]}"])


def _hint(count: int, processes: int) -> str:
    """Return what may be wrong with a job that failed by itself, with fewer processes than it began with."""
    if count == processes:
        return ""
    fix = (
        f"if {count} of {processes} processes do not fit its mesh or its batch, name those that do: --processes 1,2,4."
    )
    return f"\nFix: {fix}"


def _last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, without blank ones and those of gloo."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line for line in lines if line.strip() and not line.startswith(_GLOO.decode())][-count:]


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


def _run_attempt(
    command: Sequence[str],
    count: int,
    log_of: Callable[[int], Path],
    stop: Callable[[], signal.Signals | None],
    how: _Attempt,
) -> _Ended:
    """Run `count` processes until all have ended well, or one has failed or hangs and the others were ended.

    `stop()` returns each signal that is to be passed on to all, once, else None.
    """
    address, finished, members = _free_address(), queue.SimpleQueue(), []
    hang, text, watch, grows = None, "", how.watch, False
    how.heard.ranks()  # those of the attempt before
    try:
        for rank in range(count):
            own = _place(rank, count, address) | how.heard.environment | dict(how.environment)
            if watch is not None:
                own |= watch.environment | {STACKS: str(_stacks_file(log_of(rank)))}
            spare = how.spares.take()
            members.append(_start(command, rank, log_of(rank), own, shown=rank == 0, keep=how.keep, spare=spare))
            threading.Thread(target=_report, args=(members[-1], finished), daemon=True).start()
        seen, hang, grows = _wait(members, finished, stop, how)
        if hang is not None and watch is not None:
            text = _describe(hang, members, watch)
        said = how.heard.ranks()
    finally:
        _end(members, grace=0.0 if all(one.process.poll() == 0 for one in members) else _GRACE)
    logs = tuple(member.log for member in members)
    if hang is not None:
        return _Ended((hang.ranks[0], HUNG), len(hang.ranks) % count, logs, text, hang.seconds)
    codes = {rank: code for rank, code in seen if code}
    killed = len(_killed(codes))
    return _Ended(_first_failure(codes, said), killed, logs, grows=grows)


def _describe(hang: Hang, members: Sequence[_Member], watch: Watch) -> str:
    """Let all processes write their stacks, and return what is said of the hang."""
    heard = watch.heard()
    files = {member.rank: _stacks_file(member.log) for member in members}
    for member in members:
        if heard.get(member.rank) is not None:  # who never reported would die of the signal
            _tell(member, STACKS_SIGNAL)
    time.sleep(_DUMP)
    stacks = {rank: file.read_text(errors="replace") for rank, file in files.items() if file.is_file()}
    states = {member.rank: process_state(member.process.pid) for member in members}
    return describe("launch", hang, heard, len(members), stacks, states) + f"\nAll stacks: {files[0].parent}/*.stacks"


def _stacks_file(log: Path) -> Path:
    return log.with_suffix(".stacks")


def _first_failure(codes: dict[int, int], said: Sequence[int]) -> tuple[int, int] | None:
    """Return the rank and exit code of who failed first, given the exit codes in the order in which they were seen.

    The others fail because they miss it. Who was killed comes before all. Then, if the one whose end was seen first
    said that it fails, who said so first.
    """
    if not codes:
        return None
    seen = next(iter(codes))
    first = next(iter(_killed(codes)), None)
    if first is None:
        first = next((rank for rank in said if rank in codes), seen) if seen in said else seen
    return first, codes[first]


def _killed(codes: dict[int, int]) -> list[int]:
    """Return the ranks that were killed; of those that jax aborts since it misses another (SIGABRT), only one seen first."""
    seen = next(iter(codes), None)
    return [rank for rank, code in codes.items() if code < 0 and (code != -signal.SIGABRT or rank == seen)]


def _report(member: _Member, finished: "queue.SimpleQueue[tuple[int, int]]") -> None:
    finished.put((member.rank, member.process.wait()))


def _wait(
    members: Sequence[_Member],
    finished: "queue.SimpleQueue[tuple[int, int]]",
    stop: Callable[[], signal.Signals | None],
    how: _Attempt,
) -> tuple[list[tuple[int, int]], Hang | None, bool]:
    """Return (rank, exit code) in the order in which they ended, until all have, or shortly after a failure; or a hang.

    And whether they were asked to end because more can run.
    """
    seen: list[tuple[int, int]] = []
    failed, grows = False, False
    while len(seen) < len(members):
        if not (grows or seen) and how.can_grow():
            grows = True
            for member in members:
                _tell(member, signal.SIGTERM)
        if (number := stop()) is not None:
            for member in members:
                _tell(member, number)
        try:
            seen.append(finished.get(timeout=_LULL if failed else 0.1))
        except queue.Empty:
            if failed:
                break
            how.spares.refill()
            if how.watch is not None and (hang := how.watch.check()) is not None:
                return seen, hang, grows
            continue
        if how.watch is not None:
            how.watch.forget(seen[-1][0])
        failed = failed or bool(seen[-1][1])
    return seen, None, grows


def _start(
    command: Sequence[str],
    rank: int,
    log: Path,
    environment: Mapping[str, str],
    *,
    shown: bool,
    keep: Sequence[int],
    spare: subprocess.Popen[bytes] | None = None,
) -> _Member:
    """Start one process with its output in a file, and on the screen too where it is shown. It dies with this thread.

    It has `environment` beside that of this process, and inherits the descriptors `keep`. With a spare, that is the process.
    """
    if shutil.which(command[0]) is None:
        number = errno.EACCES if Path(command[0]).exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), command[0])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        out = subprocess.PIPE if shown else file
        process = spare or _spawn(command, environment, keep, stdin=subprocess.DEVNULL, out=out)
    if spare is not None:
        _give_place(spare, command, environment)
    readers = []
    if shown or spare is not None:
        both = log.open("ab", buffering=0)
        for source, screen in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None  # a pipe
            screen = screen if shown else None
            readers.append(threading.Thread(target=_copy, args=(source, both, screen), daemon=True))
        for reader in readers:
            reader.start()
        threading.Thread(target=_close_after, args=(readers, both), daemon=True).start()
    return _Member(rank, process, log, tuple(readers))


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], keep: Sequence[int], *, stdin: int, out: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_FOLLOW), str(os.getpid()), *command],
        env=os.environ | environment,
        pass_fds=keep,
        stdin=stdin,
        start_new_session=True,  # Ctrl-C comes to us alone, and a kill reaches its children as well
        stdout=out,
        stderr=out,
    )


class _Spares:
    """Processes that stand by for the next attempt, see `standby.py`; until `close`."""

    def __init__(self, count: int, keep: Sequence[int]):
        self._count, self._keep, self._waiting = count, keep, []
        self._environment: Mapping[str, str] | None = None
        self._due = 0.0

    def check(self, command: Sequence[str]) -> None:
        """Refuse a command that a process that stands by cannot become."""
        if self._count and (command[0] != sys.executable or not (command[1] == "-m" or command[1].endswith(".py"))):
            what = f"--spares {self._count} needs a python script or train, got {command[0]!r}."
            raise ValueError(format_error("launch", what, fix="leave --spares out, or launch the script itself."))

    def begin(self, environment: Mapping[str, str] | None) -> None:
        """Begin an attempt; None where no other follows, so that nobody needs to stand by after it."""
        self._environment, self._due = environment, time.monotonic() + _SPARES_AFTER

    def refill(self) -> None:
        """Start one, if one is missing and due: one after another, so that they take little from those that work."""
        if self._environment is None or len(self._waiting) == self._count or time.monotonic() < self._due:
            return
        command, how = [sys.executable, str(_STANDBY)], _constant() | dict(self._environment)
        self._waiting.append(_spawn(command, how, self._keep, stdin=subprocess.PIPE, out=subprocess.PIPE))
        self._due = time.monotonic() + _SPARES_APART

    def ready(self) -> int:
        """Return how many wait."""
        return sum(one.poll() is None for one in self._waiting)

    def take(self) -> subprocess.Popen[bytes] | None:
        """Return one that waits, or None."""
        while self._waiting:
            one = self._waiting.pop(0)
            if one.poll() is None:
                return one
            _drop(one)
        return None

    def close(self) -> None:
        """End those that wait."""
        while self._waiting:
            _drop(self._waiting.pop())


def _drop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _give_place(spare: subprocess.Popen[bytes], command: Sequence[str], environment: Mapping[str, str]) -> None:
    assert spare.stdin is not None  # a pipe
    with contextlib.suppress(OSError), spare.stdin as pipe:  # one that has died is seen as any process that does
        pipe.write(json.dumps({"environment": dict(environment), "words": list(command[1:])}).encode() + b"\n")


def _cache(log_dir: Path) -> dict[str, str]:
    """Return what lets the next attempt find compiled programs, but for what the user has said of it."""
    ours = {"JAX_COMPILATION_CACHE_DIR": str(log_dir / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def _place(rank: int, count: int, address: str) -> dict[str, str]:
    """Return what tells a process its place in the job, for `so.initialize`; and that its lines are not to wait.

    SHARDOPT_LAUNCHED is the launcher. A process that has it ends at once when it fails, where others would wait for it,
    and dies with the launcher; see `so.initialize`.
    """
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        BEGAN: str(time.time()),
        **_constant(),
    }


# XLA:CPU allocates the temporaries of every step anew. By itself glibc maps them each time and gives them back, and each page
# is a fault that fills it with zeros. Here pages are of 2 MB, and what is freed stays: one arena, nothing mapped for itself,
# nothing trimmed.
_MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
)


def _constant() -> dict[str, str]:
    return {
        "SHARDOPT_LAUNCHED": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _MALLOC),
    }


def _free_address() -> str:
    """Return an address of this machine with a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _end(members: Sequence[_Member], *, grace: float) -> None:
    """Ask all that still run to end, wait a while, and kill those that did not, with their children."""
    for member in members:
        _tell(member, signal.SIGTERM)
    waiting = threading.Event()
    watcher = threading.Thread(target=lambda: [m.process.wait() for m in members] and waiting.set(), daemon=True)
    watcher.start()
    waiting.wait(grace)
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(member.process.pid, signal.SIGKILL)
        member.process.wait()
        for reader in member.readers:
            reader.join(_DRAIN)


def _tell(member: _Member, number: signal.Signals) -> None:
    """Send a signal to a process that still runs."""
    if member.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            member.process.send_signal(number)


def _copy(source: IO[bytes], log: IO[bytes], screen: TextIO | None) -> None:
    with source:
        for line in source:
            log.write(line)
            if screen is not None and not line.startswith(_GLOO):
                with contextlib.suppress(OSError, ValueError):  # a closed screen does not stop the log
                    screen.write(line.decode(errors="replace"))
                    screen.flush()


def _close_after(readers: Sequence[threading.Thread], file: IO[bytes]) -> None:
    for reader in readers:
        reader.join()
    file.close()
