"""Files and folders with one writer: atomic writes, and a lock that the kernel releases when its holder dies."""

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

from shardopt.core.errors import CheckpointInUseError, format_error


def write_atomic(path: Path, text: str) -> None:
    """Replace a text file by one that is complete: a kill or a full disk leaves it as it was."""
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
    """The right of this process to write to a folder, from `acquire_lock`.

    A process that this one forks has no part in it, and does not keep it alive; one that is handed the descriptor (of
    `subprocess`, in `pass_fds`) has, and does.

    Attributes:
      path: of the lock file.
      who: the function that took it, for messages.
      pid: of the process that took it.
      descriptor: of the lock file; None once it was released, and in a fork.
    """

    def __init__(self, who: str, path: Path):
        self.who, self.path, self.pid = who, path, os.getpid()
        with _forking:  # a fork between these two would keep what it does not know of
            self.descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            _held.add(self)


_held: set[Lock] = set()
_forking = threading.RLock()


def _after_fork() -> None:
    """Close the copies of a fork: the lock lives as long as any copy of its descriptor is open."""
    _forking.release()
    for one in list(_held):
        if one.descriptor is not None:
            os.close(one.descriptor)
        one.descriptor = None
    _held.clear()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_fork)


def acquire_lock(who: str, directory: Path, *, name: str = LOCK_NAME, instead: str = "use another directory") -> Lock:
    """Become the writer of a folder, until `release_lock`.

    Args:
      who: the function that the user called, for messages.
      directory: the folder, which exists.
      name: of the lock file; a writer of other files takes another lock.
      instead: what to do if the other writer goes on, for the message.

    Raises:
      CheckpointInUseError: if another writer has it.
      OSError: if the folder cannot be written to.
    """
    path = directory / name
    while True:
        lock = Lock(who, path)
        assert lock.descriptor is not None
        try:
            _flock(lock.descriptor, who, directory)
            if not holds_lock(lock):  # somebody deleted the file between open and flock: what we locked is no longer it
                release_lock(lock)
                continue
            me = {"host": socket.gethostname(), "pid": lock.pid, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            _sign(lock.descriptor, json.dumps(me).encode())
            return lock
        except BlockingIOError as error:
            release_lock(lock)
            raise CheckpointInUseError(_refusal(who, path, instead)) from error
        except BaseException:
            release_lock(lock)
            raise


def holds_lock(lock: Lock) -> bool:
    """Return whether the lock still stands for the lock file of the folder, which may have been deleted.

    Raises:
      CheckpointInUseError: in a fork of the process that took the lock.
      OSError: if that cannot be told.
    """
    if lock.pid != os.getpid():
        what = f"{lock.path.parent} is written to by process {lock.pid}, and this one, {os.getpid()}, is a fork of it."
        raise CheckpointInUseError(format_error(lock.who, what, fix="write in the process that began to."))
    if lock.descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(lock.descriptor), lock.path.stat())
    except OSError as error:
        if not is_gone(error):
            raise
        return False


def release_lock(lock: Lock) -> None:
    """Leave the folder to others. Twice is harmless, and so is a fork that does it."""
    _held.discard(lock)
    if lock.descriptor is not None:
        with contextlib.suppress(OSError):  # the file system may have no locks
            fcntl.flock(lock.descriptor, fcntl.LOCK_UN)  # those that were handed the descriptor let go as well
        os.close(lock.descriptor)
    lock.descriptor = None


def is_gone(error: OSError) -> bool:
    """Return whether an error says that a file is not there; of NFS, that it was deleted on another machine."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def _flock(descriptor: int, who: str, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        text = f"{who}: the file system of {directory} has no locks, so a second job writing there goes unnoticed."
        warnings.warn(text, stacklevel=4)


def _sign(descriptor: int, name: bytes) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name, 0)
    except OSError as error:
        # A full disk is no reason to be refused: whoever takes the folder makes room first. Others only miss our name.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _refusal(who: str, path: Path, instead: str) -> str:
    directory = path.parent
    holder = {"host": "an unknown host", "pid": "unknown", "since": "unknown"}
    with contextlib.suppress(OSError, ValueError):  # the holder may be writing its lines at this moment
        holder |= json.loads(path.read_text())
    if _is_ours(path):
        what = f"{directory} is already being written to by this very process, since {holder['since']}."
        return format_error(who, what, fix=f"close() the other Checkpoints first, or {instead}.")
    what = (
        f"{directory} is already being written to by process {holder['pid']} on {holder['host']}, "
        f"since {holder['since']}."
    )
    if holder["host"] != socket.gethostname() or _is_another(holder["pid"]):
        return format_error(who, what, fix=f"stop that job, or {instead}.")
    # Its name is ours, and it is not to be seen: a container may call itself as this one does, and number alike.
    what += (
        " It cannot be seen from here: it runs in another container, or it has ended and what it started still runs."
    )
    return format_error(who, what, fix=f"stop what has {path} open (fuser names it), or {instead}.")


def _is_ours(path: Path) -> bool:
    """Return whether this process holds the lock file. Its number would not tell: in containers many have the same."""
    for one in list(_held):
        with contextlib.suppress(OSError):  # let go of meanwhile
            if one.descriptor is not None and os.path.samestat(os.fstat(one.descriptor), path.stat()):
                return True
    return False


def _is_another(pid: object) -> bool:
    """Return whether a process of this number lives here that is not this one, as far as can be told."""
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return pid != os.getpid()
