"""A worker's side of a reducer: gradients become messages, and what these do not say stays with the worker."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.core.block_model import as_block_model, call, run_blocks, takes_rng
from shardopt.core.errors import format_error
from shardopt.core.types import LossFn, PyTree
from shardopt.engine.config import DDP, StrategyConfig, check_config
from shardopt.engine.inputs import batch_sharding, check_batch, place_batch
from shardopt.engine.loss import LossParts, loss_parts
from shardopt.mesh import data_axes, on_mesh
from shardopt.parameter_server.sparse import check_matches, is_rows, shrink
from shardopt.parameter_server.updates import Update, finiteness, merge, trained
from shardopt.reducers import Compressor, CompressorState, compressor
from shardopt.reducers.reducer import check_reducer


class WorkerCompressor(NamedTuple):
    """How workers write their updates.

    Attributes:
      header: what the log keeps of it.
      begin: `begin(worker)`, at each join: nothing is remembered.
      encode: `encode(worker, update) -> update` with a message in place of the gradient.
    """

    header: dict[str, Any]
    begin: Callable[[int], None]
    encode: Callable[[int, Update], Update]


def check_codec(who: str, reducer: Any, sparse: Any = ()) -> Compressor | None:
    """Return the compressor of a reducer, None for none.

    Raises:
      TypeError: if it is not a reducer.
      ValueError: if one sender cannot write in its way, or leaves are sparse.
    """
    if reducer is None:
        return None
    check_reducer(who, reducer)
    found = compressor(reducer)
    if sparse:
        what = f"reducer={found.name} and sparse={tuple(sparse)} cannot be combined: sparse rows travel as they are."
        raise ValueError(format_error(who, what, fix="leave one of them out."))
    return found


def make_compressor(code: Compressor | None) -> WorkerCompressor:
    """Return what encodes the updates of workers, each with a memory of its own, on the device of its gradient.

    Without a code updates travel as they are.
    """
    if code is None:
        return WorkerCompressor({}, lambda worker: None, lambda worker, update: update)
    memories: dict[int, CompressorState] = {}
    start, write = _compressor_programs(code)

    def begin(worker: int) -> None:
        memories.pop(worker, None)

    def encode(worker: int, update: Update) -> Update:
        memory = memories.pop(worker, None)
        memory = start(update.grads) if memory is None else memory
        found, memories[worker] = write(update._replace(rows=None), memory)
        return found._replace(rows=update.rows)

    return WorkerCompressor({"reducer": code.name}, begin, encode)


@functools.lru_cache(maxsize=16)
def _compressor_programs(
    code: Compressor,
) -> tuple[Callable[[PyTree], CompressorState], Callable[..., tuple[Update, CompressorState]]]:
    """Return the compiled start of a memory, and the compiled encoding of an update; kept from run to run."""

    def write(update: Update, memory: CompressorState) -> tuple[Update, CompressorState]:
        message, memory = code.encode(update.grads, memory)
        read = code.decode(message, update.grads)
        # What is finite may still be too large for the dtype that travels.
        finite = [jnp.ones(2, bool), *(jnp.isfinite(leaf).all()[None] for leaf in jax.tree.leaves(read))]
        unsent = _norm(memory.unsent) / jnp.maximum(_norm(update.grads), jnp.finfo(jnp.float32).tiny)
        return update._replace(
            grads=message, is_finite=update.is_finite & jnp.concatenate(finite), unsent=unsent
        ), memory

    return jax.jit(code.init), jax.jit(write, donate_argnums=1)


def _norm(tree: PyTree) -> jax.Array:
    squares = [jnp.sum(jnp.square(jnp.abs(leaf)).astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


# What a worker does from beginning to end, wherever it is: enter, pull, compute, push.


# What a worker computes: the gradient of its batch, as an update to push.


Gradients = Callable[[Mesh, PyTree, PyTree, int, int], Update]
"""`(mesh, params, batch, worker, clock) -> Update`, computed on that mesh."""


def make_gradients(who: str, tx: optax.GradientTransformation, loss_fn: LossFn, mesh: Mesh, rng: Any) -> Gradients:
    """Return what computes an update, on any mesh whose devices share out the rows of the batch.

    The gradient is taken in the global view, of the loss total over all rows. A loss with `rng` gets a key of its own
    for each clock and worker: the very one that `ddp` gives device `worker` at step `clock`.

    Args:
      who: the function that the user called, for messages.
      tx: the optimizer, checked only.
      loss_fn: as for `ddp`.
      mesh: one of the meshes, checked at once.
      rng: uint32 key data.

    Raises:
      TypeError: if the optimizer, the mesh or the loss is of the wrong kind.
      ValueError: if the mesh has no data axis.
    """
    prepared: dict[Mesh, tuple[StrategyConfig, Any]] = {}
    programs: dict[Any, Any] = {}

    def prepare(mesh: Mesh) -> tuple[StrategyConfig, Any]:
        recipe = check_config(StrategyConfig(who, tx, mesh, loss_fn, DDP))
        program = jax.jit(on_mesh(recipe.mesh, _program(who, loss_fn, recipe.mesh)))
        # Threads may come here at once: whoever is first leaves what all of them use.
        return prepared.setdefault(mesh, (recipe, programs.setdefault(recipe.mesh.abstract_mesh, program)))

    def run(mesh: Mesh, params: PyTree, batch: PyTree, worker: int, clock: int) -> Update:
        recipe, program = prepared.get(mesh) or prepare(mesh)
        check_batch(recipe, batch)
        params = jax.device_put(params, NamedSharding(recipe.mesh, PartitionSpec()))
        batch = place_batch(batch, batch_sharding(recipe))
        found = program(params, batch, rng, np.int32(worker), np.int32(clock))
        return found._replace(rows=jax.tree.leaves(batch)[0].shape[0])

    prepare(mesh)
    return run


def _program(who: str, loss_fn: LossFn, mesh: Mesh) -> Callable[..., Update]:
    def program(params: PyTree, batch: PyTree, rng: Any, worker: Any, clock: Any) -> Update:
        key = _key(loss_fn, rng, worker, clock)

        def total(part):
            parts = _loss(who, loss_fn, merge(params, part), batch, key)
            return parts.loss.total, parts

        grads, parts = jax.grad(total, has_aux=True)(trained(params))
        if parts.updates:
            what = "loss_fn returns so.Updated, for which asynchronous workers have no common value."
            raise ValueError(format_error(who, what, [*parts.updates], "train such leaves with ddp, zero or fsdp."))
        if mesh.size > 1:
            whole = PartitionSpec()
            grads, parts = jax.lax.with_sharding_constraint(
                (grads, parts), jax.tree.map(lambda _: whole, (grads, parts))
            )
        update = Update(grads, parts.loss, parts.metrics, None)
        return update._replace(is_finite=finiteness(update))

    return program


def _loss(who: str, loss_fn: LossFn, params: PyTree, batch: PyTree, key: Any) -> LossParts:
    model, rows = as_block_model(loss_fn), jax.tree.leaves(batch)[0].shape[0]
    if model is not None:
        return loss_parts(who, run_blocks(model, params, batch, key), rows)
    return loss_parts(who, call(loss_fn, key, 0, params, batch), rows)


def _key(loss_fn: LossFn, rng: Any, worker: Any, clock: Any) -> Any:
    if not takes_rng(loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(rng)), clock)
    return jax.random.fold_in(jax.random.fold_in(key, worker), 0)


# A worker's side of a run: its batches, its device, its gradient. Shared by the simulator and the transports.


class Compute(NamedTuple):
    """What workers do apart from talking to the server.

    Attributes:
      header: what the log keeps of it: `rng` and the number of `devices` of each worker.
      begin: `begin(worker, position)`, at each join: its batches start again, and so many rounds of them are skipped,
        which is 0 but in a run that is resumed.
      next_batch: `next_batch(worker) -> batch`, or None where there are no more.
      update: `update(worker, params, batch, clock) -> Update`, finished, on the device of the server.
      on_server: `on_server(tree) -> tree`, moved to the device of the server: the first of the first worker.
    """

    header: dict[str, Any]
    begin: Callable[[int, int], None]
    next_batch: Callable[[int], Any]
    update: Callable[[int, PyTree, Any, int], Any]
    on_server: Callable[[PyTree], PyTree]


def make_compute(
    who: str,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    meshes: Sequence[Mesh] | Mapping[int, Mesh],
    batches_of: Callable[[int], Iterable[Any]],
    key: np.ndarray,
    sparse: Sequence[str] = (),
    code: Compressor | None = None,
) -> Compute:
    """Return workers that push the gradient of a batch.

    Args:
      who: the function that the user called, for messages.
      tx: the optimizer, checked only.
      loss_fn: as for `ddp`.
      meshes: the mesh of each worker, from `worker_meshes`.
      batches_of: `batches_of(worker)`, its batches.
      key: from `key_data`.
      sparse: patterns of the leaves of which only the rows that are touched travel.
      code: how gradients are encoded; None if they travel as they are.

    Raises:
      TypeError: if an argument is of the wrong kind.
    """
    streams = Streams(who, batches_of)
    listed = list(meshes.values() if isinstance(meshes, Mapping) else meshes)
    encoder = make_compressor(code)
    gradients = make_gradients(who, tx, loss_fn, listed[0], key)
    home = listed[0].devices.flat[0]

    def update(worker: int, params: PyTree, batch: Any, clock: int) -> Any:
        if sparse:
            check_matches(who, sparse, trained(params))
        found = gradients(meshes[worker], params, batch, worker, clock)
        if sparse:
            found = found._replace(grads=shrink(found.grads, sparse))
        if code is not None:  # on one of the worker's devices: all have the same gradient
            found = encoder.encode(worker, to_device(found, meshes[worker].devices.flat[0]))
        return jax.block_until_ready(to_device(found, home))

    def begin(worker: int, position: int) -> None:
        streams.begin(worker, position)
        encoder.begin(worker)

    rows = [int(np.prod([mesh.shape[axis] for axis in data_axes(mesh)])) for mesh in listed]
    header = {"rng": key.tolist(), "devices": rows, **({"sparse": list(sparse)} if sparse else {})}
    header |= encoder.header
    on_server = lambda tree: jax.device_put(tree, home)  # noqa: E731
    return Compute(header, begin, streams.next_batch, update, on_server)


class Streams:
    """The data of each worker: rounds of as many batches as it takes between two pushes.

    A round is a batch, or with `sizes` a list of `sizes[worker]` batches. Batches that are left over at the end, fewer
    than a round, are not used.
    """

    def __init__(self, who: str, batches_of: Any, sizes: Sequence[int] | None = None):
        if not callable(batches_of):
            what = f"batches_of must be a function (worker) -> iterable of batches, got {type(batches_of).__name__}."
            raise TypeError(
                format_error(
                    who, what, fix="to share out one stream: lambda w: itertools.islice(stream(), w, None, n)."
                )
            )
        self.who, self.batches_of, self.sizes = who, batches_of, sizes
        self.streams: dict[int, Iterator[Any]] = {}

    def begin(self, worker: int, position: int = 0) -> None:
        """Start a worker's batches again, after the first `position` rounds."""
        batches = self.batches_of(worker)
        if not isinstance(batches, Iterable):
            what = f"batches_of({worker}) must return an iterable of batches, got {type(batches).__name__}."
            raise TypeError(format_error(self.who, what))
        skipped = position * (1 if self.sizes is None else self.sizes[worker])
        self.streams[worker] = itertools.islice(batches, skipped, None) if skipped else iter(batches)

    def next_batch(self, worker: int) -> Any:
        """Return the next round, or None where there is none."""
        if self.sizes is None:
            return next(self.streams[worker], None)
        found = list(itertools.islice(self.streams[worker], self.sizes[worker]))
        return found if len(found) == self.sizes[worker] else None


def to_device(update: Update, device: Any) -> Update:
    """Return an update on a device; its number of rows stays a number, sparse leaves stay in numpy."""
    put = lambda leaf: leaf if is_rows(leaf) else jax.device_put(leaf, device)  # noqa: E731
    return jax.tree.map(put, update._replace(rows=None), is_leaf=is_rows)._replace(rows=update.rows)


def no_compute() -> Compute:
    """Return workers that compute nothing and never run out of it."""
    return Compute({}, lambda worker, position: None, lambda worker: (), lambda *_: None, lambda tree: tree)


def key_data(who: str, rng: Any) -> np.ndarray:
    """Return the key data that a ring-1 strategy would draw from, were it initialised with this key."""
    typed = jax.random.key(0) if rng is None else rng
    if not isinstance(typed, jax.Array):
        what = f"rng must be a random key, got {type(rng).__name__}."
        raise TypeError(format_error(who, what, fix="pass jax.random.key(seed)."))
    if not jax.numpy.issubdtype(typed.dtype, jax.dtypes.prng_key):
        typed = jax.random.wrap_key_data(typed)
    return np.asarray(jax.random.key_data(jax.random.fold_in(typed, 0)))


def run_worker(coordinator: Any, compute: Compute, worker: int, incarnation: int = 0) -> None:
    """Live through every period of a worker's availability.

    Args:
      coordinator: a `Coordinator`, or what speaks for one in another process.
      compute: the worker's side.
      worker: its number.
      incarnation: which of its incarnations this is.
    """
    while (position := coordinator.enter(worker, incarnation)) is not None:
        compute.begin(worker, position)
        goes_on = True
        while goes_on:
            batch = compute.next_batch(worker)
            task = coordinator.pull(worker, incarnation, batch is not None)
            if task is None:
                break
            update = compute.update(worker, task.params, batch, task.clock)
            goes_on = coordinator.push(worker, incarnation, update, task.version)
