"""The folder of a run: what it holds, how a step gets in and out of it, and who may write to it.

`<step>/` is a committed checkpoint; names that start with a dot are work in progress. A checkpoint is written under
`.saving-<step>` and becomes `<step>` by one rename; one that is to go becomes `.deleting-<step>` first. So a job
killed at any moment leaves complete checkpoints only.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path

from shardopt.core.errors import CheckpointError, format_error
from shardopt.runtime.files import Lock, acquire_lock, holds_lock, is_gone, release_lock

_SAVING, _DELETING, _REPLACED = ".saving-", ".deleting-", ".replaced-"


class FilesGoneError(CheckpointError):
    """What was being written vanished: somebody is deleting the folder."""


def run_folder(who: str, directory: str | os.PathLike[str]) -> Path:
    """Return the folder of a run as an absolute path; refuse what is not one, or an address such as gs://bucket/run."""
    if not isinstance(directory, str | os.PathLike):
        fix = "pass a path."
        raise TypeError(format_error(who, f"directory must be a path, got {type(directory).__name__}.", fix=fix))
    if "://" in os.fspath(directory):
        what = f"directory must be a path in a file system, got {os.fspath(directory)!r}."
        fix = "mount the bucket (for instance with gcsfuse) and pass the path of the mount."
        raise ValueError(format_error(who, what, fix=fix))
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
    return sorted(int(name) for name in names if str(int(name)) == name)


def step_folder(directory: Path, step: int) -> Path:
    """Return where a committed step lives."""
    return directory / str(step)


def staging_folder(directory: Path, step: int) -> Path:
    """Return where a step is prepared."""
    return directory / f"{_SAVING}{step}"


def digests_file(directory: Path, step: int, rank: int) -> Path:
    """Return where a process leaves its digests for process 0: beside the staging folder, so no file of it."""
    return directory / f"{_SAVING}{step}.digests-{rank}"


def interrupted(directory: Path, step: int) -> bool:
    """Return whether the save of a step began and did not end."""
    begun = [*directory.glob(f"{_SAVING}{step}"), *directory.glob(f"{_SAVING}{step}.*")]
    return bool(begun) and not step_folder(directory, step).exists()


def publish(directory: Path, step: int) -> None:
    """Turn the prepared step into a committed one, in the place of an older one if there is one."""
    final, old = step_folder(directory, step), directory / f"{_REPLACED}{step}"
    if final.exists():
        final.rename(old)
    staging_folder(directory, step).rename(final)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if old.exists():
        shutil.rmtree(old)


def discard(directory: Path, step: int) -> None:
    """Delete a committed step."""
    doomed = directory / f"{_DELETING}{step}"
    step_folder(directory, step).rename(doomed)
    shutil.rmtree(doomed)


def check_writable(directory: Path, step: int) -> None:
    """Make a folder and delete it: where process 0 cannot, the others would wait minutes for the one of the step."""
    trial = directory / f"{_SAVING}{step}.trial"
    trial.mkdir()
    trial.rmdir()


def remove_stale(directory: Path) -> None:
    """Delete what killed writers left behind. Only the holder of the lock may call it."""
    for path in directory.glob(f"{_REPLACED}*"):
        final = directory / path.name.removeprefix(_REPLACED)
        if not final.exists():  # killed between the two renames of publish
            path.rename(final)
    for prefix in (_SAVING, _DELETING, _REPLACED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class RunLock:
    """The right to write to the folder of a run, until `release`; the kernel ends it with the process.

    Args:
      who: the function that asks for it, for messages.
      directory: the folder.
    """

    def __init__(self, who: str, directory: Path):
        self.who, self.directory = who, directory
        self._lock: Lock | None = None
        self._folder = -1  # a descriptor of the folder itself, which tells it from a later one of the same name
        self._device = -1  # the file system that it is on

    def acquire(self) -> None:
        """Become the writer of the folder, made if it does not exist, and delete what killed writers left there.

        Raises:
          CheckpointInUseError: if there is another writer.
          CheckpointError: if the folder cannot be written to.
        """
        taken: Lock | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            taken = acquire_lock(self.who, self.directory)
            remove_stale(self.directory)
            folder = os.open(self.directory, os.O_RDONLY)
        except OSError as error:
            if taken is not None:
                release_lock(taken)
            what = f"{self.directory} cannot be written to ({type(error).__name__}: {error.strerror})."
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fix = "make room there, or choose another folder." if full else "choose a folder that you may write to."
            kind = FilesGoneError if is_gone(error) else CheckpointError
            raise kind(format_error(self.who, what, fix=fix)) from error
        self.release()
        self._lock, self._folder, self._device = taken, folder, os.fstat(folder).st_dev

    def acquire_again(self, step: int) -> None:
        """Become the writer again after somebody deleted the folder: what is in memory shall not be lost as well.

        Another folder of that name which holds checkpoints is another job's; the same one is only half deleted. And
        where the nearest folder that is left is on another file system, the one that was written to is no longer
        mounted: nobody would look for the run beneath its mount point.

        Raises:
          CheckpointError: in these two cases, if another job took the folder first, or if it cannot be made.
        """
        place = next(folder for folder in (self.directory, *self.directory.parents) if folder.is_dir())
        what = ""
        if committed(self.directory) and not self._is_same_folder():
            what = f"{self.directory} was replaced while the job ran, by one with other checkpoints."
        elif place.stat().st_dev != self._device:
            what = f"{self.directory} is gone, and {place} is on another file system than it was: was it unmounted?"
        if what:
            fix = "bring it back, or make a new Checkpoints elsewhere."
            raise CheckpointError(format_error(self.who, f"step {step} cannot be saved: {what}", fix=fix))
        self.acquire()

    def is_held(self) -> bool:
        """Return whether the folder is still the one that was acquired."""
        return self._lock is not None and holds_lock(self._lock)

    def release(self) -> None:
        """Leave the folder to others. Twice is harmless."""
        if self._lock is not None:
            release_lock(self._lock)
            os.close(self._folder)
            self._lock = None

    def _is_same_folder(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._folder), self.directory.stat())
        except OSError as error:
            if not is_gone(error):
                raise
            return False  # NFS forgets what was deleted
