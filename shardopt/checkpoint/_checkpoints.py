"""`Checkpoints`: the checkpoints of a training run, written in the background, with old ones
deleted.
"""

import contextlib
import datetime
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import jax
from jax.typing import ArrayLike

from shardopt.checkpoint import _store as store
from shardopt.checkpoint._hashed import KEY, Patterns, compile_patterns, record_of, without_hashed
from shardopt.checkpoint._match import NewChain
from shardopt.checkpoint._memory import MemorySnapshot, MemoryWriter
from shardopt.checkpoint._multihost import check_all_write, on_primary_process, raise_together
from shardopt.checkpoint._read import load
from shardopt.checkpoint._record import describe_state, read_meta
from shardopt.checkpoint._run_folder import (
    RunLock,
    check_writable,
    committed,
    discard,
    remove_stale,
    run_folder,
    set_aside,
    step_folder,
)
from shardopt.checkpoint._sums import LeafSums
from shardopt.checkpoint._tree import JsonObject, leaves_by_path
from shardopt.checkpoint._write import start_write, write_error
from shardopt.core import (
    CheckpointError,
    PyTree,
    calling,
    check_count,
    error_text,
    format_error,
    type_error,
    value_error,
)
from shardopt.runtime import _progress as progress
from shardopt.runtime._agreement import agree
from shardopt.runtime._stored_programs import FOLDER_NAME, stored_programs
from shardopt.step._optimizer import ShardedOptimizer

_CALLER = "Checkpoints"
_LOG = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training run: asynchronous, atomic, rotating.

    `save` copies the state to the host and returns. A thread writes the copy, then deletes the
    checkpoints that `keep` does not retain. A failed write is logged at once, and raised by the
    next `save`, `wait` or `close`.

    Close it, best with a `with` statement. If a program ends without `close`, the write in progress
    is lost, because an interpreter that shuts down starts no threads. An error is logged, and
    earlier checkpoints remain.

    From its construction to `close` jax's compilation cache is in `compiled` in the folder, so a
    restart compiles nothing that was compiled in this time. If the cache has a folder already, it
    keeps that folder. On CPU with jaxlib 0.10.2 the cache is off, and a warning says so.

    From its construction to `close` it is the only writer of the folder. A second writer, in any
    process, is refused; the lock of a writer that died is ignored. If somebody deletes the folder
    during training, the next `save` raises.

    With several processes all construct it and call its methods in the same order; process 0
    deletes. The arguments can be read as attributes; `directory` is then an absolute `Path`.

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

    @calling(_CALLER)
    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int | datetime.timedelta,
        keep: int | None,
        *,
        best: str | None = None,
        mode: str = "min",
        resume: bool | Literal["new_chain"] | Mapping[str, str | None] = True,
        memory_every: int | None = None,
        hash_only: Patterns = (),
    ):
        """Become the writer of a folder; make the folder if it does not exist.

        Args:
          directory: the folder of the run.
          every: steps between checkpoints, at least 1. Or the time between them, such as
            `datetime.timedelta(minutes=10)`, by the clock of process 0.
          keep: how many of the newest checkpoints to keep, at least 1; None for all.
          best: the name of a metric; the checkpoint with the best value is kept too. Checkpoints
            without this metric, or with a NaN, do not count. `fit` refuses a metric that the run
            does not report.
          mode: "min" or "max": which value of the metric is best.
          resume: whether `fit` continues from the newest checkpoint in the folder. If False, `fit`
            refuses a folder with checkpoints. "new_chain" if the optax chain may be another one
            since then. Or a dict that says which state is which: see `new_chain` of `restore`.
          memory_every: steps between snapshots, at least 1. A snapshot is a copy of the train state
            in the memory of this host and of the next host. Processes that outlive training hold
            the newest two of each. `fit` takes snapshots. If `shardopt launch --max-restarts`
            starts the job again, with the same or another number of processes, `fit` continues from
            a snapshot that is newer than the checkpoints on disk. Each host holds four copies of
            its share of the state.
          hash_only: regexes of parameters that a checkpoint has only a hash of, such as the
            `frozen` of a strategy. They are searched in key paths. `restore` then needs the
            parameters, and refuses others. `fit` takes them from the state that it gets. Snapshots
            in memory hold all parameters.

        Raises:
          TypeError: if an argument is of the wrong kind.
          ValueError: if `every`, `keep` or `memory_every` is below 1, if the time between
            checkpoints is not positive, if `mode` is neither "min" nor "max", or if no process can
            hold snapshots.
          CheckpointInUseError: if another job writes to the folder.
          CheckpointError: if the folder cannot be written to, by any process.
        """
        _check_every(every)
        if keep is not None:
            check_count("keep", keep)
        if mode not in ("min", "max"):
            raise value_error(f"mode must be 'min' or 'max', got {mode!r}.")
        if memory_every is not None:
            check_count("memory_every", memory_every)
        if not isinstance(resume, bool | Mapping) and resume != "new_chain":
            problem = f"resume must be True, False, 'new_chain' or a dict of paths, got {resume!r}."
            raise type_error(problem)
        fix = "pass the regexes that the strategy got as frozen."
        self.hash_only = compile_patterns("hash_only", hash_only, fix)
        self.memory_every = memory_every
        self._memory = None if memory_every is None else MemoryWriter(_CALLER)
        self.directory = run_folder(directory)
        self.every = every
        self.keep = keep
        self.best = best
        self.mode = mode
        self.resume = resume
        self._pid = os.getpid()
        self._closed = False
        self._save_time = _clock()
        self._last_answer = (0, False)  # of `due`, and the step that it is about
        self._pending: Future[None] | None = None
        self._lock = RunLock(_CALLER, self.directory)
        weakref.finalize(self, self._lock.release)
        self._programs = contextlib.ExitStack()
        weakref.finalize(self, self._programs.close)
        # a process that makes none is named
        agree(_CALLER, None, range(jax.process_count()))
        self._programs.enter_context(stored_programs(_CALLER, self.directory / FOLDER_NAME))
        try:
            on_primary_process(self._lock.acquire)
            check_all_write(self.directory)
        except BaseException:
            self._programs.close()
            raise
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writer = store.Writer()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint should be saved after this step.

        If `every` is a time, process 0 decides, and all processes must ask about the same steps.
        Each question then waits for the other processes, so a loop of your own asks at some steps
        only. The first question about a step decides.
        """
        every = self.every
        if step <= 0:
            return False
        if not isinstance(every, datetime.timedelta):
            return step % every == 0
        if self._last_answer[0] != step:
            is_time_over = on_primary_process(
                lambda: _clock() - self._save_time >= every.total_seconds()
            )
            self._last_answer = (step, is_time_over)
        return self._last_answer[1]

    def due_in_memory(self, step: int) -> bool:
        """Return whether a snapshot should be taken after this step."""
        return self.memory_every is not None and step > 0 and step % self.memory_every == 0

    def save_in_memory(
        self,
        state: PyTree,
        *,
        step: int,
        extra: JsonObject | None = None,
        sums: LeafSums | None = None,
    ) -> None:
        """Copy this process's shards to the host, and send them to the memory of two hosts in the
        background.

        When this returns the state may be donated. A host that cannot be reached causes a warning.

        Args:
          state: pytree of arrays.
          step: steps taken.
          extra: JSON values.
          sums: the sums of the state, which `fit(cross_check_every=...)` passes.
        """
        if self._memory is not None:
            self._memory.save(state, step, extra or {}, sums)

    def newest_in_memory(
        self, target: ShardedOptimizer, *, before: int | None = None
    ) -> MemorySnapshot | None:
        """Return the newest snapshot for `target` that is complete on all processes, or None.

        A snapshot counts only if it is newer than the checkpoints on disk. With several processes
        all must call it.

        Args:
          target: the optimizer to continue with.
          before: this step and later ones are left out.
        """
        return (
            None
            if self._memory is None
            else self._memory.newest(target, self.latest() or 0, before)
        )

    def set_aside(self, step: int) -> None:
        """Rename the folder of a checkpoint to `<step>.damaged`: it does not count any more, and
        can be looked at.
        """
        on_primary_process(lambda: set_aside(self.directory, step))

    @calling(_CALLER)
    def save(
        self,
        state: PyTree,
        *,
        step: int,
        metrics: Mapping[str, ArrayLike] | None = None,
        extra: JsonObject | None = None,
        sums: LeafSums | None = None,
    ) -> None:
        """Copy a state to the host and write it in the background; first wait for an earlier write.

        When this returns the state may be donated. An earlier checkpoint of the same step is
        replaced.

        Args:
          state: pytree of arrays.
          step: the number of the checkpoint.
          metrics: scalars by name; `best` names one of them.
          extra: JSON values that `restore` returns; with several processes the values of process 0
            are saved.
          sums: the sums of the state, which `fit(cross_check_every=...)` passes. `restore` compares
            them.

        Raises:
          TypeError: if a leaf is not an array, a metric not a scalar, or `extra` not JSON.
          ValueError: if the state was donated, or `step` is negative.
          CheckpointError: if an earlier write failed; if this write cannot begin; if the folder was
            deleted, replaced or unmounted; if it holds steps later than this one; after `close`.
        """
        if self.hash_only:
            extra = (extra or {}) | {KEY: record_of(state.params, self.hash_only)}
            state = without_hashed(state, self.hash_only)
            sums = None if sums is None else {path: sums[path] for path in leaves_by_path(state)}
        meta = describe_state(state, step, metrics, extra)._replace(sums=sums)
        # On all processes or on none: one that went on alone would wait for the others in the next
        # save.
        raise_together(self._settled())
        on_primary_process(lambda: self._prepare(meta.step))
        # From the beginning of a save: slow disks must not stretch the time between two of them.
        self._save_time = _clock()
        commit = start_write(self._lock, self._writer, state, meta)
        # The copy is on the host by now. Writing it needs neither the devices nor the state.
        self._pending = self._thread.submit(self._commit_and_rotate, commit, meta.step)

    def wait(self) -> None:
        """Wait until the saved checkpoints are committed.

        Raises:
          CheckpointError: if a checkpoint could not be written.
        """
        if self._pending is not None:
            raise_together(self._settled())

    def close(self) -> None:
        """Wait for the last write, then release the folder. Closing twice is harmless.

        Raises:
          CheckpointError: if the last write failed; the folder is released even then.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._lock.release()
            self._closed = True
            self._writer.close()
            self._programs.close()
            if self._memory is not None:
                self._memory.close()

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending."""
        return committed(self.directory)

    def latest(self) -> int | None:
        """Return the newest committed step, or None."""
        return max(self.steps(), default=None)

    @calling(_CALLER)  # a thread writes, and then rotates
    def best_step(self) -> int | None:
        """Return the step with the best metric, or None if no checkpoint has the metric.

        If several steps are equally good, the earliest is returned.
        """
        if self.best is None:
            return None
        values: dict[int, float] = {}
        for step in self.steps():
            try:
                metrics = read_meta(step_folder(self.directory, step)).metrics
            except CheckpointError as error:
                # a checkpoint whose record cannot be read cannot be restored
                text = "%s: step %d in %s is not the best: %s"
                _LOG.warning(text, _CALLER, step, self.directory, error)
                continue
            value = float(metrics.get(self.best, math.nan))
            if not math.isnan(value):
                # One order for both modes: the smallest value is the best, and of equal ones the
                # earliest step.
                values[step] = value if self.mode == "min" else -value
        return min(values, key=lambda step: (values[step], step), default=None)

    @calling(_CALLER)
    def restore(
        self, target: ShardedOptimizer | PyTree, *, step: int | None = None, params: PyTree = None
    ) -> tuple[PyTree, JsonObject]:
        """Return the state of a checkpoint and its `extra`, by default of the newest.

        See `shardopt.restore`. `resume` says whether the chain may be another one.
        """
        self.wait()
        new_chain: NewChain = self.resume == "new_chain"
        if isinstance(self.resume, Mapping):
            new_chain = self.resume
        if not isinstance(target, ShardedOptimizer):
            new_chain = False
        state, meta = load(self.directory, target, step=step, params=params, new_chain=new_chain)
        return state, meta.extra

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        # The other processes may still be training: waiting for them here could take forever.
        failure = self._settled()
        self.close()
        if failure is not None:
            error.add_note(str(failure))  # the first error must remain the one that is raised

    def _settled(self) -> BaseException | None:
        """Wait for the write in progress, and return its error on this process, or None."""
        pending = self._pending
        self._pending = None
        if pending is None or self._pid != os.getpid():
            return None  # a fork does not have the writer thread
        return pending.exception()

    def _prepare(self, step: int) -> None:
        """Check that the folder is still there and can take the step, and delete stale files."""
        if self._closed:
            raise CheckpointError(
                error_text("save was called after close.", fix="make a new Checkpoints.")
            )
        try:
            if not self._lock.is_held():
                problem = (
                    f"step {step} cannot be saved: {self.directory} was deleted, replaced or"
                    " unmounted while the job ran."
                )
                fix = "save to another folder, with a new Checkpoints."
                raise CheckpointError(error_text(problem, fix=fix))
            later_steps = [
                saved_step for saved_step in committed(self.directory) if saved_step > step
            ]
            if later_steps:
                problem = (
                    f"step {step} cannot be saved: {self.directory} holds later ones"
                    f" ({', '.join(map(str, later_steps[-8:]))})."
                )
                fix = (
                    "delete them if the run was wound back on purpose, or choose another folder:"
                    " two histories do not mix."
                )
                raise CheckpointError(error_text(problem, fix=fix))
            remove_stale(self.directory)
            check_writable(self.directory, step)
        except OSError as error:
            raise write_error(_CALLER, self.directory, step, error) from error

    def _commit_and_rotate(self, commit: Callable[[], None], step: int) -> None:
        progress.mark("write", step, lane=progress.SAVING)
        try:
            commit()
            if jax.process_index() == 0:
                self._rotate(step)
        except CheckpointError as error:
            _LOG.error("%s", error)  # logged now, in case the program never calls wait
            if jax.process_index() == 0 and self._lock.is_held():
                self._remove_unfinished()
            raise
        finally:
            progress.mark("", lane=progress.SAVING)

    def _rotate(self, step: int) -> None:
        """Delete the checkpoints that are neither among the newest `keep` nor the best.

        Args:
          step: the step that was just written, for messages.

        Raises:
          CheckpointError: if a checkpoint cannot be deleted.
        """
        older = [] if self.keep is None else self.steps()[: -self.keep]
        best = self.best_step() if older else None
        for old_step in older:
            if old_step == best:
                continue
            try:
                discard(self.directory, old_step)
            except OSError as error:
                problem = (
                    f"step {step} was written, but step {old_step} in {self.directory} could not be"
                    f" deleted ({error})."
                )
                fix = "delete it, or give the job the right to."
                raise CheckpointError(format_error(_CALLER, problem, fix=fix)) from error

    def _remove_unfinished(self) -> None:
        """Delete the files of a failed save: a full disk affects every job."""
        for _ in range(_REMOVALS):
            try:
                remove_stale(self.directory)
                return
            except OSError:  # threads of orbax that have not failed still add files
                time.sleep(_REMOVAL_PAUSE)


_REMOVALS = 20
"""How often the deletion of a failed save is tried."""
_REMOVAL_PAUSE = 0.1
"""Seconds between two tries."""
_clock = time.monotonic


def check_checkpoints(checkpoints: Checkpoints | None) -> None:
    """Refuse, by a TypeError, what lacks a method or attribute of `so.Checkpoints`."""
    names = "directory every resume due due_in_memory memory_every save wait latest restore"
    missing_names = [name for name in names.split() if not hasattr(checkpoints, name)]
    if checkpoints is None or not missing_names:
        return
    problem = (
        f"checkpoints must be a so.Checkpoints, got {type(checkpoints).__name__} without"
        f" {', '.join(missing_names)}."
    )
    path_text = repr(checkpoints) if isinstance(checkpoints, str) else "directory"
    raise type_error(problem, fix=f"pass so.Checkpoints({path_text}, every=100, keep=3).")


def _check_every(every: int | datetime.timedelta) -> None:
    if not isinstance(every, datetime.timedelta):
        check_count("every", every)
    elif every <= datetime.timedelta():
        fix = "pass a positive time, such as datetime.timedelta(minutes=10), or a number of steps."
        raise value_error(f"every must be above 0, got {every!r}.", fix=fix)


def is_save_due(checkpoints: Checkpoints | None, step: int, *, agree_every: int) -> bool:
    """Return whether a loop saves after this step.

    If the checkpoints are due by time, several processes ask only at every `agree_every`-th step,
    where they wait for each other anyway.
    """
    if checkpoints is None:
        return False
    by_time = isinstance(checkpoints.every, datetime.timedelta)
    if by_time and jax.process_count() > 1 and step % agree_every:
        return False
    return checkpoints.due(step)


def check_may_resume(caller: str, checkpoints: Checkpoints, step: int) -> None:
    """Refuse a folder with a checkpoint of this step, unless `checkpoints.resume` is set."""
    if checkpoints.resume is False:
        problem = f"{checkpoints.directory} already has checkpoints, the last of step {step}."
        fix = "pass resume=True to so.Checkpoints to go on from there, or choose another folder."
        raise ValueError(format_error(caller, problem, fix=fix))
