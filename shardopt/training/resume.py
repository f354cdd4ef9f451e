"""How a run begins and ends: from a checkpoint, at a signal or a verdict of all processes, and with all written."""

import base64
import json
import signal
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from shardopt.checkpoint import Checkpoints
from shardopt.checkpoint.memory import place_snapshot
from shardopt.checkpoint.multihost import exchange
from shardopt.checkpoint.tree import Json
from shardopt.core import early_stopping as stopping
from shardopt.core.early_stopping import EarlyStopping, StoppingState
from shardopt.core.errors import CheckpointError, NonFiniteLossError, format_error, plural
from shardopt.core.types import PyTree, TrainState
from shardopt.engine.batches import as_arrays
from shardopt.engine.inputs import is_init_fn
from shardopt.engine.optimizer import ShardedOptimizer


class FirstState(NamedTuple):
    """What `opt.init` takes, for `fit` to call it with: only where no checkpoint or snapshot is restored.

    A run that starts again then computes no parameters and no optimizer state that what is restored would replace, and
    never holds both. Its shapes alone are worked out.

    Attributes:
      params: the parameters, or a function of a random key that makes them.
      rng: the random key.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch * params["w"] - 3) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> first = so.FirstState(lambda rng: {"w": jax.random.normal(rng)}, jax.random.key(0))
      >>> so.fit(opt, first, [np.ones(4, np.float32)] * 5, num_steps=5, progress=False).step
      5
    """

    params: PyTree
    rng: jax.Array | None = None

    def shapes(self) -> PyTree:
        """Return the parameters as shapes; nothing is computed."""
        if not is_init_fn(self.params):
            return jax.eval_shape(lambda params: params, self.params)
        return jax.eval_shape(self.params, jax.random.key(0) if self.rng is None else self.rng)


def begin(
    opt: ShardedOptimizer,
    state: TrainState | FirstState,
    stream: "Stream",
    rule: EarlyStopping | None,
    checkpoints: Checkpoints | None,
    say: Callable[[str], None],
) -> tuple[TrainState, StoppingState]:
    """Return the state to start from and what early stopping remembers; put the stream into its place.

    A checkpoint is restored if `checkpoints.resume` is set and it is newer than the state, whose memory is freed first.
    What is done is said.
    """
    if isinstance(state, FirstState):
        opt.abstract_state(state.shapes())  # of which it speaks from here on
    latest, snapshot = None, None
    if checkpoints is not None:
        latest = checkpoints.latest()
        if checkpoints.memory_every is not None and (snapshot := checkpoints.newest_in_memory(opt)) is not None:
            latest = snapshot.step
    if checkpoints is None or latest is None:
        return _made(opt, state), StoppingState()
    if not checkpoints.resume:
        what = f"{checkpoints.directory} already has checkpoints, the last of step {latest}."
        fix = "pass resume=True to so.Checkpoints to go on from there, or choose another folder."
        raise ValueError(format_error("fit", what, fix=fix))
    step = step_of(state)
    if latest <= step:
        say(f"Going on from the state given (step {step}); the last checkpoint, of step {latest}, is not newer.")
        return _made(opt, state), StoppingState()
    if not isinstance(state, FirstState):
        _free(state)
    if snapshot is not None:
        restored, extra = place_snapshot(snapshot, opt.abstract_state()), snapshot.extra
    else:
        restored, extra = checkpoints.restore(opt, step=latest)
    position, saved = extra.get("batches"), extra.get("early_stopping")
    how = "the data from its beginning: the checkpoint holds no position"
    if position is not None:
        how = stream.restore(position)
    else:
        fix = "save with so.fit, or put the batches into their place before it is called."
        warnings.warn(format_error("fit", f"{how}; rows are seen again.", fix=fix), stacklevel=3)
    where = "the memory of the hosts" if snapshot is not None else checkpoints.directory
    say(f"Resuming from step {latest} in {where}, {how}.")
    seen = None if rule is None or saved is None else stopping.from_json(rule, saved)
    if rule is not None and seen is None:
        say(f"Early stopping starts counting again: the checkpoint knows nothing of {rule.metric!r} ({rule.mode}).")
    return restored, seen or StoppingState()


def step_of(state: TrainState | FirstState) -> int:
    """Return the steps that were taken."""
    return 0 if isinstance(state, FirstState) else int(jax.device_get(state.step))


def _made(opt: ShardedOptimizer, state: TrainState | FirstState) -> TrainState:
    return opt.init(state.params, state.rng) if isinstance(state, FirstState) else state


def _free(state: TrainState) -> None:
    """Free the device memory of a state that is not needed any more, so that two are never held."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def pack(stream: "Stream", rule: EarlyStopping | None, state: StoppingState) -> dict[str, Json]:
    """Return what a checkpoint keeps besides the train state, as JSON."""
    return {"batches": stream.position(), "early_stopping": None if rule is None else stopping.to_json(rule, state)}


@contextmanager
def written_out(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Wait at the end for the checkpoint that is still being written, also where an error ends the run."""
    try:
        yield
    except BaseException as error:
        # All processes wait together: after an error of one of them it would wait for ever. A loss is the same on all.
        together = jax.process_count() == 1 or isinstance(error, NonFiniteLossError)
        if checkpoints is not None and together:
            try:
                checkpoints.wait()
            except CheckpointError as failure:
                error.add_note(str(failure))  # what went wrong first must stay in front
        raise
    if checkpoints is not None:
        checkpoints.wait()


VERDICTS = ("exhausted", "early", "interrupted", "sigterm")
"""How a run can end before its time; where verdicts differ, the later in this list wins."""

SIGNALS = ("interrupted", "sigterm")
"""Verdicts of a signal."""

_VERDICTS = {signal.SIGTERM: "sigterm", signal.SIGINT: "interrupted"}


def common_verdict(*verdicts: str | None, due: bool) -> str | None:
    """Return the weightiest of the `VERDICTS` of all processes, or None if none has one.

    With several processes each call where `due` is true, at the same steps on all, gathers one integer per process,
    which waits for the steps under way; where it is false the answer is None, and a process with a verdict brings it
    again next time.
    """
    code = max((VERDICTS.index(verdict) for verdict in verdicts if verdict is not None), default=-1)
    if jax.process_count() > 1:
        if not due:
            return None
        code = int(np.max(multihost_utils.process_allgather(np.int32(code))))
    return None if code < 0 else VERDICTS[code]


@contextmanager
def catch_signals() -> Iterator[Callable[[], str | None]]:
    """Note SIGTERM and SIGINT while the context lasts; a second SIGINT raises KeyboardInterrupt.

    Python runs handlers in the main thread only, so in another thread nothing is caught. A signal that the process
    ignores (SIGINT under nohup) stays ignored. The previous handlers are back when the context ends.

    Yields:
      A function that returns "sigterm" or "interrupted", whichever came first, or None.
    """
    received: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and "interrupted" in received:
            raise KeyboardInterrupt
        received.append(_VERDICTS[signal.Signals(number)])

    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _VERDICTS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, note)
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


END = object()
"""What `Stream.draw` returns when there are no more batches."""


class Stream:
    """Batches, drawn one at a time and never ahead, so that the position is that after the batches used.

    An iterator with `get_state` and `set_state` (grain's) is put back by its own state. Any other is put back by
    drawing as many batches from a fresh one: it must give the same batches in the same order every time. Of the last of
    them a checksum is kept, by which it shows where it does not.

    Where each process draws rows of its own (`jax.make_array_from_process_local_data`), a state of one number of processes
    says nothing to another. Then batches are drawn again, too, and the values of the last one must be those that the other
    processes drew, in whatever order.

    Attributes:
      drawn: how many batches were drawn since the data began, those before a restored checkpoint included.
    """

    def __init__(self, batches: Iterable[PyTree]):
        self._iterator: Any = iter(batches)
        self._last: PyTree = None
        self.drawn = 0

    def draw(self) -> PyTree:
        """Return the next batch, or `END`."""
        batch = next(self._iterator, END)
        if batch is not END:
            self._last, self.drawn = batch, self.drawn + 1
        return batch

    def position(self) -> dict[str, Json]:
        """Return the position in a form that survives JSON; all processes must call it."""
        position: dict[str, Json] = {"drawn": self.drawn, "state": None}
        if self._keeps_state():
            position["state"] = _encode(self._iterator.get_state())
        elif self.drawn:
            position["last"] = _checksum(self._last)
        if self.drawn and _is_shared_out(self._last):
            position |= {"processes": jax.process_count(), "values": _checksum_of_values(self._last)}
        return position

    def restore(self, position: Mapping[str, Json]) -> str:
        """Go to a saved position, and return in words how.

        Raises:
          ValueError: if the iterator refuses the state, or ends before the position.
        """
        count = position["drawn"]
        moved = position.get("processes", jax.process_count()) != jax.process_count()
        if position["state"] is not None and self._keeps_state() and not moved:
            try:
                self._iterator.set_state(_decode(position["state"]))
            except Exception as error:
                what = f"the batches cannot be put back to their position after {plural(count, 'batch')}: {error}"
                fix = "pass batches made as in the run that saved it."
                raise ValueError(format_error("fit", what, fix=fix)) from error
            self.drawn = count
            return "the data from its saved state"
        while self.drawn < count:
            if self.draw() is END:
                what = f"the batches end after {self.drawn}, but the checkpoint was saved after {count}."
                raise ValueError(format_error("fit", what, fix="pass a fresh iterator over the same data."))
        if moved and _checksum_of_values(self._last) != position["values"]:
            before, now = plural(position["processes"], "process"), plural(jax.process_count(), "process")
            what = f"{before} drew other rows in batch {count - 1} than {now}: rows would be seen twice, or never."
            fix = (
                "let the rows of a global batch not depend on the number of processes: shuffle first, then let process p of n "
                "take rows p, p + n, ... of each global batch; or let every process draw the whole global batch."
            )
            raise ValueError(format_error("fit", what, fix=fix))
        last = position.get("last")
        if last is not None and jax.process_index() == 0 and _checksum(self._last) not in (None, last):
            what = f"the batches do not come as in the run that saved the checkpoint: batch {count - 1} is another."
            fix = (
                "shuffle by a fixed seed, the same each time the iterator is made, or give it get_state and set_state, "
                "as grain's have; or some rows are seen twice, and others not at all."
            )
            warnings.warn(format_error("fit", what, fix=fix), stacklevel=2)
        return f"the data by drawing {plural(count, 'batch')}"

    def _keeps_state(self) -> bool:
        return callable(getattr(self._iterator, "get_state", None)) and hasattr(self._iterator, "set_state")


def _checksum(batch: PyTree) -> int | None:
    """Return a number that tells batches apart by their first rows; None if some of them lie on another process."""
    found = 0
    for leaf in jax.tree.leaves(as_arrays("fit", batch)):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
            found = zlib.crc32(np.asarray(leaf[:8] if np.ndim(leaf) else leaf).tobytes(), found)
    return found


def _is_shared_out(batch: PyTree) -> bool:
    """Return whether each process holds rows of its own."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(batch))


def _checksum_of_values(batch: PyTree) -> int:
    """Return a number that tells the values of the global batch apart, in whatever order; all processes must call it."""
    found = 0
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    values = np.ascontiguousarray(shard.data).view(f"u{leaf.dtype.itemsize}").astype(np.uint64)
                    mixed = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
                    found += int(np.sum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64))
    return sum(int(one) for one in exchange(str(found))) % 2**64


def _encode(state: object) -> dict[str, Json]:
    if isinstance(state, bytes):  # grain's DataLoader
        return {"base64": base64.b64encode(state).decode("ascii")}
    try:
        faithful = json.loads(json.dumps(state)) == state
    except TypeError:
        faithful = False
    if not faithful:
        what = f"the state of the batch iterator does not survive JSON: {state!r:.200}"
        fix = "let get_state return bytes, or dicts, lists, strings and numbers."
        raise TypeError(format_error("fit", what, fix=fix))
    return {"json": state}


def _decode(saved: Mapping[str, Json]) -> Json:
    return base64.b64decode(saved["base64"]) if "base64" in saved else saved["json"]
