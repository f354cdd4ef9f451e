"""A checkpoint is written: arrays by orbax, then the record, then the manifest, then one rename."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardopt.checkpoint import store
from shardopt.checkpoint.agree import share
from shardopt.checkpoint.leaves import check_leaves
from shardopt.checkpoint.manifest import digest, file_sizes, write_manifest
from shardopt.checkpoint.meta import Meta, describe_state, write_meta
from shardopt.checkpoint.steps import publish, staging_folder, step_folder
from shardopt.core.errors import CheckpointError, complaint
from shardopt.core.lock import is_gone

_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
"""What the kernel says of a full disk, whoever wraps it: orbax and tensorstore have kinds of errors of their own."""

GONE = ("No such file or directory", "NOT_FOUND", "Stale file handle")
"""What it says of files that were deleted, the last of them over NFS."""


def start(
    who: str, writer: store.Writer, directory: Path, state: Any, ours: Callable[[], bool], **about: Any
) -> Callable[[], None]:
    """Copy a state to the host and begin to write it; return what waits for the end and commits it.

    All processes must call both, in the same order. The state may be donated as soon as this returns.

    Args:
      who: the function that complains.
      writer: idle.
      directory: the folder of the run, which exists.
      state: pytree of arrays.
      ours: returns, on process 0, whether the folder is still the one whose lock is held.
      **about: `step`, `metrics` and `extra`, see `Meta`.
    """
    check_leaves(who, state)
    meta = describe_state(state, **about)
    began: list[Exception] = []
    try:
        writer.start(staging_folder(directory, meta.step), state)
    except Exception as error:
        if jax.process_count() == 1:
            raise failed(who, directory, meta.step, error) from error
        began.append(error)  # the others are to hear of it, and meet this process until then

    def finish() -> None:
        try:
            _finish(writer, directory, meta, ours, began)
        except Exception as error:
            raise failed(who, directory, meta.step, error) from error

    return finish


def failed(who: str, directory: Path, step: int, error: Exception) -> CheckpointError:
    """Return the error for a write that failed."""
    said = _said(error)
    cause = f"{type(error).__name__}: {said[0]}"
    if not any(text in cause for text in (*_FULL, *GONE)):  # the reason may stand further down
        reason = next((text for text in (*_FULL, *GONE) if any(text in line for line in said)), None)
        cause += f" ... {reason}" if reason else ""
    what = f"step {step} could not be written to {directory} ({cause})."
    remedy = "make room" if any(text in cause for text in _FULL) else "remove the cause"
    fix = f"{remedy}, then save again; checkpoints that were committed before are untouched."
    if _is_deleted(directory):
        fix = f"{directory} was deleted, with what was in it; save again, and it is made anew."
    return CheckpointError(complaint(who, what, fix=fix))


def _said(error: BaseException) -> list[str]:
    """Return the lines of an error, and of those that it was made from or bundles."""
    others = [one for one in (error.__cause__, *getattr(error, "exceptions", ())) if one is not None]
    return [*(str(error).strip().splitlines() or ["no message"]), *(line for one in others for line in _said(one))]


def _is_deleted(directory: Path) -> bool:
    try:
        directory.stat()
    except OSError as error:
        return is_gone(error)
    return False


def _finish(
    writer: store.Writer, directory: Path, meta: Meta, ours: Callable[[], bool], failures: list[Exception]
) -> None:
    """Wait for orbax, sum up the files, commit. A process that fails still meets the others at each barrier."""
    folder, first = staging_folder(directory, meta.step), jax.process_index() == 0

    def stage(name: str, action: Callable[[], None]) -> None:
        if not failures:
            try:
                action()
            except Exception as error:
                failures.append(error)
        store.barrier(f"{folder}.{name}")

    def commit() -> None:
        if first:
            digests: dict[str, str] = {}
            for rank in range(jax.process_count()):
                part = _part(directory, meta.step, rank)
                if not part.exists():
                    raise OSError(f"process {rank} failed; its message has the reason")
                digests |= json.loads(part.read_text())
                part.unlink()
            if digests.keys() != file_sizes(folder).keys():
                raise OSError("the processes do not see the same files; is the folder on a file system that all share?")
            write_manifest(folder, digests)
            if not ours():  # the writer of the arrays may have made folders anew, without what was in them
                raise OSError("the folder was deleted or replaced meanwhile")
            publish(directory, meta.step)

    def sum_up() -> None:
        digests = {name: digest(folder / name, sync=True) for name in share(file_sizes(folder))}
        _part(directory, meta.step, jax.process_index()).write_text(json.dumps(digests))

    writer.wait(failures)
    store.barrier(f"{folder}.written")
    stage("recorded", lambda: write_meta(folder, meta) if first else None)
    stage("summed", sum_up)
    stage("committed", commit)
    if failures:
        raise failures[0]
    if folder.exists() or not step_folder(directory, meta.step).exists():
        raise OSError("process 0 failed; its message has the reason")


def _part(directory: Path, step: int, rank: int) -> Path:
    """Return where a process leaves its digests for process 0: beside the staging folder, so no file of it."""
    return directory / f".saving-{step}.digests-{rank}"
