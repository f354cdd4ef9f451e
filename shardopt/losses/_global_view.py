"""The global view of the loss: it sees the whole batch, as on one device, and the partitioner
places the collectives.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._slots import LossFunction, StepInputs
from shardopt.core import Arrays, PyTree, abstract, format_error
from shardopt.core._block_model import abstract_key
from shardopt.core._loss_parts import Gradients, LossParts
from shardopt.losses._batch_dims import FIX_ROWS, num_rows, row_counts, row_dims, shown_leaves
from shardopt.losses._constraints import cut_by_replica, cut_rows, moved, shard_grads
from shardopt.losses._loss import loss_of_rows, step_key
from shardopt.losses._metrics import factor, objective, of_rows, value_of
from shardopt.losses._obstacle import as_gathered
from shardopt.losses._per_row import row_numbers
from shardopt.losses._separable import Cut, LossCall, find_mixing
from shardopt.losses._sums import accumulate, parts_of_micro_batches, scale, sum_parts
from shardopt.mesh import on_mesh


class GlobalView:
    """The loss of the whole batch, for any loss; see `Differentiate`."""

    def gradients(self, config: StrategyConfig, layout: Layout) -> Callable[..., Gradients]:
        """Return the gradient of the loss of the whole batch.

        Parameters and gradients are placed as the placement says. In between, sharded leaves are
        gathered where they are used. If the loss may be cut into micro-batches, they are summed as
        in the per-device view. If each replica trains by itself, each computes the loss of its own
        rows.
        """

        def gradients(params, batch, step, rng, reducer_state=None):
            del reducer_state  # reducers need the per-device view
            inputs = StepInputs(layout.treedef.flatten_up_to(params), batch, step, rng)
            if not config.per_replica:
                return _GlobalBatch(config, layout, inputs, 0).gradients()
            (replica,) = config.axes.stacked
            leaves, assemble = cut_by_replica(config, batch)

            def replica_gradients(params, leaves, replica):
                inputs = StepInputs(params, assemble(leaves), step, rng)
                return _GlobalBatch(config, layout, inputs, replica).gradients()

            # Not a loop: all replicas compute at once, each on its own devices. With the name,
            # constraints inside split the stacked dim over the replicas; without it they would
            # leave this dim open.
            run = jax.vmap(replica_gradients, spmd_axis_name=replica)
            return run(inputs.params, leaves, jnp.arange(config.axes.sizes[replica]))

        return gradients

    def loss(self, config: StrategyConfig, layout: Layout) -> LossFunction:
        """Return the loss and metrics of the whole batch."""

        def loss(params, batch, step=None, rng=None):
            def key_of(index):
                return _key(config, StepInputs(params, batch, step, rng), index, count)

            count = num_micro_batches(config, layout, batch, training=rng is not None)
            parts = _parts(config, layout, params, batch, count, key_of)
            return _sum_micro_batches(config, parts).divided()

        return loss

    def totals(self, config: StrategyConfig, layout: Layout) -> Callable[..., LossParts]:
        """Return the loss and metrics of the whole batch, with totals and weights of all rows."""

        def totals(params, batch, counted=None):
            assert counted is None  # the whole batch counts
            count = num_micro_batches(config, layout, batch, training=False)
            parts = _parts(config, layout, params, batch, count, lambda index: None)
            parts = _sum_micro_batches(config, parts)
            # of each micro-batch, because totals and weights are per row
            rows = num_rows(config, batch) // count
            metrics = {name: of_rows(x, rows) for name, x in parts.metrics.items()}
            return LossParts(of_rows(parts.loss, rows), metrics, {})

        return totals


@dataclasses.dataclass(frozen=True, eq=False)
class _GlobalBatch:
    """The whole batch, or the batch of one replica, in one step."""

    config: StrategyConfig
    layout: Layout
    inputs: StepInputs
    replica: jax.Array | int

    def gradients(self) -> Gradients:
        config = self.config
        layout = self.layout
        count = self.count
        cut = functools.partial(cut_rows, config)
        grads, parts = accumulate(
            self.run, self.inputs.batch, count, self.shard, self.sum_weights, cut
        )
        parts = _sum_micro_batches(config, parts)
        if count > 1:
            grads = [scale(grad, factor(parts.loss, count)) for grad in grads]
        grads = layout.merge([None] * len(layout.plans), grads)
        return Gradients(grads, *parts.divided(), parts.updates)

    @functools.cached_property
    def count(self) -> int:
        """The number of micro-batches."""
        return num_micro_batches(self.config, self.layout, self.inputs.batch, training=True)

    def run(self, rows, index, weights=None):
        trained = self.layout.trained_leaves(self.inputs.params)
        grads, parts = jax.grad(self.objective, has_aux=True)(
            trained, rows, self.key(index), weights
        )
        return self.shard(grads), parts

    def objective(self, trained, rows, key, weights):
        params = self.layout.merge(self.inputs.params, trained)
        parts = _loss_of_rows(self.config, self.layout, params, rows, key)
        if self.count == 1:  # with the gradient of the weight, if it has one
            return value_of(parts.loss), parts
        if weights is None and isinstance(parts.loss.weight, tuple):  # only shapes are asked for
            weights = parts.loss.weight
        return objective(parts.loss, self.count, weights), parts

    def sum_weights(self) -> Arrays:
        tree = self.layout.treedef.unflatten(self.inputs.params)
        parts = _parts(self.config, self.layout, tree, self.inputs.batch, self.count, self.key)
        return [x.sum(0) for x in parts.loss.weight]

    def shard(self, grads: Arrays) -> Arrays:
        return shard_grads(self.config, grads, self.layout.trained)

    def key(self, index: jax.Array) -> jax.Array | None:
        return _key(self.config, self.inputs, index, self.count, self.replica)


def _key(
    config: StrategyConfig,
    inputs: StepInputs,
    index: jax.Array,
    count: int,
    replica: jax.Array | int = 0,
) -> jax.Array | None:
    """Return the random key of a micro-batch, or the keys of its rows."""

    def numbers():
        # A micro-batch is a part of the rows of each device, see `cut_rows`.
        blocks = config.axes.num_row_shares if count > 1 else 1
        rows = num_rows(config, inputs.batch) // (count * blocks)
        return row_numbers(replica * blocks + jnp.arange(blocks), index, count, rows)

    return step_key(config, inputs.step, inputs.rng, index, device=replica, row_numbers=numbers)


def _parts(
    config: StrategyConfig,
    layout: Layout,
    params: PyTree,
    batch: PyTree,
    count: int,
    key_of: Callable[..., PyTree],
) -> LossParts:
    """Return the parts of the loss of each micro-batch, [micro-batches, ...]."""

    def run_micro_batch(rows, index):
        return _loss_of_rows(config, layout, params, rows, key_of(index), differentiated=False)

    return parts_of_micro_batches(
        run_micro_batch, batch, count, functools.partial(cut_rows, config)
    )


def _loss_of_rows(
    config: StrategyConfig, layout: Layout, *args: PyTree, differentiated: bool = True
) -> LossParts:
    """Return the parts of the loss of a micro-batch.

    The loss may constrain shardings on the user's mesh. Arrays that the step computed are on ours,
    such as the random key, and jax refuses operations on arrays of both.
    """
    run = functools.partial(loss_of_rows, config, layout, differentiated=differentiated)
    if config.per_replica:
        return run(*args)
    home = config.home.auto
    parts = on_mesh(home, run, config.home.axes)(*moved(args, config.mesh, home))
    return moved(parts, home, config.mesh)


def num_micro_batches(
    config: StrategyConfig, layout: Layout, batch: PyTree, *, training: bool
) -> int:
    """Return the number of micro-batches.

    1, with a warning, unless the loss is proved to allow more.

    Args:
      config: of the step, or of evaluation.
      layout: of the parameters.
      batch: the whole batch.
      training: whether the loss gets a random key, if it takes one.
    """
    count = config.loss.micro_batches
    if count > 1 and len(row_counts(config, batch)) != 1:
        problem = (
            f"micro_batches={count}, but the whole batch runs at once: its leaves do not agree on a"
            " number of rows."
        )
        fix = f"use micro_batches=1, which is the same; or {FIX_ROWS}."
        warnings.warn(
            format_error(config.strategy, problem, shown_leaves(config, batch), fix), stacklevel=2
        )
        return 1
    if count == 1 or num_rows(config, batch) % config.num_row_pieces:
        return 1
    key = abstract_key(config.loss.loss_fn) if training else None
    # as `cut_rows`: a part of the rows of each device
    cut = Cut(count, row_dims(config, batch), blocks=config.axes.num_row_shares)
    loss_call = LossCall(config.strategy, key, training)
    mixing = on_mesh(config.home.auto, find_mixing, config.home.axes)(
        config.loss.loss_fn, as_gathered(config, layout), abstract(batch), cut, loss_call
    )
    if mixing is None:
        return count
    problem = (
        f"micro_batches={count}, but the whole batch runs at once: {mixing.result} is not shown to"
        f" be a (weighted) mean over rows: {mixing.reason}"
    )
    fix = (
        "use micro_batches=1, which is the same; so.per_row(a loss of one row), which needs no"
        " proof; or view='unproved' if you know that it is such a mean."
    )
    warnings.warn(format_error(config.strategy, problem, mixing.lines, fix), stacklevel=2)
    return 1


def _sum_micro_batches(config: StrategyConfig, parts: LossParts) -> LossParts:
    """Add parts up over stacked micro-batches; in this view there are no devices to sum over."""
    return sum_parts(parts, config.axes._replace(summed=(), stages=()))
