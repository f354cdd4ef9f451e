"""The loss of a batch of any number of rows as totals and weights, which add up over batches."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.collectives import per_device
from shardopt.core.types import PyTree, TrainState
from shardopt.engine.compile import AotCompiled, check_no_deadlock
from shardopt.engine.config import StrategyConfig
from shardopt.engine.global_view import global_parts
from shardopt.engine.gradients import in_specs, micro_batch_losses
from shardopt.engine.inputs import batch_sharding, check_rows, check_state, place_batch
from shardopt.engine.layout import Layout, shardings
from shardopt.engine.loss import LossParts
from shardopt.engine.pipelined import pipelined_losses
from shardopt.engine.reductions import sum_parts
from shardopt.engine.step import LayoutCache
from shardopt.mesh import on_mesh


class Totals:
    """`totals(state, batch)`: the loss and metrics of a batch of any number of rows, as totals and weights.

    With P = devices along the rows' axes * micro_batches, the first rows, as many as P divides, are cut into P pieces as
    in a step. The others, fewer than P, become pieces of one row each, and the pieces that are left over have a copy of
    the last row, and count nothing. So for a loss that is a (weighted) mean over rows, totals and weights are exactly
    those of the rows.

    In the global view a batch runs at once, so that any loss is exact; where devices do not divide it, each runs all of it.

    Args:
      config: of the optimizer; `of_evaluation` of it is run.
    """

    def __init__(self, config: StrategyConfig):
        self._config = config.of_evaluation
        self._pieces = self._config.num_pieces
        compile_for = compile_totals if self._config.view == "per_device" else compile_global_totals
        self._programs = LayoutCache(self._config, compile_for)

    def __call__(self, state: TrainState, batch: PyTree) -> Iterator[LossParts]:
        """Run what adds up to the batch: a plain value has its number of rows as weight."""
        check_state(self._config, state)
        size, pieces = check_rows(self._config, batch), self._pieces
        program, even = self._programs.of(state.params), size // pieces * pieces
        if self._config.view == "global" and size:
            everywhere = NamedSharding(self._config.mesh, PartitionSpec())
            where = batch_sharding(self._config) if size % self._config.axes.num_shares == 0 else everywhere
            yield program(state.params, place_batch(batch, where))
            return
        if even:
            yield self._run(program, state, batch if even == size else _rows(batch, slice(even)), pieces)
        if even < size:
            rows = np.minimum(np.arange(even, even + pieces), size - 1)
            yield self._run(program, state, _rows(batch, rows), size - even)

    def _run(self, program: AotCompiled, state: TrainState, batch: PyTree, valid: int) -> LossParts:
        counted = np.arange(self._pieces) < valid
        return program(state.params, *place_batch((batch, counted), batch_sharding(self._config)))


def compile_totals(config: StrategyConfig, layout: Layout) -> AotCompiled:
    """Return `(params, batch, counted) -> LossParts` over the pieces of a batch that are counted, a bool each."""
    losses = micro_batch_losses if config.schedule is None else pipelined_losses
    rows = PartitionSpec(config.axes.rows)

    def local(params, batch, step, rng, counted):
        parts = losses(config, layout, params, batch, step, rng)
        size = jax.tree.leaves(batch)[0].shape[0] // config.micro_batches

        def total(one):
            mask = counted.reshape(counted.shape + (1,) * (one.ndim - 1))
            return jnp.where(mask, one * size, 0)  # they are per row

        loss, metrics = jax.tree.map(total, (parts.loss, parts.metrics))
        return sum_parts(LossParts(loss, metrics, {}), config.axes)

    run = per_device(local, config.mesh, in_specs=(*in_specs(config, layout), rows), out_specs=PartitionSpec())

    def totals(params, batch, counted):
        return run(layout.treedef.flatten_up_to(params), batch, None, None, counted)

    on_params, on_rows = shardings(config.mesh, layout.specs.params), batch_sharding(config)
    everywhere = NamedSharding(config.mesh, PartitionSpec())
    jitted = jax.jit(on_mesh(config.mesh, totals), in_shardings=(on_params, on_rows, on_rows), out_shardings=everywhere)
    return check_no_deadlock(config, jitted)


def compile_global_totals(config: StrategyConfig, layout: Layout) -> AotCompiled:
    """Return `(params, batch) -> LossParts` of the whole batch."""
    parts_of = global_parts(config, layout)

    def totals(params, batch):
        parts, size = parts_of(params, batch), jax.tree.leaves(batch)[0].shape[0]
        loss, metrics = jax.tree.map(lambda one: one * size, (parts.loss, parts.metrics))  # they are per row
        return LossParts(loss, metrics, {})

    on_params = shardings(config.mesh, layout.specs.params)
    everywhere = NamedSharding(config.mesh, PartitionSpec())
    return AotCompiled(jax.jit(on_mesh(config.mesh, totals), in_shardings=(on_params, None), out_shardings=everywhere))


def _rows(batch: PyTree, rows: slice | np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[rows], batch)
