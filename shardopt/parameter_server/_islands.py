"""Islands that push the change of their parameters: all of it, or one fragment at a time (Streaming
DiLoCo).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core._arguments import check_count
from shardopt.core._errors import error_text, format_error
from shardopt.core._types import Metric, PyTree, TrainState, Weighted, wide_dtype
from shardopt.local_updates._build import check_delay_and_mix
from shardopt.losses._metrics import combined
from shardopt.parameter_server._fragments import (
    FragmentPlan,
    FragmentTree,
    put_fragment,
    take_fragment,
)
from shardopt.parameter_server._run import WorkerCompute
from shardopt.parameter_server._updates import Update, finiteness
from shardopt.parameter_server._worker import Streams, WorkerCompressors, to_device
from shardopt.step._inputs import put
from shardopt.step._optimizer import ShardedOptimizer

StepMetrics = dict[str, jax.Array | Metric]


class Streaming(NamedTuple):
    """The schedule by which an island sends and takes fragments.

    By default all parameters are one push.

    Attributes:
      fragments: the assignment of parameters to fragments.
      delay: steps between a push and the use of its answer.
      mix: the share of its own parameters that an island keeps.
      is_streaming: whether pushes and pulls are fragments, and the island trains while they travel.
    """

    fragments: FragmentPlan = FragmentPlan(1, stacked=False, frozen=())
    delay: int = 0
    mix: float = 0.0
    is_streaming: bool = True

    def header(self) -> dict[str, object]:
        """Return the settings that the log records."""
        settings = {"fragments": self.fragments.num_fragments, "delay": self.delay, "mix": self.mix}
        return settings if self.is_streaming else {}


def check_streaming(local_steps: Sequence[int], fragments: int, delay: int, mix: float) -> None:
    """Refuse arguments that cannot be combined.

    Raises:
      TypeError: if a count is not an integer, or the mix not a number.
      ValueError: if a number is out of range, fragments do not divide the local steps, or the delay
        is too long.
    """
    check_count("fragments", fragments, minimum=1)
    check_count("delay", delay, minimum=0)
    if indivisible := sorted({steps for steps in local_steps if steps % fragments}):
        steps = indivisible[0]
        problem = (
            f"local_steps={steps} is not divisible by fragments={fragments}, remainder"
            f" {steps % fragments}."
        )
        raise ValueError(
            error_text(problem, fix=f"use local_steps={(steps // fragments + 1) * fragments}.")
        )
    check_delay_and_mix(delay, mix, min(local_steps) // fragments, every="local_steps", verb="push")


class Island:
    """The train state of an island, and its copy of the server's parameters.

    Attributes:
      opt: the strategy of the island.
      device: the island's first device that belongs to this process.
      state: the train state; None if the island has not joined.
      base: the server's parameters on the island's first device, each fragment as the island last
        took it.
      step_metrics: the metrics of each step since the last push.
    """

    def __init__(self, opt: ShardedOptimizer, streaming: Streaming):
        self.opt, self._streaming, self.device = opt, streaming, first_local_device(opt)
        self.state: TrainState | None = None
        self.base: PyTree = None
        self.step_metrics: list[StepMetrics] = []
        self._mix: Callable[..., PyTree] | None = None

    def leave(self) -> None:
        """Forget everything except compiled programs."""
        self.state, self.base, self.step_metrics = None, None, []

    def join(self, state: TrainState, params: PyTree) -> None:
        """Begin from a train state that has the server's parameters."""
        self.state, self.base, self.step_metrics = state, jax.device_put(params, self.device), []
        if self._mix is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            self._mix = jax.jit(
                partial(_mixed, self._streaming),
                static_argnums=1,
                donate_argnums=0,
                out_shardings=shardings,
            )

    def step(self, batches: Sequence[PyTree]) -> None:
        """Take a local step on each batch."""
        for batch in batches:
            assert self.state is not None
            self.state, metrics = self.opt.step.with_kinds(self.state, batch)
            self.step_metrics.append(metrics)

    def merge(self, number: int, params: PyTree) -> None:
        """Mix a fragment of the server's parameters into the island's.

        `params` is this fragment, or all parameters.
        """
        assert self.state is not None
        assert self._mix is not None
        plan = self._streaming.fragments
        fragment = (
            params.tree if isinstance(params, FragmentTree) else take_fragment(plan, params, number)
        )
        self.base = put_fragment(plan, self.base, number, jax.device_put(fragment, self.device))
        leaves, treedef = jax.tree.flatten(self.state.params)
        placed = map(self._placed, treedef.flatten_up_to(fragment), leaves)
        self.state = self.state._replace(
            params=self._mix(self.state.params, number, treedef.unflatten(placed))
        )

    def take_push(self, number: int) -> tuple[PyTree, PyTree, list[StepMetrics]]:
        """Return the fragment as it was taken, the fragment as it is now, and the metrics since the
        last push.

        Raises:
          ValueError: if leaves that are not trained have changed: they are not pushed, so each
            island would have others.
        """
        assert self.state is not None
        plan = self._streaming.fragments
        frozen = FragmentPlan(
            1, stacked=False, frozen=tuple(self.opt.config.layout.frozen)
        ).untrained
        end = take_fragment(plan, self.state.params, number), frozen(self.state.params)
        (end, end_frozen), step_metrics = jax.device_put(
            gather_to_local_device((end, self.step_metrics)), self.device
        )
        if changed := [
            path
            for path, leaf in frozen(self.base).items()
            if not jnp.array_equal(leaf, end_frozen[path])
        ]:
            problem = "loss_fn returns so.losses.Updated, for which islands have no common value."
            fix = "train such leaves with ddp, zero, fsdp or diloco."
            raise ValueError(format_error("async_local_sgd", problem, changed, fix))
        self.step_metrics = []
        return take_fragment(plan, self.base, number), end, step_metrics

    def _placed(
        self, leaf: jax.Array | np.ndarray | None, island_leaf: jax.Array
    ) -> jax.Array | None:
        """Return a leaf placed like the island's.

        A slice of a stacked leaf on all devices of the island.
        """
        if leaf is None:
            return None
        sharding = (
            island_leaf.sharding
            if leaf.shape == island_leaf.shape
            else jax.NamedSharding(self.opt.mesh, jax.P())
        )
        return put(leaf, sharding)


@dataclass(frozen=True)
class Islands:
    """The work of islands: in round k each takes its steps and pushes fragment k mod P.

    Attributes:
      islands: the islands in this process, by number.
      streaming: the schedule of fragments.
      first_state: `first_state(worker, params, clock)`, the train state of an island that joins.
      streams: the data.
      compressors: the encoders of pushes.
    """

    islands: Mapping[int, Island]
    streaming: Streaming
    first_state: Callable[[int, PyTree, int], TrainState]
    streams: Streams
    compressors: WorkerCompressors

    def compute(self) -> WorkerCompute:
        """Return the work as a run takes it.

        A fragment travels while its island takes the next `delay` steps.
        """
        ahead = self.ahead if self.streaming.is_streaming else None
        return WorkerCompute(
            self.begin, self.streams.next_batch, self.update, self.on_server, ahead
        )

    def on_server(self, tree: PyTree) -> PyTree:
        """Return arrays on the device of the server, the first device of the first island."""
        return jax.device_put(tree, next(iter(self.islands.values())).device)

    def begin(self, worker: int, position: int) -> None:
        """Let an island join or resume, with its data only: it has no optimizer state."""
        self.streams.begin(worker, position)
        for number in range(self.streaming.fragments.num_fragments):
            self.compressors.begin((worker, number))
        self.islands[worker].leave()

    def ahead(self, worker: int, batches: Sequence[PyTree]) -> None:
        """Take the first steps of a round, while the previous push and its answer travel."""
        if self.islands[worker].state is not None:
            self.islands[worker].step(batches[: self.streaming.delay])

    def update(self, worker: int, params: PyTree, batches: Sequence[PyTree], clock: int) -> Update:
        """Take the steps of a round, and return the change of its fragment."""
        island, count = self.islands[worker], self.streaming.fragments.num_fragments
        if island.state is None:
            island.join(self.first_state(worker, params, clock), params)
        else:
            # A replay does not call `ahead`.
            island.step(batches[len(island.step_metrics) : self.streaming.delay])
            island.merge((clock - 1) % count, params)
        island.step(batches[len(island.step_metrics) :])
        update = _change(*island.take_push(clock % count))._replace(rows=1)
        update = self.compressors.encode((worker, clock % count), update)
        if self.streaming.is_streaming:
            update = update._replace(grads=FragmentTree(update.grads, clock % count))
        return jax.block_until_ready(to_device(update, next(iter(self.islands.values())).device))


def gather_to_local_device(tree: PyTree) -> PyTree:
    """Return arrays of a mesh over several processes as full arrays, each on a device of this
    process.
    """
    leaves = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if not leaves:
        return tree
    replicated = jax.NamedSharding(leaves[0].sharding.mesh, jax.P())  # pyright: ignore[reportAttributeAccessIssue]
    full_leaves = iter(jax.jit(lambda leaves: leaves, out_shardings=replicated)(leaves))

    def gather_leaf(leaf: Any) -> Any:
        remote = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return next(full_leaves).addressable_data(0) if remote else leaf

    return jax.tree.map(gather_leaf, tree)


def first_local_device(opt: ShardedOptimizer) -> Any:
    """Return the island's first device that belongs to this process."""
    return next(
        device for device in opt.mesh.devices.flat if device.process_index == jax.process_index()
    )


def _mixed(
    streaming: Streaming, island_params: PyTree, number: int, server_fragment: PyTree
) -> PyTree:
    fragments, mix = streaming.fragments, streaming.mix
    if mix:
        island_fragment = fragments.take(island_params, number)
        server_fragment = jax.tree.map(
            lambda server_leaf, island_leaf: ((1 - mix) * server_leaf + mix * island_leaf).astype(
                island_leaf.dtype
            ),
            server_fragment,
            island_fragment,
        )
    return fragments.put(island_params, number, server_fragment)


@jax.jit
def _change(start: PyTree, end: PyTree, step_metrics: list[StepMetrics]) -> Update:
    """Return the update from the parameters at the start and at the end of a round."""
    metrics = {name: _over_steps([step[name] for step in step_metrics]) for name in step_metrics[0]}
    loss = metrics.pop("loss")
    assert isinstance(loss, Weighted)
    update = Update(jax.tree.map(jnp.subtract, start, end), loss, metrics, None)
    return update._replace(is_finite=finiteness(update))


def _over_steps(values: Sequence[jax.Array | Metric]) -> Metric:
    """Return a metric over several steps: combined as its kind (`Weighted`, `Sum`, `Max`, `Min`),
    else the mean.
    """
    if metrics := [value for value in values if isinstance(value, Metric)]:
        return reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), metrics)
    mean = jnp.stack(
        [jnp.asarray(value, wide_dtype(jnp.asarray(value).dtype)) for value in values]
    ).mean(0)
    return Weighted(mean, jnp.ones((), mean.dtype))
