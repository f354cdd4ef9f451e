"""Files and folders with one writer: atomic writes, and a lock that the kernel releases when its
holder dies.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import warnings
from pathlib import Path

from shardopt.core import CheckpointInUseError, format_error


def write_atomic(path: Path, text: str) -> None:
    """Replace a text file in one step: after a kill or on a full disk the old text remains."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


LOCK_NAME = ".lock"


class Lock:
    """The right of this process to write to a folder; `acquire_lock` returns it.

    A forked child does not hold the lock and does not keep it alive. A child that gets the
    descriptor (`pass_fds` of `subprocess`) does both.

    Attributes:
      path: the lock file.
      caller: the function that took the lock, for messages.
      pid: the process that took the lock.
      descriptor: the descriptor of the lock file; None after release, and in a fork.
    """

    def __init__(self, caller: str, path: Path):
        self.caller = caller
        self.path = path
        self.pid = os.getpid()
        # a fork between these two lines would hold a lock that is not in _held_locks
        with _fork_guard:
            self.descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            _held_locks.add(self)


_held_locks: set[Lock] = set()
_fork_guard = threading.RLock()


def _after_fork() -> None:
    """Close the descriptors in a forked child: a lock lives as long as any copy of its descriptor
    is open.
    """
    _fork_guard.release()
    for lock in list(_held_locks):
        if lock.descriptor is not None:
            os.close(lock.descriptor)
        lock.descriptor = None
    _held_locks.clear()


os.register_at_fork(
    before=_fork_guard.acquire, after_in_parent=_fork_guard.release, after_in_child=_after_fork
)


def acquire_lock(
    caller: str, directory: Path, *, name: str = LOCK_NAME, instead: str = "use another directory"
) -> Lock:
    """Become the writer of a folder, until `release_lock`.

    Args:
      caller: the function that the user called, for messages.
      directory: the folder, which exists.
      name: the name of the lock file; writers of other files in the folder use another name.
      instead: the user's alternative to stopping the other writer, for the message.

    Raises:
      CheckpointInUseError: if another writer holds the lock.
      OSError: if the folder cannot be written to.
    """
    path = directory / name
    while True:
        lock = Lock(caller, path)
        assert lock.descriptor is not None
        try:
            _flock(lock.descriptor, caller, directory)
            if not holds_lock(lock):
                # somebody deleted the file between open and flock, so the locked file is another
                # one
                release_lock(lock)
                continue
            holder = {
                "host": socket.gethostname(),
                "pid": lock.pid,
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            _write_holder(lock.descriptor, json.dumps(holder).encode())
            return lock
        except BlockingIOError as error:
            release_lock(lock)
            raise CheckpointInUseError(_in_use_text(caller, path, instead)) from error
        except BaseException:
            release_lock(lock)
            raise


def holds_lock(lock: Lock) -> bool:
    """Return whether the locked file is still the lock file of the folder.

    Somebody may have deleted it.

    Raises:
      CheckpointInUseError: in a fork of the process that took the lock.
      OSError: if the files cannot be compared.
    """
    if lock.pid != os.getpid():
        problem = (
            f"{lock.path.parent} is written to by process {lock.pid}, and this one, {os.getpid()},"
            " is a fork of it."
        )
        raise CheckpointInUseError(
            format_error(lock.caller, problem, fix="write in the process that began to.")
        )
    if lock.descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(lock.descriptor), lock.path.stat())
    except OSError as error:
        if not is_gone(error):
            raise
        return False


def release_lock(lock: Lock) -> None:
    """Stop being the writer. Calling it twice, or in a fork, is harmless."""
    _held_locks.discard(lock)
    if lock.descriptor is not None:
        with contextlib.suppress(OSError):  # the file system may have no locks
            # children with a copy of the descriptor lose the lock too
            fcntl.flock(lock.descriptor, fcntl.LOCK_UN)
        os.close(lock.descriptor)
    lock.descriptor = None


def is_gone(error: OSError) -> bool:
    """Return whether the error means a missing file.

    On NFS it may have been deleted on another machine.
    """
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def _flock(descriptor: int, caller: str, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        text = (
            f"{caller}: the file system of {directory} has no locks, so a second job writing there"
            " goes unnoticed."
        )
        warnings.warn(text, stacklevel=4)


def _write_holder(descriptor: int, holder: bytes) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder, 0)
    except OSError as error:
        # Continue on a full disk: the new writer frees space first. Only the name of the holder is
        # then missing.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _in_use_text(caller: str, path: Path, instead: str) -> str:
    directory = path.parent
    holder = {"host": "an unknown host", "pid": "unknown", "since": "unknown"}
    # the holder may be writing its name at this moment
    with contextlib.suppress(OSError, ValueError):
        holder |= json.loads(path.read_text())
    if _is_held_here(path):
        problem = (
            f"{directory} is already being written to by this very process, since"
            f" {holder['since']}."
        )
        return format_error(
            caller, problem, fix=f"close() the other Checkpoints first, or {instead}."
        )
    problem = (
        f"{directory} is already being written to by process {holder['pid']} on {holder['host']}, "
        f"since {holder['since']}."
    )
    if holder["host"] != socket.gethostname() or _is_other_live_process(holder["pid"]):
        return format_error(caller, problem, fix=f"stop that job, or {instead}.")
    # The holder has our host name, but no such process exists here. Another container can have the
    # same host name.
    problem += (
        " It cannot be seen from here: it runs in another container, or it has ended and what it"
        " started still runs."
    )
    return format_error(
        caller, problem, fix=f"stop what has {path} open (fuser names it), or {instead}."
    )


def _is_held_here(path: Path) -> bool:
    """Return whether this process holds the lock file.

    Process ids are no proof: containers reuse them.
    """
    for lock in list(_held_locks):
        with contextlib.suppress(OSError):  # another thread may release it now
            if lock.descriptor is not None and os.path.samestat(
                os.fstat(lock.descriptor), path.stat()
            ):
                return True
    return False


def _is_other_live_process(pid: object) -> bool:
    """Return whether another process on this host has this id; True if that is unknown."""
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        pass
    return pid != os.getpid()
