"""`save`, and how a checkpoint is written: arrays by orbax, then the record, then the manifest, then one rename."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax

from shardopt.checkpoint import store
from shardopt.checkpoint.multihost import on_primary_process, share
from shardopt.checkpoint.record import Meta, describe_state, digest, file_sizes, write_manifest, write_meta
from shardopt.checkpoint.run_folder import (
    FilesGoneError,
    RunLock,
    check_writable,
    committed,
    digests_file,
    publish,
    run_folder,
    staging_folder,
    step_folder,
)
from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import PyTree
from shardopt.runtime.files import is_gone

_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
"""What the kernel says of a full disk, whoever wraps it: orbax and tensorstore have kinds of errors of their own."""

_GONE = ("No such file or directory", "NOT_FOUND", "Stale file handle")
"""What they say of files that were deleted, the last of them over NFS."""


def save(directory: str | os.PathLike[str], state: PyTree, *, step: int | None = None) -> Path:
    """Write a checkpoint of a training state, and return once it is complete on the disk.

    The checkpoint is `directory/<step>/`: the arrays under `state/` in orbax's format, each leaf under its key path
    with its logical shape, so that it can be restored onto any mesh and strategy, or read by orbax alone;
    `shardopt.json`, which describes them; and `MANIFEST.json` with size and SHA-256 of every file. It appears by
    one rename when all of this is written: a job killed at any moment leaves no half checkpoint.

    With several processes all must call it, on a folder that all of them see.

    Args:
      directory: the folder of the run; made if it does not exist.
      state: pytree of arrays, usually a `TrainState`.
      step: the number of the checkpoint; by default `state.step`.

    Returns:
      The folder of the checkpoint.

    Raises:
      TypeError: if a leaf is not an array, or `step` is not an integer.
      ValueError: if `step` is negative, or `state` was donated to a later step.
      CheckpointInUseError: if another job writes to the folder.
      CheckpointError: if the folder already holds this step, or writing fails. It is a ValueError.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, shardopt as so
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
      >>> state = opt.init({"w": jnp.ones((64, 32))})
      >>> so.save(tempfile.mkdtemp(), state, step=7).name
      '7'
    """
    lock = RunLock("save", run_folder("save", directory))
    meta = describe_state("save", state, step)
    try:
        on_primary_process(lambda: _prepare(lock, meta.step))
        with contextlib.closing(store.Writer()) as writer:
            start_write(lock, writer, state, meta)()
    finally:
        lock.release()
    return step_folder(lock.directory, meta.step)


def _prepare(lock: RunLock, step: int) -> None:
    lock.acquire()
    if step in committed(lock.directory):
        what = f"{lock.directory} already holds step {step}, and nothing is overwritten."
        fix = "pass another step= or directory, or delete that folder first."
        raise CheckpointError(format_error(lock.who, what, fix=fix))
    try:
        check_writable(lock.directory, step)
    except OSError as error:
        raise write_error(lock.who, lock.directory, step, error) from error


def start_write(lock: RunLock, writer: store.Writer, state: PyTree, meta: Meta) -> Callable[[], None]:
    """Copy a state to the host and begin to write it; return what waits for the end and commits it.

    All processes must call both, in the same order. The state may be donated as soon as this returns.
    """
    who, directory, step = lock.who, lock.directory, meta.step
    failures: list[Exception] = []
    try:
        writer.start(staging_folder(directory, step), state)
    except Exception as error:
        if jax.process_count() == 1:
            raise write_error(who, directory, step, error) from error
        failures.append(error)  # the others are to hear of it, and meet this process until then

    def finish() -> None:
        try:
            _finish_write(lock, writer, meta, failures)
        except Exception as error:
            raise write_error(who, directory, step, error) from error

    return finish


def _finish_write(lock: RunLock, writer: store.Writer, meta: Meta, failures: list[Exception]) -> None:
    """Wait for orbax, digest the files, commit. A process that fails still meets the others at each barrier."""
    directory, rank = lock.directory, jax.process_index()
    folder = staging_folder(directory, meta.step)

    def stage(name: str, action: Callable[[], None]) -> None:
        if not failures:
            try:
                action()
            except Exception as error:
                failures.append(error)
        store.barrier(f"{folder}.{name}")

    def digest_files() -> None:
        digests = {name: digest(folder / name, sync=True) for name in share(file_sizes(folder))}
        digests_file(directory, meta.step, rank).write_text(json.dumps(digests))

    writer.wait(failures)
    store.barrier(f"{folder}.written")
    stage("recorded", lambda: write_meta(folder, meta) if rank == 0 else None)
    stage("digested", digest_files)
    stage("committed", lambda: _commit(lock, meta.step) if rank == 0 else None)
    if failures:
        raise failures[0]
    if folder.exists() or not step_folder(directory, meta.step).exists():
        raise OSError("process 0 failed; its message has the reason")


def _commit(lock: RunLock, step: int) -> None:
    """Gather the digests of all processes into the manifest, and publish; on process 0."""
    folder = staging_folder(lock.directory, step)
    digests: dict[str, str] = {}
    for rank in range(jax.process_count()):
        part = digests_file(lock.directory, step, rank)
        if not part.exists():
            raise OSError(f"process {rank} failed; its message has the reason")
        digests |= json.loads(part.read_text())
        part.unlink()
    if digests.keys() != file_sizes(folder).keys():
        raise OSError("the processes do not see the same files; is the folder on a file system that all share?")
    write_manifest(folder, digests)
    if not lock.is_held():  # the writer of the arrays may have made folders again, without what was in them
        raise OSError("the folder was deleted or replaced meanwhile")
    publish(lock.directory, step)


def write_error(who: str, directory: Path, step: int, error: Exception) -> CheckpointError:
    """Return the error for a write that failed; a `FilesGoneError` if what was written was deleted."""
    lines = _lines(error)
    cause = f"{type(error).__name__}: {lines[0]}"
    if not any(text in cause for text in (*_FULL, *_GONE)):  # the reason may stand further down
        reason = next((text for text in (*_FULL, *_GONE) if any(text in line for line in lines)), None)
        cause += f" ... {reason}" if reason else ""
    what = f"step {step} could not be written to {directory} ({cause})."
    remedy = "make room" if any(text in cause for text in _FULL) else "remove the cause"
    fix = f"{remedy}, then save again; checkpoints that were committed before are untouched."
    if _is_deleted(directory):
        fix = f"{directory} was deleted, with what was in it; save again, and it is made again."
    kind = FilesGoneError if any(text in cause for text in _GONE) else CheckpointError
    return kind(format_error(who, what, fix=fix))


def _lines(error: BaseException) -> list[str]:
    """Return the lines of an error, and of those that it was made from or bundles."""
    others = [one for one in (error.__cause__, *getattr(error, "exceptions", ())) if one is not None]
    return [*(str(error).strip().splitlines() or ["no message"]), *(line for one in others for line in _lines(one))]


def _is_deleted(directory: Path) -> bool:
    try:
        directory.stat()
    except OSError as error:
        return is_gone(error)
    return False
