"""A worker from beginning to end, wherever it is: enter, pull, compute the gradient of a batch, push."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.core.block_model import LossFn, as_block_model, call, run_blocks, takes_rng
from shardopt.core.errors import NotSeparableError, format_error
from shardopt.core.types import PyTree, abstract, leaves_with_paths
from shardopt.engine.batch_dims import num_rows, resized, row_counts, row_dim
from shardopt.engine.batches import as_arrays
from shardopt.engine.config import DDP, StrategyConfig, check_config
from shardopt.engine.inputs import check_batch, check_keys, place_batch
from shardopt.engine.loss import LossParts, loss_parts
from shardopt.engine.separable import find_mixing, find_trained_weight
from shardopt.mesh import make_mesh, on_mesh
from shardopt.parameter_server.rules import Rule, plain
from shardopt.parameter_server.run import BatchesOf, Compute, RunSpec
from shardopt.parameter_server.server import make_server
from shardopt.parameter_server.settings import settings_here
from shardopt.parameter_server.sharded import Devices, check_shardable
from shardopt.parameter_server.sparse import check_matches, is_rows, shrink
from shardopt.parameter_server.updates import Update, check_params, finiteness, merge, trained
from shardopt.reducers import Compressor, CompressorState, Reducer, compressor
from shardopt.reducers.reducer import check_reducer

if TYPE_CHECKING:
    from shardopt.parameter_server.coordinator import Task
    from shardopt.parameter_server.ray_groups import Asks


def run_worker(coordinator: "Asks", compute: Compute, worker: int, incarnation: int = 0) -> None:
    """Work in every period of a worker's availability; `incarnation` counts how often it was started again."""
    if compute.ahead is not None:
        run_ahead(coordinator, compute, compute.ahead, worker, incarnation)
        return
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


def run_ahead(
    coordinator: "Asks", compute: Compute, ahead: Callable[[int, PyTree], None], worker: int, incarnation: int
) -> None:
    """Work as `run_worker`, but take the first steps of a round while the push before it and its pull travel."""
    wire, settings = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"wire-{worker}"), settings_here()

    def send(update: Update | None, version: int) -> bool:
        with settings():
            return coordinator.push(worker, incarnation, update, version)

    def pull(pushed: "Future[bool] | None", ready: bool) -> "Task | None":
        if pushed is not None and not pushed.result():  # which has ended: one thing travels at a time
            return None
        with settings():
            return coordinator.pull(worker, incarnation, ready)

    try:
        while (position := coordinator.enter(worker, incarnation)) is not None:
            compute.begin(worker, position)
            pushed = None
            while True:
                batch = compute.next_batch(worker)
                asked = wire.submit(pull, pushed, batch is not None)
                if batch is not None:
                    ahead(worker, batch)
                task = asked.result()
                if task is None:
                    break
                update = compute.update(worker, task.params, batch, task.clock)
                pushed = wire.submit(send, update, task.version)
    finally:
        wire.shutdown(wait=False)  # after an error the server may never answer


def sgd_spec(
    who: str,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    workers: Sequence[Mesh] | Sequence[int],
    *,
    max_staleness: int | None,
    rule: Rule | None,
    nonfinite: str,
    reducer: Reducer | None,
    sparse: Sequence[str] = (),
    servers: int = 1,
    devices: Devices = (),
) -> RunSpec:
    """Describe a run whose workers push gradients; the arguments are those of `async_sgd`.

    `workers` are the mesh of each, or how many devices each has in a process of its own; `devices` where servers are.
    """
    make_gradients(who, tx, loss_fn, meshes_here(workers[:1])[0], None)  # checks the optimizer and the loss
    codec = check_codec(who, reducer, sparse)
    header = {"devices": [worker.size if isinstance(worker, Mesh) else int(worker) for worker in workers]}
    header |= {"sparse": list(sparse)} if sparse else {}
    return RunSpec(
        who,
        len(workers),
        partial(
            make_server,
            tx,
            max_staleness=max_staleness,
            rule=rule,
            nonfinite=nonfinite,
            reducer=reducer,
            servers=servers,
            devices=devices,
        ),
        partial(make_compute, who, tx, loss_fn, workers, sparse, codec, max_staleness == 0),
        header | codec_header(codec),
        check_params=partial(check_sgd_params, tx, rule, servers),
        servers=int(servers),
    )


def check_sgd_params(
    tx: optax.GradientTransformation, rule: Rule | None, servers: int, who: str, params: PyTree
) -> None:
    """Refuse what is no pytree of arrays with something to train in it, and random keys, which nothing would change.

    Raises:
      TypeError: if a leaf is not an array or a number.
      ValueError: if no leaf is floating, one is a random key, or several servers cannot share them.
    """
    check_params(who, params)
    check_keys(who, abstract(params))
    if servers > 1:
        check_shardable(who, tx, plain() if rule is None else rule, params, servers)


def meshes_here(workers: Sequence[Mesh] | Sequence[int]) -> list[Mesh]:
    """Return the mesh of each worker, in this process also of those that have a process of their own."""
    devices = jax.local_devices()
    return [
        worker
        if isinstance(worker, Mesh)
        else make_mesh(data=min(worker, len(devices)), devices=devices[: int(worker)])
        for worker in workers
    ]


def make_compute(
    who: str,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    workers: Sequence[Mesh] | Sequence[int],
    sparse: Sequence[str],
    codec: Compressor | None,
    synchronous: bool,
    batches_of: BatchesOf,
    key: np.ndarray,
    worker: int | None = None,
) -> Compute:
    """Return workers that push the gradient of a batch: all, or one on all devices of its process; see `sgd_spec`.

    If they are synchronous, the loss must be a mean over the batches of all workers.
    """
    if worker is None:
        meshes = dict(enumerate(meshes_here(workers)))
    else:
        meshes = {worker: make_mesh(data=-1, devices=jax.local_devices())}
    first = next(iter(meshes.values()))
    streams, compressors = Streams(who, batches_of), make_compressors(codec)
    gradients, home = (
        make_gradients(who, tx, loss_fn, first, key, together=len(workers) if synchronous else 1),
        first.devices.flat[0],
    )

    def update(worker: int, params: PyTree, batch: PyTree, clock: int) -> Update:
        if sparse:
            check_matches(who, sparse, trained(params))
        found = gradients(meshes[worker], params, batch, worker, clock)
        if sparse:
            found = found._replace(grads=shrink(found.grads, sparse))
        if codec is not None:  # on one of the worker's devices: all have the same gradient
            found = compressors.encode(worker, to_device(found, meshes[worker].devices.flat[0]))
        return jax.block_until_ready(to_device(found, home))

    def begin(worker: int, position: int) -> None:
        streams.begin(worker, position)
        compressors.begin(worker)

    return Compute(begin, streams.next_batch, update, lambda tree: jax.device_put(tree, home))


def no_compute(*_: object) -> Compute:
    """Return workers that compute nothing and never run out of it."""
    return Compute(lambda worker, position: None, lambda worker: (), lambda *_: None, lambda tree: tree)


Gradients = Callable[[Mesh, PyTree, PyTree, int, int], Update]
"""`(mesh, params, batch, worker, clock) -> Update`, computed on that mesh."""


def make_gradients(
    who: str,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    mesh: Mesh,
    rng: np.ndarray | None,
    *,
    together: int = 1,
) -> Gradients:
    """Return what computes an update, on any mesh whose devices share the rows of the batch.

    The gradient is taken in the global view, of the loss total over all rows. A loss with `rng` gets a key of its own
    for each clock and worker: the very one that `ddp` gives device `worker` at step `clock`.

    Args:
      who: the function that the user called, for messages.
      tx: the optimizer, which is checked.
      loss_fn: the loss.
      mesh: a mesh of the kind that is used.
      rng: the random key, as numbers.
      together: the batches of how many workers the loss must be the mean over.
    """
    check = make_check(together)
    prepared: dict[Mesh, tuple[StrategyConfig, Callable[..., Update]]] = {}
    programs: dict[jax.sharding.AbstractMesh, Callable[..., Update]] = {}

    def prepare(mesh: Mesh) -> tuple[StrategyConfig, Callable[..., Update]]:
        config = check_config(StrategyConfig(who, tx, mesh, loss_fn, DDP, view="global"))
        program = jax.jit(on_mesh(config.mesh, _program(config)))
        # Threads may come here at once: whoever is first leaves what all of them use.
        return prepared.setdefault(mesh, (config, programs.setdefault(config.mesh.abstract_mesh, program)))

    def run(mesh: Mesh, params: PyTree, batch: PyTree, worker: int, clock: int) -> Update:
        config, program = prepared.get(mesh) or prepare(mesh)
        batch = as_arrays(who, batch)
        check_batch(config, batch)
        check(config, params, batch)
        params = jax.device_put(params, NamedSharding(config.mesh, PartitionSpec()))
        batch = place_batch(config, batch)
        found = program(params, batch, rng, np.int32(worker), np.int32(clock))
        return found._replace(rows=num_rows(config, batch))

    prepare(mesh)
    return run


def make_check(together: int) -> Callable[[StrategyConfig, PyTree, PyTree], None]:
    """Return what refuses a loss whose gradient the pushes of workers do not add up to, once for each shape of a batch.

    Args:
      together: how many workers there are.
    """
    settled: set[object] = set()

    def check(config: StrategyConfig, params: PyTree, batch: PyTree) -> None:
        shapes = abstract((params, batch))
        key = jax.tree.structure(shapes), *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
        if key in settled:
            return
        rng = jax.eval_shape(lambda: jax.random.key(0)) if takes_rng(config.loss_fn) else None
        if weight := find_trained_weight(config.loss_fn, *shapes, who=config.strategy, key=rng):
            what = f"{weight} of so.Weighted depends on the parameters, and a push has the gradient of the total only."
            fix = "stop_gradient on the weight, if its gradient is not wanted; or so.ddp, which takes it exactly."
            raise NotSeparableError(format_error(config.strategy, what, fix=fix))
        if together > 1 and len(row_counts(config, batch)) == 1:
            _check_mean(config, shapes[0], shapes[1], together, rng)
        settled.add(key)

    return check


def _check_mean(config: StrategyConfig, params: PyTree, batch: PyTree, together: int, rng: jax.Array | None) -> None:
    union = resized(config, batch, rows=together * num_rows(config, batch))
    dims = [row_dim(config, path, leaf.ndim) for path, leaf in leaves_with_paths(union)]
    mixing = find_mixing(config.loss_fn, params, union, pieces=together, dims=dims, who=config.strategy, key=rng)
    if mixing is None:
        return
    what = (
        f"{mixing.result} is not shown to be a (weighted) mean over rows, so with max_staleness=0 {together} workers could train on "
        f"another than so.ddp: {mixing.reason}"
    )
    fix = "so.ddp, which sees all rows; or max_staleness=1, with which the loss is that of each worker's own batch."
    raise NotSeparableError(format_error(config.strategy, what, mixing.lines, fix), operation=mixing.operation)


def _program(config: StrategyConfig) -> Callable[..., Update]:
    who, loss_fn = config.strategy, config.loss_fn

    def program(params: PyTree, batch: PyTree, rng: jax.Array, worker: jax.Array, clock: jax.Array) -> Update:
        key = _key(loss_fn, rng, worker, clock)

        def total(part: PyTree) -> tuple[jax.Array, LossParts]:
            parts = _loss(config, merge(params, part), batch, key)
            if isinstance(parts.loss.total, tuple):
                what = "a loss of several terms needs the weights of all workers before any of them differentiates it."
                raise ValueError(format_error(who, what, fix="return so.Weighted with one total and one weight."))
            return parts.loss.total, parts

        grads, parts = jax.grad(total, has_aux=True)(trained(params))
        if parts.updates:
            what = "loss_fn returns so.Updated, for which asynchronous workers have no common value."
            raise ValueError(format_error(who, what, [*parts.updates], "train such leaves with ddp, zero or fsdp."))
        if config.mesh.size > 1:
            replicated = jax.tree.map(lambda _: PartitionSpec(), (grads, parts))
            grads, parts = jax.lax.with_sharding_constraint((grads, parts), replicated)
        update = Update(grads, parts.loss, parts.metrics, None)
        return update._replace(is_finite=finiteness(update))

    return program


def _loss(config: StrategyConfig, params: PyTree, batch: PyTree, key: jax.Array | None) -> LossParts:
    model, rows = as_block_model(config.loss_fn), num_rows(config, batch)
    if model is not None:
        return loss_parts(config.strategy, run_blocks(model, params, batch, key), rows)
    return loss_parts(config.strategy, call(config.loss_fn, key, 0, params, batch), rows)


def _key(loss_fn: LossFn, rng: jax.Array, worker: jax.Array, clock: jax.Array) -> jax.Array | None:
    if not takes_rng(loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(rng)), clock)
    return jax.random.fold_in(jax.random.fold_in(key, worker), 0)


def to_device(update: Update, device: Any) -> Update:
    """Return an update on a device; its number of rows stays a number, sparse leaves stay in numpy."""
    put = lambda leaf: leaf if is_rows(leaf) else jax.device_put(leaf, device)  # noqa: E731
    return jax.tree.map(put, update._replace(rows=None), is_leaf=is_rows)._replace(rows=update.rows)


def key_data(who: str, rng: jax.Array | None) -> np.ndarray:
    """Return the key data that a strategy would draw from, were it initialised with this key."""
    typed = jax.random.key(0) if rng is None else rng
    if not isinstance(typed, jax.Array):
        what = f"rng must be a random key, got {type(rng).__name__}."
        raise TypeError(format_error(who, what, fix="pass jax.random.key(seed)."))
    if not jnp.issubdtype(typed.dtype, jax.dtypes.prng_key):
        typed = jax.random.wrap_key_data(typed)
    return np.asarray(jax.random.key_data(jax.random.fold_in(typed, 0)))


class Streams:
    """The data of each worker: rounds of as many batches as it takes between two pushes.

    A round is a batch, or with `sizes` a list of `sizes[worker]` batches. Batches that are left over at the end, fewer
    than a round, are not used.
    """

    def __init__(self, who: str, batches_of: BatchesOf, sizes: Sequence[int] | None = None):
        if not callable(batches_of):
            what = f"batches_of must be a function (worker) -> iterable of batches, got {type(batches_of).__name__}."
            fix = "to share out one stream: lambda w: itertools.islice(stream(), w, None, n)."
            raise TypeError(format_error(who, what, fix=fix))
        self.who, self.batches_of, self.sizes = who, batches_of, sizes
        self.streams: dict[int, Iterator[PyTree]] = {}

    def begin(self, worker: int, position: int = 0) -> None:
        """Start a worker's batches again, after the first `position` rounds."""
        batches = self.batches_of(worker)
        if not isinstance(batches, Iterable):
            what = f"batches_of({worker}) must return an iterable of batches, got {type(batches).__name__}."
            raise TypeError(format_error(self.who, what))
        skipped = position * (1 if self.sizes is None else self.sizes[worker])
        self.streams[worker] = itertools.islice(batches, skipped, None) if skipped else iter(batches)

    def next_batch(self, worker: int) -> PyTree | None:
        """Return the next round, or None where there is none."""
        if self.sizes is None:
            return next(self.streams[worker], None)
        found = list(itertools.islice(self.streams[worker], self.sizes[worker]))
        return found if len(found) == self.sizes[worker] else None


class WorkerCompressors(NamedTuple):
    """How workers write their updates, each with error feedback of its own, on the device of its gradient.

    Attributes:
      begin: `begin(worker)`, at each join: nothing is remembered; of fragments worker and number.
      encode: `encode(worker, update) -> update` with a message in place of the gradient.
    """

    begin: Callable[[Hashable], None]
    encode: Callable[[Hashable, Update], Update]


def check_codec(who: str, reducer: Reducer | None, sparse: Sequence[str] = ()) -> Compressor | None:
    """Return the codec of a reducer, None for none."""
    if reducer is None:
        return None
    check_reducer(who, reducer)
    codec = compressor(reducer)
    if sparse:
        what = f"reducer={codec.name} and sparse={tuple(sparse)} cannot be combined: sparse rows travel as they are."
        raise ValueError(format_error(who, what, fix="leave one of them out."))
    return codec


def codec_header(codec: Compressor | None) -> dict[str, str]:
    """Return what the log keeps of a codec."""
    return {} if codec is None else {"reducer": codec.name}


def make_compressors(codec: Compressor | None) -> WorkerCompressors:
    """Return what encodes the updates of workers; without a codec they travel as they are."""
    if codec is None:
        return WorkerCompressors(lambda worker: None, lambda worker, update: update)
    memories: dict[Hashable, CompressorState] = {}
    start, write = _codec_programs(codec)

    def begin(worker: Hashable) -> None:
        memories.pop(worker, None)

    def encode(worker: Hashable, update: Update) -> Update:
        memory = memories.pop(worker, None)
        memory = start(update.grads) if memory is None else memory
        found, memories[worker] = write(update._replace(rows=None), memory)
        return found._replace(rows=update.rows)

    return WorkerCompressors(begin, encode)


@functools.lru_cache(maxsize=16)
def _codec_programs(
    codec: Compressor,
) -> tuple[Callable[[PyTree], CompressorState], Callable[..., tuple[Update, CompressorState]]]:
    """Return the compiled start of a memory, and the compiled encoding of an update; kept from run to run."""

    def write(update: Update, memory: CompressorState) -> tuple[Update, CompressorState]:
        assert update.is_finite is not None
        message, memory = codec.encode(update.grads, memory)
        read = codec.decode(message, update.grads)
        # What is finite may still be too large for the dtype that travels.
        finite = [jnp.ones(2, bool), *(jnp.isfinite(leaf).all()[None] for leaf in jax.tree.leaves(read))]
        is_finite = update.is_finite & jnp.concatenate(finite)
        unsent = _norm(memory.unsent) / jnp.maximum(_norm(update.grads), jnp.finfo(jnp.float32).tiny)
        return update._replace(grads=message, is_finite=is_finite, unsent=unsent), memory

    return jax.jit(codec.init), jax.jit(write, donate_argnums=1)


def _norm(tree: PyTree) -> jax.Array:
    squares = [jnp.sum(jnp.square(jnp.abs(leaf)).astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))
