"""One writer a folder: a lock that the kernel lets go of when its holder dies, however it dies."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path

from shardopt.core.errors import CheckpointError, complaint

NAME = ".lock"


def acquire(who: str, directory: Path, *, name: str = NAME, instead: str = "use another directory") -> int:
    """Become the writer of a folder, and return the descriptor that holds the lock; closing it lets go.

    Args:
      who: the function that complains.
      directory: the folder, which exists.
      name: of the lock file; who writes other files there takes another lock.
      instead: what to do where the other writer is to live on, for the message.

    Raises:
      CheckpointError: if another writer lives.
    """
    path = directory / name
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(_refusal(who, path, instead)) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                os.close(descriptor)
                raise
            text = f"{who}: the file system of {directory} has no locks, so a second job writing there goes unnoticed."
            warnings.warn(text, stacklevel=3)
        if holds(directory, descriptor, name):
            break
        os.close(descriptor)  # somebody deleted the file between open and flock: what we locked is no longer it
    me = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(me).encode(), 0)
    except OSError as error:
        # A full disk is no reason to be refused: whoever takes the folder makes room first. Others only miss our name.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            os.close(descriptor)
            raise
    return descriptor


def holds(directory: Path, descriptor: int, name: str = NAME) -> bool:
    """Return whether the descriptor still stands for the lock file of the folder, which may have been deleted."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), (directory / name).stat())
    return False


def _refusal(who: str, path: Path, instead: str) -> str:
    directory = path.parent
    holder = {"host": "an unknown host", "pid": "unknown", "since": "unknown"}
    with contextlib.suppress(OSError, ValueError):  # the holder may be writing its lines at this moment
        holder |= json.loads(path.read_text())
    if (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid()):
        what = f"{directory} is already being written to by this very process, since {holder['since']}."
        return complaint(who, what, fix=f"close() the other Checkpoints first, or {instead}.")
    what = (
        f"{directory} is already being written to by process {holder['pid']} on {holder['host']}, "
        f"since {holder['since']}."
    )
    return complaint(who, what, fix=f"stop that job, or {instead}.")
