"""The start and end of a run: resume from a checkpoint, agree whether to stop, finish all writes."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardopt.checkpoint._checkpoints import Checkpoints, check_may_resume
from shardopt.checkpoint._hashed import is_hashed
from shardopt.checkpoint._memory import MemorySnapshot, place_snapshot
from shardopt.checkpoint._tree import Json, JsonObject
from shardopt.core import (
    CheckpointError,
    DamagedCheckpointError,
    NonFiniteLossError,
    PyTree,
    TrainState,
    error_text,
    leaves_with_paths,
)
from shardopt.core import _early_stopping as stopping
from shardopt.core._early_stopping import EarlyStopping, StoppingState
from shardopt.step._host_values import params_as_arrays
from shardopt.step._inputs import is_init_fn
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._stream import BatchStream


class DeferredInit(NamedTuple):
    """The arguments of `opt.init`, for `fit`: it calls `opt.init` only if it restores no checkpoint
    and no snapshot.

    A run that starts again then computes no parameters and no optimizer state that a restored state
    would replace. It never holds both states. `fit` only computes the shapes of the parameters.

    Attributes:
      params: the parameters, or a function from a random key to the parameters.
      rng: the random key for this function; None if `params` are the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch * params["w"] - 3) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> initial = so.training.DeferredInit(lambda rng: {"w": jax.random.normal(rng)}, jax.random.key(0))
      >>> so.fit(opt, initial, [np.ones(4, np.float32)] * 5, num_steps=5, progress=False).step
      5
    """

    params: PyTree
    rng: jax.Array | None = None

    def shapes(self) -> PyTree:
        """Return the parameters as `jax.ShapeDtypeStruct`, without computing them."""
        if not is_init_fn(self.params):
            return jax.eval_shape(lambda params: params, params_as_arrays(self.params))
        return jax.eval_shape(self.params, jax.random.key(0) if self.rng is None else self.rng)


@dataclasses.dataclass(frozen=True)
class SavedStates:
    """The snapshots and checkpoints of a run, to start from.

    Attributes:
      opt: the optimizer.
      checkpoints: the checkpoints of the run, or None.
      say: prints a message about resuming.
      falls_back: whether a damaged checkpoint is set aside, and the next copy used.
    """

    opt: ShardedOptimizer
    checkpoints: Checkpoints | None
    say: Callable[[str], None]
    falls_back: bool = False

    def begin(
        self, state: TrainState | DeferredInit, stream: BatchStream, rule: EarlyStopping | None
    ) -> tuple[TrainState, StoppingState, Json]:
        """Return the state to start from, the state of early stopping, and what `fit` did not finish
        before the state was saved: None, or as in `FitRun.extra`.

        Move the stream to its position.

        A checkpoint or snapshot is restored if `checkpoints.resume` is set and it is newer than the
        state. The memory of the state is freed first.

        Args:
          state: the state that the user passed to `fit`.
          stream: the batches.
          rule: the rule of early stopping, or None.
        """
        if isinstance(state, DeferredInit):
            # opt.abstract_state() needs to know the parameters
            self.opt.abstract_state(state.shapes())
        checkpoints = self.checkpoints
        latest, snapshot = self._newest()
        if checkpoints is None or latest is None:
            return self._initialized(state), StoppingState(), None
        check_may_resume("fit", checkpoints, latest)
        step = step_of(state)
        if latest <= step:
            self.say(
                f"Going on from the state given (step {step}); the last checkpoint, of step"
                f" {latest}, is not newer."
            )
            return self._initialized(state), StoppingState(), None
        latest, restored, extra, source = self._restore(state, checkpoints, snapshot)
        if restored is None:
            problem = (
                f"no snapshot or checkpoint in {checkpoints.directory} holds the state that it was"
                " saved from."
            )
            fix = "bring one back from a copy, or start again in another folder."
            raise DamagedCheckpointError(error_text(problem, fix=fix))
        position = extra.get("batches")
        stream_text = "the data from its beginning: the checkpoint holds no position"
        if position is not None:
            stream_text = stream.restore(position)
        else:
            fix = "save with so.fit, or put the batches into their place before it is called."
            warnings.warn(error_text(f"{stream_text}; rows are seen again.", fix=fix), stacklevel=6)
        self.say(f"Resuming from step {latest} in {source}, {stream_text}.")
        stopping_state = stopping.from_json(rule, extra.get("early_stopping"))
        if rule is not None and stopping_state is None:
            self.say(
                "Early stopping starts counting again: the checkpoint knows nothing of"
                f" {rule.metric!r} ({rule.mode})."
            )
        return restored, stopping_state or StoppingState(), extra.get("unfinished")

    def _newest(self) -> tuple[int | None, MemorySnapshot | None]:
        """Return the step of the newest snapshot or checkpoint, None if there is none.

        And the snapshot, if there is one.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None, None
        if (
            checkpoints.memory_every is not None
            and (snapshot := checkpoints.newest_in_memory(self.opt)) is not None
        ):
            return snapshot.step, snapshot
        return checkpoints.latest(), None

    def _restore(
        self,
        state: TrainState | DeferredInit,
        checkpoints: Checkpoints,
        snapshot: MemorySnapshot | None,
    ) -> tuple[int, TrainState | None, JsonObject, str]:
        """Return the step, state, extra and source of the snapshot or of the newest checkpoint.

        The state is None if there is none.

        The memory of `state` is freed first. A snapshot whose sums are wrong is left out, and the
        next copy is used. A damaged checkpoint is set aside if `falls_back`, and otherwise an
        error: an older one loses work.
        """
        # A snapshot is whole, and only a verified one can turn out to be damaged.
        hash_only = (
            getattr(checkpoints, "hash_only", ()) if snapshot is None or self.falls_back else ()
        )
        if hash_only:
            state = self._initialized(state)
        # Before the restored state comes to the devices: together they may not fit.
        if not isinstance(state, DeferredInit):
            _free(state, hash_only)
        while snapshot is not None:
            try:
                restored = place_snapshot(snapshot, self.opt.abstract_state())
                return snapshot.step, restored, snapshot.extra, "the memory of the hosts"
            except DamagedCheckpointError as error:
                self.say(f"{error}\nThe next copy is used.")
                snapshot = checkpoints.newest_in_memory(self.opt, before=snapshot.step)
        frozen = {"params": state.params} if hash_only else {}
        while (step := checkpoints.latest()) is not None:
            try:
                return (
                    step,
                    *checkpoints.restore(self.opt, step=step, **frozen),
                    str(checkpoints.directory),
                )
            except DamagedCheckpointError as error:
                if not self.falls_back:
                    raise
                self.say(f"{error}\nIt is set aside as {step}.damaged, and the next copy is used.")
                checkpoints.set_aside(step)
        return 0, None, {}, ""

    def _initialized(self, state: TrainState | DeferredInit) -> TrainState:
        return self.opt.init(state.params, state.rng) if isinstance(state, DeferredInit) else state


def step_of(state: TrainState | DeferredInit) -> int:
    """Return the number of steps taken."""
    return 0 if isinstance(state, DeferredInit) else int(jax.device_get(state.step))


def _free(state: TrainState, hash_only: Sequence[re.Pattern[str]]) -> None:
    """Free the device memory of a state that is no longer needed, so that two states are never
    held.

    The parameters that a checkpoint has only a hash of are still needed.
    """
    needed = {
        id(leaf) for path, leaf in leaves_with_paths(state.params) if is_hashed(path, hash_only)
    }
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and id(leaf) not in needed:
            leaf.delete()


def pack(stream: BatchStream, rule: EarlyStopping | None, state: StoppingState) -> JsonObject:
    """Return the position of the batches, and the state of early stopping, for a checkpoint."""
    return {
        "batches": stream.position(),
        "early_stopping": None if rule is None else stopping.to_json(rule, state),
    }


@contextmanager
def finish_writes(checkpoints: Checkpoints | None) -> Iterator[None]:
    """At the end of the context, wait for the checkpoint that is still being written, even after an
    error.
    """
    try:
        yield
    except BaseException as error:
        # Waiting needs all processes, so after an error on one process it would never end. Only a
        # loss that is not finite is an error on all processes at the same step.
        on_all_processes = jax.process_count() == 1 or isinstance(error, NonFiniteLossError)
        if checkpoints is not None and on_all_processes:
            try:
                checkpoints.wait()
            except CheckpointError as failure:
                error.add_note(str(failure))  # the first error must remain the one that is raised
        raise
    if checkpoints is not None:
        checkpoints.wait()


VERDICTS = ("exhausted", "early", "interrupted", "sigterm")
"""The reasons to end a run early. If processes have different verdicts, the later one in this list
wins.
"""

SIGNALS = ("interrupted", "sigterm")
"""The verdicts that come from a signal."""


def common_verdict(*verdicts: str | None, due: bool) -> str | None:
    """Return the strongest verdict of all processes, by the order of `VERDICTS`, or None if there
    is none.

    With several processes and `due`, each call gathers one integer per process, which waits for the
    steps in progress. If `due` is False, it returns None, and a process with a verdict passes the
    verdict again next time.

    Args:
      *verdicts: the verdicts of this process, or None.
      due: whether processes exchange verdicts at this step; the same on all processes.
    """
    verdict = strongest(verdicts)
    if jax.process_count() == 1:
        return verdict
    if not due:
        return None
    code = -1 if verdict is None else VERDICTS.index(verdict)
    # The number is the strength, so the maximum is the verdict of all.
    code = int(np.max(multihost_utils.process_allgather(np.int32(code))))
    return None if code < 0 else VERDICTS[code]


def strongest(verdicts: Sequence[str | None]) -> str | None:
    """Return the strongest verdict by the order of `VERDICTS`, or None if there is none."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return max(known, key=VERDICTS.index, default=None)
