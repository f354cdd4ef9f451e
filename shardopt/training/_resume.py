"""The start and end of a run: resume from a checkpoint, stop at a signal or a common verdict,
finish all writes.
"""

import base64
import dataclasses
import json
import re
import signal
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from shardopt.checkpoint._checkpoints import Checkpoints, check_may_resume
from shardopt.checkpoint._hashed import is_hashed
from shardopt.checkpoint._memory import MemorySnapshot, place_snapshot
from shardopt.checkpoint._multihost import exchange
from shardopt.checkpoint._tree import Json
from shardopt.core import _early_stopping as stopping
from shardopt.core._early_stopping import EarlyStopping, StoppingState
from shardopt.core._errors import (
    CheckpointError,
    DamagedCheckpointError,
    NonFiniteLossError,
    format_error,
    plural,
)
from shardopt.core._types import PyTree, TrainState, leaves_with_paths
from shardopt.runtime._processes import handled_signals
from shardopt.step._batches import as_arrays
from shardopt.step._inputs import is_init_fn
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._spikes import Spikes


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
            return jax.eval_shape(lambda params: params, self.params)
        return jax.eval_shape(self.params, jax.random.key(0) if self.rng is None else self.rng)


@dataclasses.dataclass(frozen=True)
class SavedStates:
    """The snapshots and checkpoints of a run, to start from or to go back to.

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
        self,
        state: TrainState | DeferredInit,
        stream: "Stream",
        rule: EarlyStopping | None,
        spikes: Spikes | None,
    ) -> tuple[TrainState, StoppingState]:
        """Return the state to start from and the state of early stopping.

        Move the stream to its position.

        A checkpoint or snapshot is restored if `checkpoints.resume` is set and it is newer than the
        state. The memory of the state is freed first.

        Args:
          state: the state that the user passed to `fit`.
          stream: the batches.
          rule: the rule of early stopping, or None.
          spikes: the search for spikes, or None.
        """
        if isinstance(state, DeferredInit):
            # opt.abstract_state() needs to know the parameters
            self.opt.abstract_state(state.shapes())
        checkpoints = self.checkpoints
        latest, snapshot = self._newest()
        if checkpoints is None or latest is None:
            return self._initialized(state), StoppingState()
        check_may_resume("fit", checkpoints, latest)
        step = step_of(state)
        if latest <= step:
            self.say(
                f"Going on from the state given (step {step}); the last checkpoint, of step"
                f" {latest}, is not newer."
            )
            return self._initialized(state), StoppingState()
        latest, restored, extra, source = self._restore(state, checkpoints, snapshot)
        if restored is None:
            problem = (
                f"no snapshot or checkpoint in {checkpoints.directory} holds the state that it was"
                " saved from."
            )
            fix = "bring one back from a copy, or start again in another folder."
            raise DamagedCheckpointError(format_error("fit", problem, fix=fix))
        position = extra.get("batches")
        if spikes is not None:
            spikes.restore(extra.get("spikes"))
        stream_text = "the data from its beginning: the checkpoint holds no position"
        if position is not None:
            stream_text = stream.restore(position)
        else:
            fix = "save with so.fit, or put the batches into their place before it is called."
            warnings.warn(
                format_error("fit", f"{stream_text}; rows are seen again.", fix=fix), stacklevel=6
            )
        self.say(f"Resuming from step {latest} in {source}, {stream_text}.")
        stopping_state = stopping.from_json(rule, extra.get("early_stopping"))
        if rule is not None and stopping_state is None:
            self.say(
                "Early stopping starts counting again: the checkpoint knows nothing of"
                f" {rule.metric!r} ({rule.mode})."
            )
        return restored, stopping_state or StoppingState()

    def restore_newest(self, state: TrainState) -> tuple[int, TrainState, dict[str, Json]] | None:
        """Return the step, the state and the extra of the newest snapshot or checkpoint.

        None if there is none.

        The memory of `state` is freed first. With several processes all must call it.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        checkpoints.wait()
        latest, snapshot = self._newest()
        if latest is None:
            return None
        step, restored, extra, _ = self._restore(state, checkpoints, snapshot)
        return None if restored is None else (step, restored, extra)

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
    ) -> tuple[int, TrainState | None, dict[str, Json], str]:
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


def pack(
    stream: "Stream", rule: EarlyStopping | None, state: StoppingState, spikes: Spikes | None = None
) -> dict[str, Json]:
    """Return the position of the batches, and the states of early stopping and of the search for
    spikes, for a checkpoint.
    """
    extra = {
        "batches": stream.position(),
        "early_stopping": None if rule is None else stopping.to_json(rule, state),
    }
    return extra if spikes is None else extra | {"spikes": spikes.to_json()}


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

_VERDICT_OF_SIGNAL = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupted"}


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
    code = max((VERDICTS.index(verdict) for verdict in verdicts if verdict is not None), default=-1)
    if jax.process_count() > 1:
        if not due:
            return None
        code = int(np.max(multihost_utils.process_allgather(np.int32(code))))
    return None if code < 0 else VERDICTS[code]


@contextmanager
def catch_signals() -> Iterator[Callable[[], str | None]]:
    """Record SIGTERM and SIGINT while the context lasts; a second SIGINT raises KeyboardInterrupt.

    Python runs handlers only in the main thread, so in other threads no signal is caught. A signal
    that the process ignores (SIGINT under nohup) stays ignored. The end of the context restores the
    previous handlers.

    Yields:
      A function that returns "sigterm" or "interrupted", the one that came first, or None.
    """
    verdicts: list[str] = []

    def record(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and "interrupted" in verdicts:
            raise KeyboardInterrupt
        verdicts.append(_VERDICT_OF_SIGNAL[signal.Signals(number)])

    with handled_signals(
        [number for number in _VERDICT_OF_SIGNAL if signal.getsignal(number) is not signal.SIG_IGN],
        record,
    ):
        yield lambda: verdicts[0] if verdicts else None


END = object()
"""The return value of `Stream.draw` when there are no more batches."""


class Stream:
    """Batches, drawn one at a time and never ahead, so that the position counts exactly the used
    batches.

    An iterator with `get_state` and `set_state` (grain's) is moved by its own state. Any other
    iterator is moved by drawing as many batches from a fresh one, so it must give the same batches
    in the same order every time. The checkpoint holds a checksum of the last batch, to detect
    another order.

    If each process draws its own rows (`jax.make_array_from_process_local_data`), an iterator state
    is only valid for one number of processes. With another number, batches are drawn again too. The
    values of the last batch must then equal the values that the other processes drew, in any order.

    Attributes:
      drawn: how many batches were drawn since the first one, including batches before a restored
        checkpoint.
    """

    def __init__(self, batches: Iterable[PyTree]):
        self._iterator: Any = iter(batches)
        self._last_batch: PyTree = None
        self.drawn = 0

    def draw(self) -> PyTree:
        """Return the next batch, or `END`."""
        batch = next(self._iterator, END)
        if batch is not END:
            self._last_batch, self.drawn = batch, self.drawn + 1
        return batch

    def position(self) -> dict[str, Json]:
        """Return the position as JSON; all processes must call it."""
        position: dict[str, Json] = {"drawn": self.drawn, "state": None}
        if self._has_state():
            position["state"] = _encode(self._iterator.get_state())
        elif self.drawn:
            position["last"] = _checksum(self._last_batch)
        if self.drawn and _is_split_over_processes(self._last_batch):
            position |= {
                "processes": jax.process_count(),
                "values": _checksum_of_values(self._last_batch),
            }
        return position

    def restore(self, position: Mapping[str, Json]) -> str:
        """Move to a saved position; return a text about how it was done.

        Raises:
          ValueError: if the iterator refuses the state, ends before the position, or gives other
            rows to other processes.
        """
        count = position["drawn"]
        processes_changed = position.get("processes", jax.process_count()) != jax.process_count()
        if position["state"] is not None and self._has_state() and not processes_changed:
            try:
                self._iterator.set_state(_decode(position["state"]))
            except Exception as error:
                problem = (
                    "the batches cannot be put back to their position after"
                    f" {plural(count, 'batch')}: {error}"
                )
                fix = "pass batches made as in the run that saved it."
                raise ValueError(format_error("fit", problem, fix=fix)) from error
            self.drawn = count
            return "the data from its saved state"
        while self.drawn < count:
            if self.draw() is END:
                problem = (
                    f"the batches end after {self.drawn}, but the checkpoint was saved after"
                    f" {count}."
                )
                raise ValueError(
                    format_error("fit", problem, fix="pass a fresh iterator over the same data.")
                )
        if processes_changed and _checksum_of_values(self._last_batch) != position["values"]:
            before, now = (
                plural(number, "process") for number in (position["processes"], jax.process_count())
            )
            problem = (
                f"{before} drew other rows in batch {count - 1} than {now}: rows would be seen"
                " twice, or never."
            )
            fix = (
                "let the rows of a global batch not depend on the number of processes: shuffle"
                " first, then let process p of n take rows p, p + n, ... of each global batch; or"
                " let every process draw the whole global batch."
            )
            raise ValueError(format_error("fit", problem, fix=fix))
        saved_checksum = position.get("last") if jax.process_index() == 0 else None
        if saved_checksum is not None and _checksum(self._last_batch) not in (None, saved_checksum):
            problem = (
                "the batches do not come as in the run that saved the checkpoint: batch"
                f" {count - 1} is another."
            )
            fix = (
                "shuffle by a fixed seed, the same each time the iterator is made, or give it"
                " get_state and set_state, as grain's have; or some rows are seen twice, and others"
                " not at all."
            )
            warnings.warn(format_error("fit", problem, fix=fix), stacklevel=2)
        return f"the data by drawing {plural(count, 'batch')}"

    def _has_state(self) -> bool:
        return callable(getattr(self._iterator, "get_state", None)) and hasattr(
            self._iterator, "set_state"
        )


def _checksum(batch: PyTree) -> int | None:
    """Return a number that distinguishes batches by their first rows.

    None if some rows lie on another process.
    """
    checksum = 0
    for leaf in jax.tree.leaves(as_arrays("fit", batch)):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
            checksum = zlib.crc32(
                np.asarray(leaf[:8] if np.ndim(leaf) else leaf).tobytes(), checksum
            )
    return checksum


def _is_split_over_processes(batch: PyTree) -> bool:
    """Return whether each process holds only its own rows."""
    return any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(batch)
    )


def _checksum_of_values(batch: PyTree) -> int:
    """Return a number that distinguishes global batches by their values, in any order.

    All processes must call it.
    """
    local_checksum = 0
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    values = (
                        np.ascontiguousarray(shard.data)
                        .view(f"u{leaf.dtype.itemsize}")
                        .astype(np.uint64)
                    )
                    mixed = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
                    local_checksum += int(np.sum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64))
    return sum(int(text) for text in exchange(str(local_checksum))) % 2**64


def _encode(state: object) -> dict[str, Json]:
    if isinstance(state, bytes):  # grain's DataLoader
        return {"base64": base64.b64encode(state).decode("ascii")}
    try:
        survives_json = json.loads(json.dumps(state)) == state
    except TypeError:
        survives_json = False
    if not survives_json:
        problem = f"the state of the batch iterator does not survive JSON: {state!r:.200}"
        fix = "let get_state return bytes, or dicts, lists, strings and numbers."
        raise TypeError(format_error("fit", problem, fix=fix))
    return {"json": state}


def _decode(saved: Mapping[str, Json]) -> Json:
    return base64.b64decode(saved["base64"]) if "base64" in saved else saved["json"]
