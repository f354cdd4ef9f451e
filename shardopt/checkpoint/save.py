"""`save`: one checkpoint, now."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardopt.checkpoint import store
from shardopt.checkpoint.multihost import on_primary_process, share
from shardopt.checkpoint.record import Meta, describe_state, digest, file_sizes, write_manifest, write_meta
from shardopt.checkpoint.run_folder import (
    check_writable,
    committed,
    publish,
    remove_stale,
    run_folder,
    staging_folder,
    step_folder,
)
from shardopt.checkpoint.store import check_leaves
from shardopt.core.arguments import is_integer
from shardopt.core.errors import CheckpointError, format_error
from shardopt.runtime.files import Lock, acquire_lock, holds_lock, is_gone, release_lock

# A checkpoint is written: arrays by orbax, then the record, then the manifest, then one rename.


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
    return CheckpointError(format_error(who, what, fix=fix))


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


def save(directory: str | os.PathLike[str], state: Any, *, step: int | None = None) -> Path:
    """Write a checkpoint of a training state, and return once it is whole on the disk.

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
      CheckpointError: if the folder already holds this step, another job writes there, or writing fails. It is a
        ValueError.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, shardopt as so
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
      >>> state = opt.init({"w": jnp.ones((64, 32))})
      >>> so.save(tempfile.mkdtemp(), state, step=7).name
      '7'
    """
    who = "save"
    path = run_folder(who, directory)
    number = check_step(who, step, state)
    held: list[Lock] = []
    try:
        on_primary_process(lambda: _open(who, path, number, held))
        with contextlib.closing(store.Writer()) as writer:
            start(who, writer, path, state, lambda: holds_lock(held[0]), step=number)()
    finally:
        for one in held:
            release_lock(one)
    return step_folder(path, number)


def check_step(who: str, step: Any, state: Any) -> int:
    """Return the step's number, from the state if it is None.

    Raises:
      TypeError: if it is not an integer, or None and the state has no `step`.
      ValueError: if it is negative.
    """
    if step is None:
        step = getattr(state, "step", None)
        if step is None:
            what = f"step must be given, because the state ({type(state).__name__}) has none."
            raise TypeError(format_error(who, what, fix="pass step=."))
        step = int(np.asarray(jax.device_get(step)))
    if not is_integer(step):
        raise TypeError(format_error(who, f"step must be an integer, got {step!r} ({type(step).__name__})."))
    if step < 0:
        raise ValueError(format_error(who, f"step must not be negative, got {step}.", fix="count steps from 0."))
    return int(step)


def _open(who: str, directory: Path, step: int, held: list[Lock]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held.append(acquire_lock(who, directory))
        remove_stale(directory)
        check_writable(directory, step)
    except OSError as error:
        raise failed(who, directory, step, error) from error
    if step in committed(directory):
        what = f"{directory} already holds step {step}, and nothing is overwritten."
        raise CheckpointError(
            format_error(who, what, fix="pass another step= or directory, or delete that folder first.")
        )
