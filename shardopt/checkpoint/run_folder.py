"""The folder of a run: `<step>/` is a committed checkpoint; names that start with a dot are work in progress.

A checkpoint is written and summed up under `.saving-<step>` and becomes `<step>` by one rename; a checkpoint
that is to go becomes `.deleting-<step>` first. So a job killed at any moment leaves whole checkpoints only.
"""

import contextlib
import os
import shutil
from pathlib import Path

from shardopt.core.errors import format_error
from shardopt.runtime.files import is_gone

_SAVING, _DELETING, _REPLACED = ".saving-", ".deleting-", ".replaced-"


def run_folder(who: str, directory: str | os.PathLike[str]) -> Path:
    """Return the folder of a run as an absolute path.

    Raises:
      TypeError: if it is not a path.
      ValueError: if it is an address such as gs://bucket/run.
    """
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


def interrupted(directory: Path, step: int) -> bool:
    """Return whether the save of a step began and did not end."""
    begun = [*directory.glob(f"{_SAVING}{step}"), *directory.glob(f"{_SAVING}{step}.*")]
    return bool(begun) and not step_folder(directory, step).exists()


def check_writable(directory: Path, step: int) -> None:
    """Make a folder and delete it: where process 0 cannot, the others would wait minutes for the one of the step."""
    trial = directory / f"{_SAVING}{step}.trial"
    trial.mkdir()
    trial.rmdir()


def publish(directory: Path, step: int) -> None:
    """Turn the prepared step into a committed one, in the place of an older one if there is one."""
    final, old = step_folder(directory, step), directory / f"{_REPLACED}{step}"
    if final.exists():
        final.rename(old)
    staging_folder(directory, step).rename(final)
    _sync(directory)
    if old.exists():
        shutil.rmtree(old)


def discard(directory: Path, step: int) -> None:
    """Delete a committed step."""
    doomed = directory / f"{_DELETING}{step}"
    step_folder(directory, step).rename(doomed)
    shutil.rmtree(doomed)


def surplus(steps: list[int], keep: int | None, best: int | None) -> list[int]:
    """Return the steps that are neither among the newest `keep` nor the best.

    Example:
      >>> surplus([10, 20, 30, 40], keep=2, best=10)
      [20]
    """
    newest = set(steps if keep is None else steps[-keep:])
    return [step for step in steps if step not in newest and step != best]


def remove_stale(directory: Path) -> None:
    """Delete what killed writers left behind. Only the holder of the lock may call it."""
    for path in directory.glob(f"{_REPLACED}*"):
        final = directory / path.name.removeprefix(_REPLACED)
        if not final.exists():  # killed between the two renames of publish
            path.rename(final)
    for prefix in (_SAVING, _DELETING, _REPLACED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(folder: Path) -> None:
    """See the names in a folder onto the disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
