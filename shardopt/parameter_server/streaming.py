"""Islands that push and pull one fragment at a time, and continue to train while it travels (Streaming DiLoCo)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import Metric, PyTree, TrainState
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.local_updates.build import check_delay_and_mix
from shardopt.parameter_server.fragments import Fragment, FragmentPlan
from shardopt.parameter_server.ray_groups import gather_to_local_device

StepMetrics = dict[str, jax.Array | Metric]


class Streaming(NamedTuple):
    """The schedule by which an island sends and takes fragments.

    Attributes:
      fragments: the assignment of parameters to fragments.
      delay: steps between a push and the use of its answer.
      mix: the share of its own parameters that an island keeps.
    """

    fragments: FragmentPlan
    delay: int
    mix: float

    def header(self) -> dict[str, object]:
        """Return the settings that the log records."""
        return {"fragments": self.fragments.num_fragments, "delay": self.delay, "mix": self.mix}


def check_streaming(caller: str, local_steps: Sequence[int], fragments: int, delay: int, mix: float) -> None:
    """Refuse arguments that cannot be combined.

    Raises:
      TypeError: if a count is not an integer, or the mix not a number.
      ValueError: if a number is out of range, fragments do not divide the local steps, or the delay is too long.
    """
    check_count(caller, "fragments", fragments, minimum=1)
    check_count(caller, "delay", delay, minimum=0)
    if indivisible := sorted({steps for steps in local_steps if steps % fragments}):
        steps = indivisible[0]
        problem = f"local_steps={steps} is not divisible by fragments={fragments}, remainder {steps % fragments}."
        raise ValueError(format_error(caller, problem, fix=f"use local_steps={(steps // fragments + 1) * fragments}."))
    check_delay_and_mix(caller, delay, mix, min(local_steps) // fragments, every="local_steps", verb="push")


class Island:
    """The train state of an island, and its copy of the server's parameters.

    Attributes:
      opt: the strategy of the island.
      state: the train state; None if the island has not joined.
      base: the server's parameters on the island's first device, each fragment as the island last took it.
      step_metrics: the metrics of each step since the last push.
    """

    def __init__(self, opt: ShardedOptimizer, streaming: Streaming, first_device: Any):
        self.opt, self._streaming, self._first_device = opt, streaming, first_device
        self.state: TrainState | None = None
        self.base: PyTree = None
        self.step_metrics: list[StepMetrics] = []
        self._take = jax.jit(streaming.fragments.take, static_argnums=1)
        self._put = jax.jit(streaming.fragments.put, static_argnums=1)
        self._mix: Callable[..., PyTree] | None = None

    def leave(self) -> None:
        """Forget everything except compiled programs."""
        self.state, self.base, self.step_metrics = None, None, []

    def join(self, state: TrainState, params: PyTree) -> None:
        """Begin from a train state that has the server's parameters."""
        self.state, self.base, self.step_metrics = state, jax.device_put(params, self._first_device), []
        if self._mix is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            self._mix = jax.jit(partial(_mixed, self._streaming), static_argnums=1, out_shardings=shardings)

    def step(self, batches: Sequence[PyTree]) -> None:
        """Take a local step on each batch."""
        for batch in batches:
            assert self.state is not None
            self.state, metrics = self.opt.step.with_kinds(self.state, batch)
            self.step_metrics.append(metrics)

    def merge(self, number: int, params: PyTree) -> None:
        """Mix a fragment of the server's parameters into the island's; `params` is this fragment, or all parameters."""
        assert self.state is not None
        assert self._mix is not None
        fragment = params.tree if isinstance(params, Fragment) else self._take(params, number)
        self.base = self._put(self.base, number, jax.device_put(fragment, self._first_device))
        replicated = jax.tree.map(lambda leaf: _replicated(leaf, self.opt), fragment)
        self.state = self.state._replace(params=self._mix(self.state.params, number, replicated))

    def take_push(self, number: int) -> tuple[PyTree, PyTree, list[StepMetrics]]:
        """Return the fragment as it was taken, the fragment as it is now, and the metrics since the last push.

        Each fragment comes as a pair, with the leaves that belong to no fragment.
        """
        assert self.state is not None
        frozen = self._streaming.fragments.untrained
        end = self._take(self.state.params, number), frozen(self.state.params)
        end, step_metrics = jax.device_put(gather_to_local_device((end, self.step_metrics)), self._first_device)
        self.step_metrics = []
        return (self._take(self.base, number), frozen(self.base)), end, step_metrics


def _mixed(streaming: Streaming, island_params: PyTree, number: int, server_fragment: PyTree) -> PyTree:
    fragments, mix = streaming.fragments, streaming.mix
    if mix:
        island_fragment = fragments.take(island_params, number)
        server_fragment = jax.tree.map(
            lambda server_leaf, island_leaf: ((1 - mix) * server_leaf + mix * island_leaf).astype(island_leaf.dtype),
            server_fragment,
            island_fragment,
        )
    return fragments.put(island_params, number, server_fragment)


def _replicated(leaf: jax.Array | np.ndarray, opt: ShardedOptimizer) -> jax.Array:
    """Return a leaf on all devices of an island, even if they belong to several processes."""
    sharding = jax.NamedSharding(opt.mesh, jax.P())
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
