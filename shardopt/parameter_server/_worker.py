"""The loop of a worker, in a thread or a process: enter, pull, compute the gradient of a batch,
push.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.config._check import check_config
from shardopt.config._config import DDP, StrategyConfig, configure
from shardopt.core import (
    NotSeparableError,
    PyTree,
    abstract,
    calling,
    format_error,
    is_key,
    type_error,
)
from shardopt.core._block_model import LossFn, abstract_key, as_block_model, call, run_blocks
from shardopt.core._loss_parts import LossParts
from shardopt.core._reducer import check_reducer
from shardopt.losses._batch_dims import num_rows, resized, row_counts, row_dims
from shardopt.losses._loss import step_key
from shardopt.losses._parts import loss_parts
from shardopt.losses._per_row import row_numbers
from shardopt.losses._separable import Cut, LossCall, find_mixing, find_trained_weight
from shardopt.mesh import make_mesh, on_mesh
from shardopt.parameter_server._coordinator import WorkerTask
from shardopt.parameter_server._run import BatchesOf, RunSpec, WorkerCompute
from shardopt.parameter_server._server import ServerSettings
from shardopt.parameter_server._updates import (
    Update,
    check_params,
    finiteness,
    replace_trained,
    trained,
)
from shardopt.reducers import Reducer, compressor
from shardopt.reducers._compressor import Compressor, CompressorState
from shardopt.step._batches import as_arrays
from shardopt.step._inputs import check_batch, check_keys, place_batch

WorkerDevices = Sequence[Mesh] | Sequence[int]
"""The mesh of each worker, or the number of devices of each worker's process."""


class CoordinatorCalls(Protocol):
    """The calls that a worker makes: of a `Coordinator`, or of one in another process."""

    def enter(self, worker: int, incarnation: int) -> int | None: ...

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None: ...

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool: ...


def run_worker(
    coordinator: CoordinatorCalls, compute: WorkerCompute, worker: int, incarnation: int = 0
) -> None:
    """Run a worker until the run or its data ends.

    `incarnation` is the number of its restarts.
    """
    position = coordinator.enter(worker, incarnation)
    if position is None:
        return
    compute.begin(worker, position)
    goes_on = True
    while goes_on:
        # Before the pull: data that is slow to load must not make the parameters stale.
        batch = compute.next_batch(worker)
        task = coordinator.pull(worker, incarnation, batch is not None)
        if task is None:
            return
        update = compute.update(worker, task.params, batch, task.clock)
        goes_on = coordinator.push(worker, incarnation, update, task.version)


def sgd_spec(
    caller: str,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    workers: WorkerDevices,
    settings: ServerSettings,
) -> RunSpec:
    """Return the description of a run whose workers push gradients.

    Args:
      caller: the function that the user called, for messages.
      tx: the optimizer.
      loss_fn: the loss.
      workers: the mesh of each worker, or the number of devices of each worker's process.
      settings: the settings of the server.
    """
    num_averaged = len(workers) if settings.max_staleness == 0 else 1
    problem = SgdProblem(caller, tx, loss_fn, workers, None, num_averaged)
    problem.config_of(local_meshes(workers[:1])[0])  # checks the optimizer and the loss
    with calling(caller):
        codec = check_codec(settings.reducer)
    header = {
        "devices": [worker.size if isinstance(worker, Mesh) else int(worker) for worker in workers]
    }
    return RunSpec(
        caller,
        len(workers),
        settings.maker(tx),
        replace(problem, codec=codec).make_compute,
        header | codec_header(codec),
        check_params=check_sgd_params,
    )


def check_sgd_params(params: PyTree) -> None:
    """Refuse parameters that cannot be trained, or that have random keys, which no update would
    change.

    Raises:
      TypeError: if a leaf is not an array or a number.
      ValueError: if no leaf is floating, or a leaf is a random key.
    """
    check_params(params)
    check_keys(abstract(params))


def local_meshes(workers: WorkerDevices) -> list[Mesh]:
    """Return a mesh of this process for each worker, also for workers that run in other processes."""
    devices = jax.local_devices()
    return [
        (
            worker
            if isinstance(worker, Mesh)
            else make_mesh(data=min(worker, len(devices)), devices=devices[: int(worker)])
        )
        for worker in workers
    ]


@dataclass(frozen=True)
class SgdProblem:
    """The gradients that workers push, before they have data.

    Attributes:
      caller: the function that the user called, for messages.
      tx: the optimizer, which is checked.
      loss_fn: the loss.
      workers: the mesh of each worker, or the number of devices of each worker's process.
      codec: the encoder of pushes, or None.
      num_averaged: the loss must be a mean over the batches of so many workers.
    """

    caller: str
    tx: optax.GradientTransformation
    loss_fn: LossFn
    workers: WorkerDevices
    codec: Compressor | None
    num_averaged: int

    def config_of(self, mesh: Mesh) -> StrategyConfig:
        """Check the optimizer and the loss, and return the configuration of a mesh."""
        return check_config(
            configure(self.caller, self.tx, mesh, self.loss_fn, DDP, {"view": "global"})
        )

    def make_compute(
        self, batches_of: BatchesOf, key: np.ndarray, worker: int | None = None
    ) -> WorkerCompute:
        """Return all workers; or with `worker` one of them, on all devices of its process."""
        if worker is None:
            meshes = dict(enumerate(local_meshes(self.workers)))
        else:
            # A process on Ray sees the devices of its worker alone.
            meshes = {worker: make_mesh(data=-1, devices=jax.local_devices())}
        streams = Streams(self.caller, batches_of)
        return SgdWorkers(self, meshes, key, streams, WorkerCompressors(self.codec)).compute()


@dataclass(frozen=True)
class SgdWorkers:
    """Workers that push the gradient of a batch: of the loss total over all rows, in the global
    view.

    A loss with `rng` gets another key for each clock and worker: the same key that `ddp` gives
    device `worker` at step `clock`.

    Attributes:
      problem: the loss and the encoding of its gradients.
      meshes: the mesh of each worker in this process, whose devices share the rows of a batch.
      key: the random key, as numbers.
      streams: the data.
      compressors: the encoders of pushes.
      prepared: the configuration and the program of each mesh.
      programs: the program of each shape of meshes.
      checked: the shapes of parameters and batches whose loss is checked.
    """

    problem: SgdProblem
    meshes: Mapping[int, Mesh]
    key: np.ndarray
    streams: "Streams"
    compressors: "WorkerCompressors"
    prepared: dict[Mesh, tuple[StrategyConfig, Callable[..., Update]]] = field(default_factory=dict)
    programs: dict[jax.sharding.AbstractMesh, Callable[..., Update]] = field(default_factory=dict)
    checked: set[object] = field(default_factory=set)

    def compute(self) -> WorkerCompute:
        """Return the work as a run takes it."""
        return WorkerCompute(self.begin, self.streams.next_batch, self.update, self.device)

    @property
    def device(self) -> Any:
        """The device of the server: the first device of the first worker."""
        return next(iter(self.meshes.values())).devices.flat[0]

    def begin(self, worker: int, position: int) -> None:
        """Let a worker join or resume."""
        self.streams.begin(worker, position)
        self.compressors.begin(worker)

    def update(self, worker: int, params: PyTree, batch: PyTree, clock: int) -> Update:
        """Return the gradient of a batch, on the device of the server."""
        mesh = self.meshes[worker]
        update = self._gradient(mesh, params, batch, worker, clock)
        # on the first device of the worker: all have the same gradient
        if self.compressors.codec is not None:
            update = self.compressors.encode(worker, to_device(update, mesh.devices.flat[0]))
        # Waits here, in the worker: the server's lock must not be held while a gradient is
        # computed.
        return jax.block_until_ready(to_device(update, self.device))

    def _gradient(
        self, mesh: Mesh, params: PyTree, batch: PyTree, worker: int, clock: int
    ) -> Update:
        config, program = self.prepared.get(mesh) or self._prepare(mesh)
        batch = as_arrays(self.problem.caller, batch)
        check_batch(config, batch)
        self._check_loss(config, params, batch)
        params = jax.device_put(params, NamedSharding(config.mesh, PartitionSpec()))
        batch = place_batch(config, batch)
        update = program(params, batch, self.key, np.int32(worker), np.int32(clock))
        return update._replace(rows=num_rows(config, batch))

    def _prepare(self, mesh: Mesh) -> tuple[StrategyConfig, Callable[..., Update]]:
        config = self.problem.config_of(mesh)
        program = jax.jit(on_mesh(config.mesh, _program(config)))
        # Several threads may be here at once: all of them use the program of the first one.
        return self.prepared.setdefault(
            mesh, (config, self.programs.setdefault(config.mesh.abstract_mesh, program))
        )

    def _check_loss(self, config: StrategyConfig, params: PyTree, batch: PyTree) -> None:
        """Refuse a loss whose gradient is not the sum of the pushes.

        Check each batch shape once.
        """
        shapes = abstract((params, batch))
        key = jax.tree.structure(shapes), *jax.tree.leaves(shapes)
        if key in self.checked:
            return
        loss_fn = config.loss.loss_fn
        num_workers = self.problem.num_averaged
        rng = abstract_key(loss_fn)
        # The server divides the sum of totals by the sum of weights, as if weights were constants.
        weight = find_trained_weight(loss_fn, shapes[0], shapes[1], LossCall(config.strategy, rng))
        if weight:
            problem = (
                f"{weight} of so.losses.Weighted depends on the parameters, and a push has the gradient of"
                " the total only."
            )
            fix = (
                "stop_gradient on the weight, if its gradient is not wanted; or so.ddp, which takes"
                " it exactly."
            )
            raise NotSeparableError(format_error(config.strategy, problem, fix=fix))
        if num_workers > 1 and len(row_counts(config, batch)) == 1:
            _check_mean(config, shapes[0], shapes[1], num_workers, rng)
        self.checked.add(key)


def no_compute(*_: object) -> WorkerCompute:
    """Return workers that compute nothing and have endless empty batches."""
    return WorkerCompute(lambda *_: None, lambda worker: (), lambda *_: None, None)


def _check_mean(
    config: StrategyConfig, params: PyTree, batch: PyTree, num_workers: int, rng: jax.Array | None
) -> None:
    union = resized(config, batch, rows=num_workers * num_rows(config, batch))
    cut = Cut(num_workers, row_dims(config, union))
    mixing = find_mixing(config.loss.loss_fn, params, union, cut, LossCall(config.strategy, rng))
    if mixing is None:
        return
    problem = (
        f"{mixing.result} is not shown to be a (weighted) mean over rows, so with max_staleness=0"
        f" {num_workers} workers could train on another than so.ddp: {mixing.reason}"
    )
    fix = (
        "so.per_row(a loss of one row), which needs no proof; so.ddp, which sees all rows; or"
        " max_staleness=1, with which the loss is that of each"
        " worker's own batch."
    )
    raise NotSeparableError(
        format_error(config.strategy, problem, mixing.lines, fix), operation=mixing.operation
    )


def _program(config: StrategyConfig) -> Callable[..., Update]:
    caller = config.strategy

    def program(
        params: PyTree, batch: PyTree, rng: jax.Array, worker: jax.Array, clock: jax.Array
    ) -> Update:
        def numbers():
            return row_numbers(worker, 0, 1, num_rows(config, batch))

        # An argument of the program, as are worker and clock: all workers and steps share one
        # program.
        rng = jnp.asarray(rng)
        key = step_key(config, clock, rng, 0, device=worker, row_numbers=numbers)

        def loss_total(trained_params: PyTree) -> tuple[jax.Array, LossParts]:
            parts = _loss(config, replace_trained(params, trained_params), batch, key)
            if isinstance(parts.loss.total, tuple):
                problem = (
                    "a loss of several terms needs the weights of all workers before any of them"
                    " differentiates it."
                )
                raise ValueError(
                    format_error(
                        caller,
                        problem,
                        fix="return so.losses.Weighted with one total and one weight.",
                    )
                )
            return parts.loss.total, parts

        grads, parts = jax.grad(loss_total, has_aux=True)(trained(params))
        if parts.updates:
            problem = "loss_fn returns so.losses.Updated, for which asynchronous workers have no common value."
            fix = "train such leaves with ddp, zero or fsdp."
            raise ValueError(format_error(caller, problem, [*parts.updates], fix))
        if config.mesh.size > 1:
            replicated = jax.tree.map(lambda _: PartitionSpec(), (grads, parts))
            grads, parts = jax.lax.with_sharding_constraint((grads, parts), replicated)
        update = Update(grads, parts.loss, parts.metrics, None)
        return update._replace(is_finite=finiteness(update))

    return program


def _loss(
    config: StrategyConfig, params: PyTree, batch: PyTree, key: jax.Array | None
) -> LossParts:
    model = as_block_model(config.loss.loss_fn)
    rows = num_rows(config, batch)
    if model is not None:
        return loss_parts(config.strategy, run_blocks(model, params, batch, key), rows)
    return loss_parts(config.strategy, call(config.loss.loss_fn, key, 0, params, batch), rows)


def to_device(update: Update, device: Any) -> Update:
    """Move the arrays of an update to a device. Its number of rows stays an int."""
    return jax.device_put(update._replace(rows=None), device)._replace(rows=update.rows)


def key_data(rng: jax.Array | None) -> np.ndarray:
    """Return the data of the key from which a strategy that is initialised with `rng` draws."""
    key = jax.random.key(0) if rng is None else rng
    if not isinstance(key, jax.Array):
        problem = f"rng must be a random key, got {type(rng).__name__}."
        raise type_error(problem, fix="pass jax.random.key(seed).")
    if not is_key(key):
        key = jax.random.wrap_key_data(key)
    return np.asarray(jax.random.key_data(jax.random.fold_in(key, 0)))


class Streams:
    """The data of each worker, in rounds; a round is the data of one push.

    A round is a batch, or with `sizes` a list of `sizes[worker]` batches. Batches at the end that
    do not fill a round are not used.
    """

    def __init__(self, caller: str, batches_of: BatchesOf, sizes: Sequence[int] | None = None):
        if not callable(batches_of):
            problem = (
                "batches_of must be a function (worker) -> iterable of batches, got"
                f" {type(batches_of).__name__}."
            )
            fix = "to share out one stream: lambda w: itertools.islice(stream(), w, None, n)."
            raise TypeError(format_error(caller, problem, fix=fix))
        self.caller = caller
        self.batches_of = batches_of
        self.sizes = sizes
        self.streams: dict[int, Iterator[PyTree]] = {}

    def begin(self, worker: int, position: int = 0) -> None:
        """Start a worker's batches from the beginning, and skip the first `position` rounds."""
        batches = self.batches_of(worker)
        if not isinstance(batches, Iterable):
            problem = (
                f"batches_of({worker}) must return an iterable of batches, got"
                f" {type(batches).__name__}."
            )
            raise TypeError(format_error(self.caller, problem))
        skipped = position * (1 if self.sizes is None else self.sizes[worker])
        self.streams[worker] = (
            itertools.islice(batches, skipped, None) if skipped else iter(batches)
        )

    def next_batch(self, worker: int) -> PyTree | None:
        """Return the next round, or None at the end of the data."""
        if self.sizes is None:
            return next(self.streams[worker], None)
        batches = list(itertools.islice(self.streams[worker], self.sizes[worker]))
        return batches if len(batches) == self.sizes[worker] else None


@dataclass(frozen=True)
class WorkerCompressors:
    """The encoders of the workers' updates.

    Each has its own error feedback, on the device of its gradient.

    Attributes:
      codec: the codec of all workers; None to leave the updates unchanged.
      memories: the error memory of each worker.
    """

    codec: Compressor | None
    memories: dict[int, CompressorState] = field(default_factory=dict)

    def begin(self, worker: int) -> None:
        """Clear the worker's error memory, at each join."""
        self.memories.pop(worker, None)

    def encode(self, worker: int, update: Update) -> Update:
        """Return the update with a message in place of the gradient."""
        if self.codec is None:
            return update
        start, encode_update = _codec_programs(self.codec)
        # Popped, because the program takes over its memory.
        memory = self.memories.pop(worker, None)
        memory = start(update.grads) if memory is None else memory
        encoded, self.memories[worker] = encode_update(update._replace(rows=None), memory)
        return encoded._replace(rows=update.rows)


def check_codec(reducer: Reducer | None) -> Compressor | None:
    """Return the codec of a reducer; None without a reducer."""
    if reducer is None:
        return None
    check_reducer(reducer)
    return compressor(reducer)


def codec_header(codec: Compressor | None) -> dict[str, str]:
    """Return the settings of a codec that the log records."""
    return {} if codec is None else {"reducer": codec.name}


@functools.lru_cache(maxsize=16)
def _codec_programs(
    codec: Compressor,
) -> tuple[Callable[[PyTree], CompressorState], Callable[..., tuple[Update, CompressorState]]]:
    """Return the jitted initialization of an error memory and the jitted encoding of an update,
    cached between runs.
    """

    def encode_update(update: Update, memory: CompressorState) -> tuple[Update, CompressorState]:
        assert update.is_finite is not None
        message, memory = codec.encode(update.grads, memory)
        decoded = codec.decode(message, update.grads)
        # A finite gradient may be too large for the dtype of the message.
        finite = [
            jnp.ones(2, bool),
            *(jnp.isfinite(leaf).all()[None] for leaf in jax.tree.leaves(decoded)),
        ]
        # Computed on the worker: the server would have to decode each message, under its lock.
        is_finite = update.is_finite & jnp.concatenate(finite)
        unsent = _norm(memory.unsent) / jnp.maximum(
            _norm(update.grads), jnp.finfo(jnp.float32).tiny
        )
        return update._replace(grads=message, is_finite=is_finite, unsent=unsent), memory

    return jax.jit(codec.init), jax.jit(encode_update, donate_argnums=1)


def _norm(tree: PyTree) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf)).astype(jnp.float32)) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))
