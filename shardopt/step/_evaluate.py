"""The loss of a batch of any number of rows, as totals and weights that add up over batches."""

import math
from collections.abc import Iterator

import numpy as np
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.core import PyTree, TrainState, abstract
from shardopt.core._loss_parts import LossParts
from shardopt.core._trace_context import RowContext
from shardopt.losses._batch_dims import map_rows, num_rows, resized, row_counts, row_dims
from shardopt.losses._obstacle import as_gathered
from shardopt.losses._rows import with_rows
from shardopt.losses._separable import Cut, LossCall, Mixing, find_mean, find_mixing
from shardopt.losses._view import Views
from shardopt.mesh import on_mesh
from shardopt.step._cache import LayoutCache
from shardopt.step._compile import AotCompiled, make_program
from shardopt.step._global_rows import rows_of
from shardopt.step._inputs import check_rows, check_state, check_values, place_batch


class Totals:
    """`totals(state, batch)`: the loss and metrics of a batch of any number of rows, as totals and
    weights.

    Args:
      config: of the optimizer; its `of_evaluation` is run.

    Let P be the number of devices along the axes of rows times micro_batches. The largest number of
    rows that P divides is cut into P pieces, as in a step. The remaining rows, fewer than P, become
    pieces of one row each. The other pieces are copies of the last row and count nothing. So for a
    loss that is a (weighted) mean over rows, totals and weights are exactly the totals and weights
    of the rows.

    In the global view a batch runs at once, so any loss is exact. If devices do not divide the
    batch, each device runs all of it. In this view a batch whose leaves do not agree on a number of
    rows, such as a graph, counts as one row.
    """

    def __init__(self, config: StrategyConfig):
        self._config = config.of_evaluation
        self.rows = rows_of(self._config, "evaluation")
        self._pieces = self._config.num_row_pieces
        # without micro-batches in whose place there are tiles
        self._group = self._pieces // (self._config.loss.tile_rows or 1)
        self._views = Views(self._config, training=False)
        self._layouts = LayoutCache(self._config, lambda _, layout: layout)
        problem = "of a batch that the devices do not divide the loss sees a part at a time"
        fix = f"use batches of a multiple of {self._pieces} rows, or view='global'"
        loss_of_parts = with_rows(
            RowContext((), 1, refused=(problem, fix)), self._config.loss.loss_fn
        )
        per_device_config, global_config = (
            self._config.replace(view=view) for view in ("per_device", "global")
        )
        self._programs = LayoutCache(per_device_config, compile_totals)
        self._uneven_programs = LayoutCache(
            per_device_config.replace(loss_fn=loss_of_parts), compile_totals
        )
        self._global_programs = LayoutCache(global_config, compile_totals)

    def __call__(self, state: TrainState, batch: PyTree) -> Iterator[LossParts]:
        """Yield parts that add up to the loss of a batch that `rows` joined.

        A plain value has its number of rows as weight.
        """
        check_state(self._config, state)
        check_values(self._config, batch)
        size = check_rows(self._config, batch)
        if size == 0:
            return
        if self._views.of(self._layouts.of(state.params), batch) == "global":
            uneven = size is not None and size % self._config.axes.num_row_shares != 0
            placed = place_batch(self._config, batch, everywhere=uneven)
            yield self._global_programs.of(state.params)(state.params, placed, None)
            return
        assert size is not None  # without a number of rows only the global view is possible
        count, piece_rows = self._config.pieces_of(size)
        even_rows = count * piece_rows
        program = (self._programs if even_rows == size else self._uneven_programs).of(state.params)
        if even_rows:
            yield self._run(program, state, batch, slice(0, even_rows, piece_rows))
        if even_rows < size:
            yield self._run(program, state, batch, slice(even_rows, size, 1))

    def mixing(self, state: TrainState, batch: PyTree) -> Mixing | None:
        """Return why the loss is not proved to be a (weighted) mean over rows, so that batches may
        not add up to the loss of a set; None if it is.
        """
        config = self._config
        layout = self._layouts.of(state.params)
        batch = abstract(batch)
        if config.loss.separable:
            return None
        loss_call = LossCall(config.strategy, None, training=False)
        home = config.home
        loss_and_params = config.loss.loss_fn, as_gathered(config, layout)
        if len(row_counts(config, batch)) != 1:
            return on_mesh(home.auto, find_mean, home.axes)(*loss_and_params, batch, loss_call)
        if config.num_pieces > 1 and self._views.of(layout, batch) == "per_device":
            return None
        cut = Cut(2, row_dims(config, batch))
        two_batches = resized(config, batch, rows=2 * num_rows(config, batch))
        prove = on_mesh(home.auto, find_mixing, home.axes)
        return prove(*loss_and_params, two_batches, cut, loss_call)

    def _run(
        self, program: AotCompiled, state: TrainState, batch: PyTree, pieces: slice
    ) -> LossParts:
        """Return the parts of pieces, `slice(first row, end, rows of a piece)`."""
        starts = np.arange(pieces.start, pieces.stop, pieces.step)
        # The last 3 of 7 rows on 4 devices, in pieces of 1 row and a group of 4 pieces:
        # rows      4 5 6 6    the last row fills the group, so that every device has a piece
        # counted   1 1 1 0    and does not count
        whole_groups = math.ceil(starts.size / self._group) * self._group
        counted = np.arange(whole_groups) < starts.size
        rows = pieces.start + np.arange(counted.size * pieces.step)
        if pieces.start or rows.size != num_rows(self._config, batch):
            batch = self._select_rows(batch, np.minimum(rows, pieces.stop - 1))
        # they are about the leaves of the batch
        counted_config = self._config.replace(batch_dims=())
        return program(
            state.params, place_batch(self._config, batch), place_batch(counted_config, counted)
        )

    def _select_rows(self, batch: PyTree, rows: slice | np.ndarray) -> PyTree:
        return map_rows(self._config, lambda leaf, dim: leaf[(slice(None),) * dim + (rows,)], batch)


def compile_totals(config: StrategyConfig, layout: Layout) -> AotCompiled:
    """Return `(params, batch, counted) -> LossParts`: the sum over the pieces that `counted`
    selects, in the view of the config.
    """
    totals = config.differentiate.totals(config, layout)
    param_shardings = shardings(config.mesh, layout.specs.params)
    replicated = config.home.shardings(PartitionSpec())
    return make_program(config, totals, (param_shardings, None, None), replicated)
