"""The folder of a run: its layout, how a step is added or deleted, and which process may write to
it.

`<step>/` is a committed checkpoint; a name that starts with a dot is work in progress. A checkpoint
is written under `.saving-<step>` and becomes `<step>` by one rename. Before a checkpoint is
deleted, it is renamed to `.deleting-<step>`. So a job killed at any moment leaves only complete
checkpoints.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path

from shardopt.core import CheckpointError, format_error, type_error, value_error
from shardopt.runtime._files import Lock, acquire_lock, holds_lock, is_gone, release_lock

_SAVING = ".saving-"
_DELETING = ".deleting-"
_REPLACED = ".replaced-"


def run_folder(directory: str | os.PathLike[str]) -> Path:
    """Return the folder of a run as an absolute path.

    Raises:
      TypeError: if `directory` is not a path.
      ValueError: if `directory` is an address such as gs://bucket/run.
    """
    if not isinstance(directory, str | os.PathLike):
        fix = "pass a path."
        raise type_error(f"directory must be a path, got {type(directory).__name__}.", fix=fix)
    if "://" in os.fspath(directory):
        problem = f"directory must be a path in a file system, got {os.fspath(directory)!r}."
        fix = "mount the bucket (for instance with gcsfuse) and pass the path of the mount."
        raise value_error(problem, fix=fix)
    return Path(directory).expanduser().absolute()


def committed(directory: Path) -> list[int]:
    """Return the committed steps, ascending."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.isdecimal() and entry.is_dir()]
    except OSError as error:
        if not is_gone(error):
            raise
        return []
    # Not `007`, nor digits of other scripts: `step_folder` would look for another name.
    return sorted(int(name) for name in names if str(int(name)) == name)


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a committed step."""
    return directory / str(step)


def staging_folder(directory: Path, step: int) -> Path:
    """Return the folder where a step is prepared."""
    return directory / f"{_SAVING}{step}"


def digests_file(directory: Path, step: int, rank: int) -> Path:
    """Return the file through which a process sends its digests to process 0.

    The file lies next to the staging folder, so it is not a part of the checkpoint.
    """
    return directory / f"{_SAVING}{step}.digests-{rank}"


def interrupted(directory: Path, step: int) -> bool:
    """Return whether a save of the step began and did not finish."""
    unfinished = [*directory.glob(f"{_SAVING}{step}"), *directory.glob(f"{_SAVING}{step}.*")]
    return bool(unfinished) and not step_folder(directory, step).exists()


def publish(directory: Path, step: int) -> None:
    """Turn the prepared step into a committed one; replace an older one of the same number."""
    final = step_folder(directory, step)
    old = directory / f"{_REPLACED}{step}"
    if final.exists():
        final.rename(old)
    # Between the two renames no folder has the number. `remove_stale` undoes the first one after a
    # kill.
    staging_folder(directory, step).rename(final)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    # Only now, with the renames synced: until then the older one may be needed after a crash.
    if old.exists():
        shutil.rmtree(old)


def discard(directory: Path, step: int) -> None:
    """Delete a committed step: rename its folder first, so that no half checkpoint remains."""
    doomed = directory / f"{_DELETING}{step}"
    step_folder(directory, step).rename(doomed)
    shutil.rmtree(doomed)


def set_aside(directory: Path, step: int) -> None:
    """Rename the folder of a committed step, so that it does not count any more."""
    aside = directory / f"{step}.damaged"
    if aside.exists():
        shutil.rmtree(aside)
    step_folder(directory, step).rename(aside)


def check_writable(directory: Path, step: int) -> None:
    """Make a folder and delete it, to find out early whether process 0 can write.

    If process 0 cannot make the folder of the step, the other processes wait minutes for that
    folder.
    """
    trial = directory / f"{_SAVING}{step}.trial"
    trial.mkdir()
    trial.rmdir()


def remove_stale(directory: Path) -> None:
    """Delete files of killed writers. Only the process that holds the lock may call it."""
    for path in directory.glob(f"{_REPLACED}*"):
        final = directory / path.name.removeprefix(_REPLACED)
        if not final.exists():  # killed between the two renames of publish
            path.rename(final)
    for prefix in (_SAVING, _DELETING, _REPLACED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class RunLock:
    """The right to write to the folder of a run, until `release`.

    The kernel releases it when the process ends.

    Args:
      caller: the function that the user called, for messages.
      directory: the folder.
    """

    def __init__(self, caller: str, directory: Path):
        self.caller = caller
        self.directory = directory
        self._lock: Lock | None = None

    def acquire(self) -> None:
        """Become the writer of the folder, and delete files of killed writers.

        Make the folder if it does not exist.

        Raises:
          CheckpointInUseError: if there is another writer.
          CheckpointError: if the folder cannot be written to.
        """
        lock: Lock | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = acquire_lock(self.caller, self.directory)
            remove_stale(self.directory)
        except OSError as error:
            if lock is not None:
                release_lock(lock)
            problem = (
                f"{self.directory} cannot be written to ({type(error).__name__}: {error.strerror})."
            )
            fix = "choose a folder that you may write to."
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                fix = "make room there, or choose another folder."
            raise CheckpointError(format_error(self.caller, problem, fix=fix)) from error
        self._lock = lock

    def is_held(self) -> bool:
        """Return whether the folder is still the acquired one: nobody deleted or replaced it."""
        return self._lock is not None and holds_lock(self._lock)

    def release(self) -> None:
        """Stop being the writer. Calling it twice is harmless."""
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None
