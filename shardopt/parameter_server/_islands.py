"""Islands that push the change of their parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core import (
    Metric,
    PyTree,
    TrainState,
    Weighted,
    format_error,
    is_inexact,
    leaves_with_paths,
    wide_dtype,
)
from shardopt.core._loss_parts import StepMetrics
from shardopt.losses._metrics import combined
from shardopt.parameter_server._run import WorkerCompute
from shardopt.parameter_server._updates import Update, finiteness, replace_trained, trained
from shardopt.parameter_server._worker import Streams, WorkerCompressors, to_device
from shardopt.partition._rules import matches
from shardopt.step._inputs import put
from shardopt.step._optimizer import ShardedOptimizer


class Island:
    """The train state of an island, and its copy of the server's parameters.

    Attributes:
      opt: the strategy of the island.
      device: the island's first device.
      state: the train state; None if the island has not joined.
      base: the server's parameters on the island's first device, as the island last took them.
      step_metrics: the metrics of each step since the last push.
    """

    def __init__(self, opt: ShardedOptimizer):
        self.opt = opt
        self.device = opt.mesh.devices.flat[0]
        self.state: TrainState | None = None
        self.base: PyTree = None
        self.step_metrics: list[StepMetrics] = []

    def leave(self) -> None:
        """Forget everything except compiled programs."""
        self.state = None
        self.base = None
        self.step_metrics = []

    def join(self, state: TrainState, params: PyTree) -> None:
        """Begin from a train state that has the server's parameters."""
        self.state, self.base, self.step_metrics = state, jax.device_put(params, self.device), []

    def step(self, batches: Sequence[PyTree]) -> None:
        """Take a local step on each batch."""
        for batch in batches:
            assert self.state is not None
            self.state, metrics = self.opt.step.with_kinds(self.state, batch)
            self.step_metrics.append(metrics)

    def take(self, params: PyTree) -> None:
        """Take the server's parameters."""
        assert self.state is not None
        self.base = jax.device_put(params, self.device)
        placed = jax.tree.map(
            lambda leaf, own: put(leaf, own.sharding), trained(params), trained(self.state.params)
        )
        # copied, since the next step takes over the memory of its parameters
        own_params = replace_trained(self.state.params, copy_params(placed))
        self.state = self.state._replace(params=own_params)

    def take_push(self) -> tuple[PyTree, PyTree, list[StepMetrics]]:
        """Return the trained parameters as they were taken and as they are now, and the metrics
        since the last push.

        Raises:
          ValueError: if leaves that are not trained have changed: they are not pushed, so each
            island would have others.
        """
        assert self.state is not None
        # To one device: the island's parameters may be sharded, and a push is whole.
        end, step_metrics = jax.device_put((self.state.params, self.step_metrics), self.device)
        frozen = self.opt.config.layout.frozen
        pairs = zip(leaves_with_paths(self.base), jax.tree.leaves(end), strict=True)
        changed = [
            path
            for (path, old), new in pairs
            if (matches(frozen, path) or not is_inexact(old)) and not jnp.array_equal(old, new)
        ]
        if changed:
            problem = "loss_fn returns so.losses.Updated, for which islands have no common value."
            fix = "train such leaves with ddp, zero, fsdp or diloco."
            raise ValueError(format_error("async_local_sgd", problem, changed, fix))
        self.step_metrics = []
        return trained(self.base), trained(end), step_metrics


@jax.jit
def copy_params(params: PyTree) -> PyTree:
    """Return a copy of parameters."""
    return jax.tree.map(jnp.copy, params)


@dataclass(frozen=True)
class Islands:
    """The work of islands: in each round each takes its steps and pushes the change.

    Attributes:
      islands: the islands in this process, by number.
      first_state: `first_state(worker, params, clock)`, the train state of an island that joins.
      streams: the data.
      compressors: the encoders of pushes.
    """

    islands: Mapping[int, Island]
    first_state: Callable[[int, PyTree, int], TrainState]
    streams: Streams
    compressors: WorkerCompressors

    def compute(self) -> WorkerCompute:
        """Return the work as a run takes it."""
        return WorkerCompute(self.begin, self.streams.next_batch, self.update, self.device)

    @property
    def device(self) -> Any:
        """The device of the server: the first device of the first island."""
        return next(iter(self.islands.values())).device

    def begin(self, worker: int, position: int) -> None:
        """Let an island join or resume, with its data only: it has no optimizer state."""
        self.streams.begin(worker, position)
        self.compressors.begin(worker)
        self.islands[worker].leave()

    def update(self, worker: int, params: PyTree, batches: Sequence[PyTree], clock: int) -> Update:
        """Take the steps of a round, and return the change of the parameters."""
        island = self.islands[worker]
        if island.state is None:
            island.join(self.first_state(worker, params, clock), params)
        else:
            island.take(params)
        island.step(batches)
        update = _change(*island.take_push())._replace(rows=1)
        update = self.compressors.encode(worker, update)
        return jax.block_until_ready(to_device(update, self.device))


@jax.jit
def _change(start: PyTree, end: PyTree, step_metrics: list[StepMetrics]) -> Update:
    """Return the update from the parameters at the start and at the end of a round."""
    metrics = {name: _over_steps([step[name] for step in step_metrics]) for name in step_metrics[0]}
    loss = metrics.pop("loss")
    assert isinstance(loss, Weighted)
    # start - end: the sign of a gradient, so that the server's optimizer steps towards the end.
    update = Update(jax.tree.map(jnp.subtract, start, end), loss, metrics, None)
    return update._replace(is_finite=finiteness(update))


def _over_steps(values: Sequence[jax.Array | Metric]) -> Metric:
    """Return a metric over several steps: combined as its kind (`Weighted`, `Sum`, `Max`, `Min`),
    else the mean.
    """
    metrics = [value for value in values if isinstance(value, Metric)]
    if metrics:
        return reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), metrics)
    mean = jnp.stack(
        [jnp.asarray(value, wide_dtype(jnp.asarray(value).dtype)) for value in values]
    ).mean(0)
    return Weighted(mean, jnp.ones((), mean.dtype))
