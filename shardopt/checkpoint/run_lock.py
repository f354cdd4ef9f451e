"""The folder of a run in the hands of its writer: taken, lost when somebody deletes it, taken anew."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shardopt.checkpoint.run_folder import check_writable, committed, remove_stale
from shardopt.checkpoint.save import GONE
from shardopt.core.errors import CheckpointError, format_error
from shardopt.runtime.files import Lock, acquire_lock, holds_lock, is_gone, release_lock

_TRIES, _PAUSE = 5, 0.1
"""How often, and after how many seconds, what fails because files vanish is tried again: deleting takes a while."""


class Claim(NamedTuple):
    """A folder that nobody else may write to.

    Attributes:
      lock: its lock.
      folder: a descriptor of the folder itself, which tells it from a later one of the same name.
      device: the file system that it is on.
    """

    lock: Lock
    folder: int
    device: int


def take(who: str, directory: Path) -> Claim:
    """Become the writer of a folder, made if it does not exist, and delete what killed writers left there.

    Raises:
      CheckpointError: if another writer lives, or the folder cannot be written to.
    """
    taken: list[Lock] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken.append(acquire_lock(who, directory))
        remove_stale(directory)
        folder = os.open(directory, os.O_RDONLY)
        return Claim(taken[0], folder, os.fstat(folder).st_dev)
    except OSError as error:
        for one in taken:
            release_lock(one)
        what = f"{directory} cannot be written to ({type(error).__name__}: {error.strerror})."
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room there, or choose another folder." if full else "choose a folder that you may write to."
        raise CheckpointError(format_error(who, what, fix=fix)) from error


def let_go(claim: Claim) -> None:
    """Leave the folder to others."""
    release_lock(claim.lock)
    os.close(claim.folder)


def lost(claim: Claim) -> bool:
    """Return whether the folder was deleted or replaced since it was taken."""
    return not holds_lock(claim.lock)


def take_anew(who: str, directory: Path, claim: Claim, step: int) -> Claim:
    """Make a folder anew that was deleted under its writer, and take it: what is in memory shall not be lost as well.

    Another folder of that name which holds checkpoints by now is another job's; the same one is only half deleted. And
    where the nearest folder that is left is on another file system, the one that was written to is no longer mounted:
    nobody would look for the run there.

    Raises:
      CheckpointError: in these two cases, if another job took the folder first, or if it cannot be made.
    """
    place = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    what = ""
    if committed(directory) and not _same(claim.folder, directory):
        what = (
            f"step {step} cannot be saved: {directory} was replaced while the job ran, by one with other checkpoints."
        )
    elif place.stat().st_dev != claim.device:
        what = (
            f"step {step} cannot be saved: {directory} is gone, and {place} is on another file system than it was: "
            "was it unmounted?"
        )
    if what:
        raise CheckpointError(format_error(who, what, fix="bring it back, or make a new Checkpoints elsewhere."))
    return take(who, directory)


def _same(descriptor: int, directory: Path) -> bool:
    """Return whether a folder is still the one that a descriptor stands for."""
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except OSError as error:
        if not is_gone(error):
            raise
        return False  # NFS forgets what was deleted


def make_ready(who: str, directory: Path, step: int) -> None:
    """Make room for a step in a folder that was taken.

    Raises:
      CheckpointError: if the folder holds later steps.
      OSError: if what a failed write left behind cannot be deleted, or nothing can be made there.
    """
    if later := [other for other in committed(directory) if other > step]:
        what = f"step {step} cannot be saved: {directory} holds later ones ({', '.join(map(str, later[-8:]))})."
        fix = "delete them if the run was wound back on purpose, or choose another folder: two histories do not mix."
        raise CheckpointError(format_error(who, what, fix=fix))
    remove_stale(directory)
    check_writable(directory, step)


def is_of_deletion(message: str) -> bool:
    """Return whether an error of writing is that of files that were there and are gone: somebody is deleting them."""
    return any(text in message.partition("\n")[0] for text in GONE)


def until_deleted(action: Callable[[], Any]) -> Any:
    """Return what the action returns; where it fails because somebody is deleting files, try again until that is over.

    Raises:
      CheckpointError: for any other reason, or after half a second.
    """
    for left in reversed(range(_TRIES)):
        try:
            return action()
        except CheckpointError as error:
            if not left or not is_of_deletion(str(error)):
                raise
            time.sleep(_PAUSE)
    raise AssertionError
