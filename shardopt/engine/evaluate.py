"""The loss of a batch of any number of rows as totals and weights, which add up over batches."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.collectives import per_device
from shardopt.core.types import PyTree, TrainState
from shardopt.engine.batches import as_arrays, num_rows
from shardopt.engine.compile import AotCompiled, make_program
from shardopt.engine.config import StrategyConfig
from shardopt.engine.global_view import global_parts
from shardopt.engine.gradients import in_specs, micro_batch_losses
from shardopt.engine.inputs import check_rows, check_state, place_batch
from shardopt.engine.layout import Layout, shardings
from shardopt.engine.loss import LossParts
from shardopt.engine.metrics import neutral, of_rows
from shardopt.engine.pipelined import pipelined_losses
from shardopt.engine.reductions import sum_parts
from shardopt.engine.rows import RowContext, with_rows
from shardopt.engine.separable import SeparableOnce
from shardopt.engine.step import LayoutCache


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
        self._pieces = self._config.num_row_pieces
        self._check_separable = SeparableOnce(self._config, training=False)
        self._layouts = LayoutCache(self._config, lambda _, layout: layout)
        uneven = "of a batch that the devices do not divide the loss sees a part at a time"
        fix = f"use batches of a multiple of {self._pieces} rows, or view='global'"
        of_parts = with_rows(RowContext((), 1, refused=(uneven, fix)), self._config.loss_fn)
        compile_for = compile_totals if self._config.view == "per_device" else compile_global_totals
        self._programs = LayoutCache(self._config, compile_for)
        self._programs_of_parts = LayoutCache(self._config._replace(loss_fn=of_parts), compile_totals)

    def __call__(self, state: TrainState, batch: PyTree) -> Iterator[LossParts]:
        """Run what adds up to the batch: a plain value has its number of rows as weight."""
        check_state(self._config, state)
        batch = as_arrays(self._config.strategy, batch)
        with jax.check_tracer_leaks(False), jax.transfer_guard("allow"):  # as for a step
            self._check_separable(self._layouts.of(state.params), state.params, batch)
        size, pieces = check_rows(self._config, batch), self._pieces
        if self._config.view == "global" and size:
            placed = place_batch(self._config, batch, everywhere=size % self._config.axes.num_row_shares != 0)
            yield self._programs.of(state.params)(state.params, placed)
            return
        even = size // pieces * pieces
        program = (self._programs if even == size else self._programs_of_parts).of(state.params)
        if even:
            yield self._run(program, state, batch if even == size else _rows(batch, slice(even)), pieces)
        if even < size:
            rows = np.minimum(np.arange(even, even + pieces), size - 1)
            yield self._run(program, state, _rows(batch, rows), size - even)

    def _run(self, program: AotCompiled, state: TrainState, batch: PyTree, valid: int) -> LossParts:
        counted = np.arange(self._pieces) < valid
        return program(state.params, *(place_batch(self._config, one) for one in (batch, counted)))


def compile_totals(config: StrategyConfig, layout: Layout) -> AotCompiled:
    """Return `(params, batch, counted) -> LossParts` over the pieces of a batch that are counted, a bool each."""
    losses = micro_batch_losses if config.schedule is None else pipelined_losses

    def local(params, batch, step, rng, counted):
        parts = losses(config, layout, params, batch, step, rng)
        size = num_rows(batch) // config.micro_batches

        def of_counted(metric):
            metric = of_rows(metric, size)
            mask = lambda x: counted.reshape(counted.shape + (1,) * (x.ndim - 1))  # noqa: E731
            return jax.tree.map(lambda x, other: jnp.where(mask(x), x, other), metric, neutral(metric))

        metrics = {name: of_counted(one) for name, one in parts.metrics.items()}
        return sum_parts(LossParts(of_counted(parts.loss), metrics, {}), config.axes)

    def totals(params, batch, counted):
        specs = *in_specs(config, layout, batch), PartitionSpec(config.axes.rows)
        run = per_device(local, config.mesh, in_specs=specs, out_specs=PartitionSpec())
        return run(layout.treedef.flatten_up_to(params), batch, None, None, counted)

    on_params = shardings(config.mesh, layout.specs.params)
    everywhere = config.home.shardings(PartitionSpec())
    return make_program(config, totals, (on_params, None, None), everywhere)


def compile_global_totals(config: StrategyConfig, layout: Layout) -> AotCompiled:
    """Return `(params, batch) -> LossParts` of the whole batch."""
    parts_of = global_parts(config, layout)

    def totals(params, batch):
        parts, size = parts_of(params, batch), num_rows(batch)
        return LossParts(of_rows(parts.loss, size), {name: of_rows(x, size) for name, x in parts.metrics.items()}, {})

    on_params = shardings(config.mesh, layout.specs.params)
    everywhere = config.home.shardings(PartitionSpec())
    return make_program(config, totals, (on_params, None), everywhere)


def _rows(batch: PyTree, rows: slice | np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) else leaf, batch)
