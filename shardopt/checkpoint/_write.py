"""`save`: how a checkpoint is written.

Orbax writes the arrays; then follow record, manifest and one rename.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax

from shardopt.checkpoint import _store as store
from shardopt.checkpoint._multihost import assigned_names, on_primary_process
from shardopt.checkpoint._record import (
    Meta,
    describe_state,
    digest,
    file_sizes,
    write_manifest,
    write_meta,
)
from shardopt.checkpoint._run_folder import (
    RunLock,
    check_writable,
    committed,
    digests_file,
    publish,
    run_folder,
    staging_folder,
    step_folder,
)
from shardopt.core import CheckpointError, PyTree, calling, format_error

_DISK_FULL_MESSAGES = ("No space left on device", "File too large", "Disk quota exceeded")
"""Messages of the kernel about a full disk. orbax and tensorstore wrap them in their own error
types.
"""

_DELETED_MESSAGES = ("No such file or directory", "NOT_FOUND", "Stale file handle")
"""Messages about deleted files; the last one comes from NFS."""


@calling("save")
def save(directory: str | os.PathLike[str], state: PyTree, *, step: int | None = None) -> Path:
    """Write a checkpoint of a training state, and return once it is complete on the disk.

    Args:
      directory: the folder of the run; it is made if it does not exist.
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

    The checkpoint is the folder `directory/<step>/`. It holds:

    - `state/`: the arrays in orbax's format, each leaf under its key path with its logical shape.
      They can be restored onto any mesh and strategy, or read by orbax without shardopt.
    - `shardopt.json`: the description of the arrays.
    - `MANIFEST.json`: the size and SHA-256 of every file.

    The folder appears by one rename when all files are written, so a killed job leaves no half
    checkpoint.

    With several processes all must call it, with a folder on a shared file system.
    """
    lock = RunLock("save", run_folder(directory))
    meta = describe_state(state, step)
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
        problem = f"{lock.directory} already holds step {step}, and nothing is overwritten."
        fix = "pass another step= or directory, or delete that folder first."
        raise CheckpointError(format_error(lock.caller, problem, fix=fix))
    try:
        check_writable(lock.directory, step)
    except OSError as error:
        raise write_error(lock.caller, lock.directory, step, error) from error


def start_write(
    lock: RunLock, writer: store.Writer, state: PyTree, meta: Meta
) -> Callable[[], None]:
    """Copy a state to the host and start writing it.

    Return a function that waits for the write and commits it.

    All processes must call both functions, in the same order. The state may be donated as soon as
    this returns.
    """
    caller = lock.caller
    directory = lock.directory
    step = meta.step
    # written    orbax has written all arrays of all processes
    # recorded   process 0 adds shardopt.json
    # digested   each process reads its share of the files, and syncs them to disk
    # committed  process 0 writes MANIFEST.json and renames the folder: only now it is a checkpoint
    #
    # A barrier ends each stage. A process that failed still comes to all of them.
    failures: list[Exception] = []
    try:
        writer.start(staging_folder(directory, step), state)
    except Exception as error:
        if jax.process_count() == 1:
            raise write_error(caller, directory, step, error) from error
        failures.append(error)  # the other processes hear of it at the next barriers

    def commit() -> None:
        try:
            _finish_write(lock, writer, meta, failures)
        except Exception as error:
            raise write_error(caller, directory, step, error) from error

    return commit


def _finish_write(
    lock: RunLock, writer: store.Writer, meta: Meta, failures: list[Exception]
) -> None:
    """Wait for orbax, digest the files, commit. A process that fails still calls every barrier."""
    directory = lock.directory
    rank = jax.process_index()
    folder = staging_folder(directory, meta.step)

    def run_stage(name: str, action: Callable[[], None]) -> None:
        if not failures:
            try:
                action()
            except Exception as error:
                failures.append(error)
        store.barrier(f"{folder}.{name}")

    def digest_files() -> None:
        digests = {
            name: digest(folder / name, sync=True) for name in assigned_names(file_sizes(folder))
        }
        digests_file(directory, meta.step, rank).write_text(json.dumps(digests))

    writer.wait(failures)
    store.barrier(f"{folder}.written")
    run_stage("recorded", lambda: write_meta(folder, meta) if rank == 0 else None)
    run_stage("digested", digest_files)
    run_stage("committed", lambda: _commit(lock, meta.step) if rank == 0 else None)
    if failures:
        raise failures[0]
    # How a process without a failure hears of one of process 0: the rename did not happen.
    if folder.exists() or not step_folder(directory, meta.step).exists():
        raise OSError("process 0 failed; its message has the reason")


def _commit(lock: RunLock, step: int) -> None:
    """Gather the digests of all processes into the manifest, and publish the step.

    Only process 0 calls it.
    """
    folder = staging_folder(lock.directory, step)
    digests: dict[str, str] = {}
    for rank in range(jax.process_count()):
        rank_file = digests_file(lock.directory, step, rank)
        if not rank_file.exists():
            raise OSError(f"process {rank} failed; its message has the reason")
        digests |= json.loads(rank_file.read_text())
        # Through files and not by a message: this runs on a thread, next to the training.
        rank_file.unlink()
    if digests.keys() != file_sizes(folder).keys():
        raise OSError(
            "the processes do not see the same files; is the folder on a file system that all"
            " share?"
        )
    write_manifest(folder, digests)
    if not lock.is_held():  # orbax may have made a deleted folder again, without its other files
        raise OSError("the folder was deleted or replaced meanwhile")
    publish(lock.directory, step)


def write_error(caller: str, directory: Path, step: int, error: Exception) -> CheckpointError:
    """Return the error for a failed write."""
    error_lines = _error_lines(error)
    cause = f"{type(error).__name__}: {error_lines[0]}"
    # the reason may be in a later line
    reasons = (*_DISK_FULL_MESSAGES, *_DELETED_MESSAGES)
    if not any(text in cause for text in reasons):
        later_reasons = [text for text in reasons if any(text in line for line in error_lines)]
        cause += f" ... {later_reasons[0]}" if later_reasons else ""
    problem = f"step {step} could not be written to {directory} ({cause})."
    advice = (
        "make room" if any(text in cause for text in _DISK_FULL_MESSAGES) else "remove the cause"
    )
    fix = f"{advice}, then save again; checkpoints that were committed before are untouched."
    if any(text in cause for text in _DELETED_MESSAGES):
        fix = "somebody deletes files there: end that, or save to another folder."
    return CheckpointError(format_error(caller, problem, fix=fix))


def _error_lines(error: BaseException) -> list[str]:
    """Return the lines of an error, of its cause, and of the exceptions in an exception group."""
    inner_errors = [
        inner for inner in (error.__cause__, *getattr(error, "exceptions", ())) if inner is not None
    ]
    return [
        *(str(error).strip().splitlines() or ["no message"]),
        *(line for inner in inner_errors for line in _error_lines(inner)),
    ]
