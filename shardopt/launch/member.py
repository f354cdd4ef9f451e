"""One process of a job: its environment, its log, how it is started and how it is ended."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TextIO

_CHATTER = b"[Gloo] Rank "
"""Begins lines that gloo writes for each connection; they are in the log."""

_TUNABLES = "GLIBC_TUNABLES"
_FOLLOW = Path(__file__).with_name("follow.py")

_LAST_WORDS = 5.0
"""Seconds that are waited for what a process has said to be copied, once it has ended."""


class Member(NamedTuple):
    """A process that was started.

    Attributes:
      rank: its number, from 0.
      process: the process, the leader of a process group of its own.
      log: the file with all it says.
      readers: the threads that copy what it says to the screen too; none for a process that is not shown.
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    readers: tuple[threading.Thread, ...]


def free_address() -> str:
    """Return an address of this machine with a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def environment_of(rank: int, count: int, address: str) -> dict[str, str]:
    """Return what tells a process its place in the job, for `so.initialize`; and that its lines are not to wait.

    SHARDOPT_LAUNCHED is the launcher. A process that has it ends at once when it fails, where others would wait for it,
    and dies with the launcher; see `so.initialize`.
    """
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        "SHARDOPT_LAUNCHED": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
        **_huge_pages(),
    }


def _huge_pages() -> dict[str, str]:
    """Let glibc ask for huge pages, unless the user tunes it: a step on CPU maps its memory anew every time.

    Memory comes page by page, on first touch: with pages of 2 MB instead of 4 kB the steps of a small GPT took a
    quarter less time. Where transparent huge pages are switched off, or there is no glibc from 2.35 on, nothing changes.

    References:
      The GNU C Library Reference Manual, "Memory Allocation Tunables", glibc.malloc.hugetlb.
    """
    return {} if _TUNABLES in os.environ else {_TUNABLES: "glibc.malloc.hugetlb=1"}


def start(
    command: Sequence[str], rank: int, log: Path, environment: Mapping[str, str], *, shown: bool, keep: Sequence[int]
) -> Member:
    """Start one process with its output in a file, and on the screen too where it is shown. It dies with this thread.

    Args:
      command: what it runs.
      rank: its number.
      log: the file.
      environment: what is added to that of this process.
      shown: whether its output is on the screen too.
      keep: descriptors that it inherits.

    Raises:
      OSError: if the command cannot be started, or the log cannot be written.
    """
    if shutil.which(command[0]) is None:
        number = errno.EACCES if Path(command[0]).exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), command[0])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        out, err = (subprocess.PIPE, subprocess.PIPE) if shown else (file, file)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_FOLLOW), str(os.getpid()), *command],
            env=os.environ | environment,
            pass_fds=keep,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to us alone, and a kill reaches its children as well
            stdout=out,
            stderr=err,
        )
    readers = []
    if shown:
        both = log.open("ab", buffering=0)
        for source, screen in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None  # a pipe
            readers.append(threading.Thread(target=_copy, args=(source, both, screen), daemon=True))
        for reader in readers:
            reader.start()
        threading.Thread(target=_close_after, args=(readers, both), daemon=True).start()
    return Member(rank, process, log, tuple(readers))


def end(members: Sequence[Member], *, grace: float) -> None:
    """Ask all that still run to end, wait a while, and kill those that did not, with their children."""
    for member in members:
        tell(member, signal.SIGTERM)
    waiting = threading.Event()
    watcher = threading.Thread(target=lambda: [m.process.wait() for m in members] and waiting.set(), daemon=True)
    watcher.start()
    waiting.wait(grace)
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(member.process.pid, signal.SIGKILL)
        member.process.wait()
        for reader in member.readers:
            reader.join(_LAST_WORDS)


def tell(member: Member, number: signal.Signals) -> None:
    """Send a signal to a process that still runs."""
    if member.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            member.process.send_signal(number)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log, without blank ones and chatter."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [line for line in lines if line.strip() and not line.startswith(_CHATTER.decode())][-count:]


def _copy(source: IO[bytes], log: IO[bytes], screen: TextIO) -> None:
    with source:
        for line in source:
            log.write(line)
            if not line.startswith(_CHATTER):
                with contextlib.suppress(OSError, ValueError):  # a closed screen does not stop the log
                    screen.write(line.decode(errors="replace"))
                    screen.flush()


def _close_after(readers: Sequence[threading.Thread], file: IO[bytes]) -> None:
    for reader in readers:
        reader.join()
    file.close()
