"""`Checkpoints`: a training run's checkpoints, written in the background, the old ones deleted."""

import contextlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.typing import ArrayLike

from shardopt.checkpoint import store
from shardopt.checkpoint.memory import MemoryWriter, Snapshot
from shardopt.checkpoint.multihost import on_primary_process, raise_together
from shardopt.checkpoint.read import load
from shardopt.checkpoint.record import describe_state, read_meta
from shardopt.checkpoint.run_folder import (
    FilesGoneError,
    RunLock,
    check_writable,
    committed,
    discard,
    remove_stale,
    run_folder,
    step_folder,
)
from shardopt.checkpoint.tree import Json
from shardopt.checkpoint.write import start_write, write_error
from shardopt.core.arguments import check_count
from shardopt.core.errors import CheckpointError, DamagedCheckpointError, format_error
from shardopt.core.types import PyTree
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.runtime import progress

_WHO = "Checkpoints"
_ASKED: Any = object()
"""Stands for an argument that has no default, so that its absence can be explained."""

_LOG = logging.getLogger(__name__)

_TRIES, _PAUSE = 5, 0.1
"""How often, and after how many seconds, what fails because files vanish is tried again: deleting takes a while."""


class Checkpoints:
    """The checkpoints of one training run: asynchronous, atomic, rotating.

    `save` copies the state to the host and returns; a thread writes it and then deletes what is no longer to be
    kept. A write that fails is logged at once and raised by the next `save`, `wait` or `close`.

    Close it, best by `with`: an interpreter that shuts down starts no more threads, so the write that is under way
    when a program ends without `close` is lost (and said to be), and only earlier checkpoints remain.

    From its construction to `close` it is the only writer of the folder: a second one, in whatever process, is
    refused; the lock of a writer that died is no obstacle. If somebody deletes the folder meanwhile, the next `save`
    makes it again and says so: earlier checkpoints are gone, the run is not.

    With several processes all construct it and call its methods in the same order; process 0 does the deleting. Its
    arguments can be read as attributes; `directory` is then an absolute `Path`.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, shardopt as so
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
      >>> state = opt.init({"w": jnp.ones((4, 2))})
      >>> with so.Checkpoints(tempfile.mkdtemp(), every=2, keep=2, best="loss") as checkpoints:
      ...     for step in range(1, 9):
      ...         state, metrics = opt.step(state, jnp.ones((8, 4)))
      ...         if checkpoints.due(step):
      ...             checkpoints.save(state, step=step, metrics={"loss": abs(step - 2)}, extra={"position": step})
      ...     checkpoints.wait()
      ...     checkpoints.steps(), checkpoints.best_step(), checkpoints.restore(opt)[1]
      ([2, 6, 8], 2, {'position': 8})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int,
        keep: int | None = _ASKED,
        *,
        best: str | None = None,
        mode: str = "min",
        resume: bool = True,
        memory_every: int | None = None,
    ):
        """Become the writer of a folder, which is made if it does not exist.

        Args:
          directory: the folder of the run.
          every: steps between checkpoints, at least 1.
          keep: how many of the newest checkpoints to keep, at least 1; None for all. It has no default.
          best: a metric's name: the best checkpoint by it is kept as well. Checkpoints saved without this metric,
            or with a NaN, do not compete.
          mode: "min" or "max".
          resume: whether `fit` goes on from the newest checkpoint in the folder; without, it refuses to start
            beside one.
          memory_every: steps between snapshots, at least 1: copies of the train state in the memory of this host and the
            next, kept by processes that outlive training, the newest two of each. `fit` takes them, and goes on from one
            that is newer than the disk's where it starts again under the same `shardopt launch --max-restarts`, also with
            fewer or more processes. Each host keeps four copies of its share of the state.

        Raises:
          TypeError: if an argument is of the wrong kind.
          ValueError: if `every`, `keep` or `memory_every` is below 1, `mode` is neither "min" nor "max", or snapshots have
            nowhere to go.
          CheckpointInUseError: if another job writes to the folder.
          CheckpointError: if it cannot be written to.
        """
        check_count(_WHO, "every", every)
        if keep is _ASKED:
            fix = "pass keep=3 for the newest three, or keep=None for all."
            raise TypeError(format_error(_WHO, "keep must be given: older checkpoints are deleted by it.", fix=fix))
        if keep is not None:
            check_count(_WHO, "keep", keep)
        if mode not in ("min", "max"):
            raise ValueError(format_error(_WHO, f"mode must be 'min' or 'max', got {mode!r}."))
        if memory_every is not None:
            check_count(_WHO, "memory_every", memory_every)
        self.memory_every = memory_every
        self._memory = None if memory_every is None else MemoryWriter(_WHO)
        self.directory = run_folder(_WHO, directory)
        self.every, self.keep, self.best, self.mode, self.resume = every, keep, best, mode, resume
        self._pid, self._closed = os.getpid(), False
        self._pending: Future[None] | None = None
        self._lock = RunLock(_WHO, self.directory)
        weakref.finalize(self, self._lock.release)
        on_primary_process(self._lock.acquire)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writer = store.Writer()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is to be saved after this step."""
        return step > 0 and step % self.every == 0

    def due_in_memory(self, step: int) -> bool:
        """Return whether a snapshot is to be taken after this step."""
        return self.memory_every is not None and step > 0 and step % self.memory_every == 0

    def save_in_memory(self, state: PyTree, *, step: int, extra: dict[str, Json] | None = None) -> None:
        """Copy this process's part of a state to the host, and send it to the memory of two hosts in the background.

        When this returns the state may be donated. A host that cannot be reached costs a warning.
        """
        if self._memory is not None:
            self._memory.save(state, step, extra or {})

    def newest_in_memory(self, target: ShardedOptimizer) -> Snapshot | None:
        """Return the newest snapshot that is whole on all processes, fits `target`, and is newer than the disk's checkpoints.

        None where there is none. With several processes all must call it.
        """
        return None if self._memory is None else self._memory.newest(target, self.latest() or 0)

    def save(
        self,
        state: PyTree,
        *,
        step: int,
        metrics: Mapping[str, ArrayLike] | None = None,
        extra: dict[str, Json] | None = None,
    ) -> None:
        """Copy a state to the host and write it in the background; wait for an earlier write first.

        When this returns the state may be donated. A checkpoint of the same step is replaced.

        Args:
          state: pytree of arrays.
          step: the number of the checkpoint.
          metrics: scalars; `best` looks here.
          extra: JSON, given back by `restore`; with several processes that of process 0 is kept.

        Raises:
          TypeError: if a leaf is not an array, a metric not a scalar, or `extra` not JSON.
          ValueError: if the state was donated, or `step` is negative.
          CheckpointError: if an earlier write failed; if this one cannot begin; if the folder was replaced by another
            job's or unmounted; if it holds later steps than this one; after `close`.
        """
        meta = describe_state(_WHO, state, step, metrics, extra)
        failure = self._settled()
        if on_primary_process(lambda: self._prepare(meta.step)):
            failure = None  # what was being written went with the folder
        raise_together(failure, unless=FilesGoneError)
        finish = start_write(self._lock, self._writer, state, meta)
        self._pending = self._thread.submit(self._finish, finish, meta.step)

    def wait(self) -> None:
        """Wait until what was saved is committed.

        Raises:
          CheckpointError: if it could not be written.
        """
        if self._pending is not None:
            raise_together(self._settled())

    def close(self) -> None:
        """Wait, then leave the folder to others. Closing twice is harmless.

        Raises:
          CheckpointError: if the last write failed; the folder is released all the same.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._lock.release()
            self._closed = True
            self._writer.close()
            if self._memory is not None:
                self._memory.close()

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending."""
        return committed(self.directory)

    def latest(self) -> int | None:
        """Return the newest committed step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Return the step with the best metric (of equals the earliest), or None where nothing competes.

        Raises:
          DamagedCheckpointError: if the record of a checkpoint cannot be read: it may be the best. While training it
            is kept, whatever `keep` says, and a warning is logged.
        """
        values, unread = _metrics(self.directory, self.best)
        if unread:
            what = f"the best step in {self.directory} by {self.best!r} cannot be determined."
            fix = "bring the file back from a copy, or delete the folder of its step."
            raise DamagedCheckpointError(format_error(_WHO, what, list(unread.values()), fix=fix))
        return _best(values, self.mode)

    def restore(self, target: ShardedOptimizer | PyTree, *, step: int | None = None) -> tuple[PyTree, dict[str, Json]]:
        """Return the state of a checkpoint, by default the newest, and its `extra`; see `shardopt.restore`."""
        self.wait()
        state, meta = load(_WHO, self.directory, target, step=step)
        return state, meta.extra

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The other processes may be well and training on: asking them for their verdict would wait for ever.
        failure = self._settled()
        self.close()
        if failure is not None:
            error.add_note(str(failure))  # what went wrong first must stay in front

    def _settled(self) -> BaseException | None:
        """Wait for the write under way, and return what went wrong with it here."""
        pending, self._pending = self._pending, None
        if pending is None or self._pid != os.getpid():
            return None  # a fork does not have the thread that writes
        return pending.exception()

    def _prepare(self, step: int) -> bool:
        """Make room for a step; make the folder again if it was deleted, and return whether it was."""
        if self._closed:
            raise CheckpointError(format_error(_WHO, "save was called after close.", fix="make a new Checkpoints."))
        for _ in range(_TRIES - 1):
            try:
                return self._make_ready(step)
            except FilesGoneError:  # somebody is deleting: try again until that is over
                time.sleep(_PAUSE)
        return self._make_ready(step)

    def _make_ready(self, step: int) -> bool:
        try:
            again = not self._lock.is_held()
            if again:
                self._lock.acquire_again(step)
                text = "%s: %s was deleted while the job ran. It is made again for step %d; checkpoints before it are gone."
                _LOG.warning(text, _WHO, self.directory, step)
            if later := [other for other in committed(self.directory) if other > step]:
                what = f"step {step} cannot be saved: {self.directory} holds later ones ({', '.join(map(str, later[-8:]))})."
                fix = "delete them if the run was wound back on purpose, or choose another folder: two histories do not mix."
                raise CheckpointError(format_error(_WHO, what, fix=fix))
            remove_stale(self.directory)
            check_writable(self.directory, step)
        except OSError as error:
            raise write_error(_WHO, self.directory, step, error) from error
        return again

    def _finish(self, finish: Callable[[], None], step: int) -> None:
        """Commit and rotate, on the thread."""
        progress.mark("write", step, lane=progress.SAVING)
        try:
            finish()
            if jax.process_index() == 0:
                _rotate(self.directory, step, keep=self.keep, metric=self.best, mode=self.mode)
        except CheckpointError as error:
            _LOG.error("%s", error)  # said now, in case nobody ever waits
            with contextlib.suppress(OSError):
                if jax.process_index() == 0 and self._lock.is_held():
                    remove_stale(self.directory)  # a full disk is everybody's: what cannot be finished makes room
            raise
        finally:
            progress.mark("", lane=progress.SAVING)


def surplus(steps: list[int], keep: int | None, best: int | None) -> list[int]:
    """Return the steps that are neither among the newest `keep` nor the best.

    Example:
      >>> surplus([10, 20, 30, 40], keep=2, best=10)
      [20]
    """
    newest = set(steps if keep is None else steps[-keep:])
    return [step for step in steps if step not in newest and step != best]


def _rotate(directory: Path, step: int, *, keep: int | None, metric: str | None, mode: str) -> None:
    """Delete what is no longer to be kept, now that `step` was written. What may be the best is kept, and said to be.

    Raises:
      CheckpointError: if a step cannot be deleted.
    """
    values, unread = _metrics(directory, metric)
    for old in surplus(committed(directory), keep, _best(values, mode)):
        if old in unread:
            text = "%s: step %d in %s is kept, because it may be the best by %r: %s"
            _LOG.warning(text, _WHO, old, directory, metric, unread[old])
            continue
        try:
            discard(directory, old)
        except OSError as error:
            what = f"step {step} was written, but step {old} in {directory} could not be deleted ({error})."
            raise CheckpointError(format_error(_WHO, what, fix="delete it, or give the job the right to.")) from error


def _metrics(directory: Path, metric: str | None) -> tuple[dict[int, float], dict[int, str]]:
    """Return the metric of each step that has it, and what is wrong with the records that cannot be read."""
    values: dict[int, float] = {}
    unread: dict[int, str] = {}
    if metric is None:
        return values, unread
    for step in committed(directory):
        try:
            values[step] = float(read_meta(_WHO, step_folder(directory, step)).metrics.get(metric, math.nan))
        except CheckpointError as error:
            unread[step] = str(error).partition("\n")[0].removeprefix(f"{_WHO}: ")
    return {step: value for step, value in values.items() if not math.isnan(value)}, unread


def _best(values: dict[int, float], mode: str) -> int | None:
    sign = 1.0 if mode == "min" else -1.0
    return min(values, key=lambda step: (sign * values[step], step), default=None)
