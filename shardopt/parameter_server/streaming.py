"""Islands that push and pull one fragment at a time, and go on while it travels (Streaming DiLoCo)."""

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
from shardopt.parameter_server.fragments import Fragments, Part
from shardopt.parameter_server.ray_groups import on_this_process

StepMetrics = dict[str, jax.Array | Metric]


class Streaming(NamedTuple):
    """When fragments are sent and taken.

    Attributes:
      fragments: how parameters are dealt out.
      delay: steps between a push and the use of its answer.
      mix: the share of its own parameters that an island keeps.
    """

    fragments: Fragments
    delay: int
    mix: float

    def header(self) -> dict[str, object]:
        """Return what the log keeps of it."""
        return {"fragments": self.fragments.num_fragments, "delay": self.delay, "mix": self.mix}


def check_streaming(who: str, local_steps: Sequence[int], fragments: int, delay: int, mix: float) -> None:
    """Refuse what does not go together.

    Raises:
      TypeError: if a count is not an integer, or the mix not a number.
      ValueError: if a number is out of range, fragments do not divide the local steps, or the delay is too long.
    """
    check_count(who, "fragments", fragments, least=1)
    check_count(who, "delay", delay, least=0)
    if odd := sorted({steps for steps in local_steps if steps % fragments}):
        what = f"local_steps={odd[0]} is not divisible by fragments={fragments}, remainder {odd[0] % fragments}."
        raise ValueError(format_error(who, what, fix=f"use local_steps={(odd[0] // fragments + 1) * fragments}."))
    check_delay_and_mix(who, delay, mix, min(local_steps) // fragments, every="local_steps", verb="push")


class Island:
    """The train state of an island, and the server's parameters as it has them.

    Attributes:
      opt: its strategy.
      state: its train state; None where it has not joined.
      base: the server's parameters on the island's first device, each fragment as it was last taken.
      found: the metrics of the steps since the last push.
    """

    def __init__(self, opt: ShardedOptimizer, streaming: Streaming, first: Any):
        self.opt, self._streaming, self._first = opt, streaming, first
        self.state: TrainState | None = None
        self.base: PyTree = None
        self.found: list[StepMetrics] = []
        self._take = jax.jit(streaming.fragments.take, static_argnums=1)
        self._put = jax.jit(streaming.fragments.put, static_argnums=1)
        self._mix: Callable[..., PyTree] | None = None

    def leave(self) -> None:
        """Forget all but compiled programs."""
        self.state, self.base, self.found = None, None, []

    def join(self, state: TrainState, params: PyTree) -> None:
        """Begin from a train state, of the server's parameters."""
        self.state, self.base, self.found = state, jax.device_put(params, self._first), []
        if self._mix is None:
            where = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            self._mix = jax.jit(partial(_mixed, self._streaming), static_argnums=1, out_shardings=where)

    def step(self, batches: Sequence[PyTree]) -> None:
        """Take steps."""
        for batch in batches:
            assert self.state is not None
            self.state, metrics = self.opt.step.with_kinds(self.state, batch)
            self.found.append(metrics)

    def merge(self, number: int, params: PyTree) -> None:
        """Take a fragment of the server's parameters, given it or all."""
        assert self.state is not None
        assert self._mix is not None
        part = params.tree if isinstance(params, Part) else self._take(params, number)
        self.base = self._put(self.base, number, jax.device_put(part, self._first))
        everywhere = jax.tree.map(lambda leaf: _replicated(leaf, self.opt), part)
        self.state = self.state._replace(params=self._mix(self.state.params, number, everywhere))

    def ends(self, number: int) -> tuple[PyTree, PyTree, list[StepMetrics]]:
        """Return what a push is made of: a fragment as it was taken, and as it is now, and the metrics since the last.

        Beside the fragment are the leaves that belong to none.
        """
        assert self.state is not None
        frozen = self._streaming.fragments.untrained
        end = self._take(self.state.params, number), frozen(self.state.params)
        end, found = jax.device_put(on_this_process((end, self.found)), self._first)
        self.found = []
        return (self._take(self.base, number), frozen(self.base)), end, found


def _mixed(streaming: Streaming, own: PyTree, number: int, new: PyTree) -> PyTree:
    fragments, mix = streaming.fragments, streaming.mix
    if mix:
        mine = fragments.take(own, number)
        new = jax.tree.map(lambda new, own: ((1 - mix) * new + mix * own).astype(own.dtype), new, mine)
    return fragments.put(own, number, new)


def _replicated(leaf: jax.Array | np.ndarray, opt: ShardedOptimizer) -> jax.Array:
    """Return a leaf on all devices of an island, also where these belong to several processes."""
    where = jax.NamedSharding(opt.mesh, jax.P())
    if jax.process_count() == 1:
        return jax.device_put(leaf, where)
    rows = np.asarray(leaf)
    return jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])
