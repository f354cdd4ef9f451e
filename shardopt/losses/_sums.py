"""Sums of gradients and losses: over micro-batches in a scan, then over devices along the axes that
the axis table names.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives import BUCKET_BYTES, LeafWire, all_reduce, reduce_scatter
from shardopt.collectives._buckets import shards_of
from shardopt.config._axes import AxisTable
from shardopt.config._config import StrategyConfig, WireOptions
from shardopt.core import (
    Arrays,
    Metric,
    PyTree,
    cast,
    is_floating,
    is_inexact,
    is_key,
    replaced,
    wide_dtype,
    wide_zeros,
    widened,
)
from shardopt.core._loss_parts import LossParts
from shardopt.core._rounding import Rounding
from shardopt.losses._batch_dims import CutBatch, cut_batch
from shardopt.losses._metrics import adds_up, combined, extreme_over
from shardopt.partition import LeafPlan


def cut(config: StrategyConfig, batch: PyTree, count: int) -> CutBatch:
    """Return the rows [..., rows, ...] as micro-batches [count, ..., rows / count, ...], as
    `cut_batch` does.
    """
    # Arrays in the per-device view need no placement, so their key path is not used.
    return cut_batch(config, lambda x, _, dim: shards_of(x, dim, count), batch)


def numbers(count: int) -> jax.Array:
    """Return the indices of the micro-batches."""
    return jnp.arange(count, dtype=jnp.int32)


def accumulate(
    run_micro_batch: Callable[..., tuple[Arrays, LossParts]],
    batch: PyTree,
    count: int,
    constrain_sums: Callable[[Arrays], Arrays],
    sum_weights: Callable[[], Sequence[jax.Array]],
    cut: Callable[[PyTree, int], CutBatch],
) -> tuple[Arrays, LossParts]:
    """Sum gradients over micro-batches in a scan, in fp32 at least.

    Loss parts are stacked [count, ...].

    Args:
      run_micro_batch: takes a micro-batch and its number, and returns its gradients and loss parts.
      batch: the rows.
      count: the number of micro-batches.
      constrain_sums: constrains the shardings of the sums.
      sum_weights: returns the summed weights of a loss of several terms, which each micro-batch
        then gets. It evaluates the loss once more; the compiler removes all computations that the
        weights do not need.
      cut: cuts the rows.
    """
    # Without a loop nothing is summed. The parts get the first dim that the scan below stacks.
    if count == 1:
        grads, parts = run_micro_batch(batch, jnp.int32(0))
        return grads, jax.tree.map(lambda x: jnp.asarray(x)[None], parts)

    leaves, assemble = cut(batch, count)

    def run(leaves, index, *weights):
        return run_micro_batch(assemble(leaves), index, *weights)

    def body(sums, leaves_and_index):
        grads, parts = run(*leaves_and_index, *weights)
        return (
            constrain_sums(
                [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
            ),
            parts,
        )

    micro_batches = leaves, numbers(count)
    # The shapes of gradients: under ZeRO 2 they are shards, although the parameters are whole.
    grad_shapes, part_shapes = jax.eval_shape(run, *jax.tree.map(lambda x: x[0], micro_batches))
    # `body` reads `weights` when the scan below traces it, so it may be set after `body`. The sums
    # are the same for all micro-batches, so they are computed once outside of the loop.
    weights = [sum_weights()] if isinstance(part_shapes.loss.weight, tuple) else []
    # before the loop as well as in it: the carry of a scan keeps one sharding
    zeros = constrain_sums(wide_zeros(grad_shapes))
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    # in the dtype of one micro-batch, so that the reduction sends as many bytes as for one
    return [total.astype(grad.dtype) for total, grad in zip(sums, grad_shapes, strict=True)], parts


def parts_of_micro_batches(
    run_micro_batch: Callable[[PyTree, jax.Array], LossParts],
    batch: PyTree,
    count: int,
    cut: Callable[[PyTree, int], CutBatch],
) -> LossParts:
    """Return the loss parts of each micro-batch, [count, ...].

    The arguments are as for `accumulate`.
    """
    # A line search differentiates this function. It should hold one micro-batch at a time, too.
    run = jax.checkpoint(run_micro_batch)
    if count == 1:
        return jax.tree.map(lambda x: x[None], run(batch, jnp.int32(0)))
    leaves, assemble = cut(batch, count)

    def body(_, leaves_and_index):
        leaves, index = leaves_and_index
        return None, run(assemble(leaves), index)

    return jax.lax.scan(body, None, (leaves, numbers(count)))[1]


def reduce_scatter_grads(
    wire: WireOptions, grads: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> Arrays:
    """Sum gradients over data, each device keeping its shard.

    Gradients of leaves that stay replicated are not summed.
    """
    return reduce_scatter(
        grads, [leaf_wire(wire, plan) for plan in plans], bucket_bytes=BUCKET_BYTES
    )


def leaf_wire(wire: WireOptions, plan: LeafPlan, rounding: Rounding | None = None) -> LeafWire:
    """Return how a leaf and its gradient travel: the core's own filling of the slot `wire`.

    Only floating leaves are cast, and before a gather only trained ones. Running statistics would
    stop changing in half precision. A rounding needs a filling that knows it.
    """
    assert rounding is None
    scatter_dtype = wire.scatter_dtype if is_floating(plan) else None
    gather_dtype = wire.gather_dtype if plan.trainable and is_floating(plan) else None
    return LeafWire(plan.dim, plan.tensor, plan.axes, gather_dtype, scatter_dtype, plan.trainable)


def all_reduce_grads(
    grads: Sequence[jax.Array], plans: Sequence[LeafPlan], axes_of_grads: Sequence[tuple[str, ...]]
) -> Arrays:
    """Sum each gradient over its axes; gradients with the same axes are summed together."""
    reduced = list(grads)
    for axes in dict.fromkeys(axes_of_grads):
        indices = [i for i, grad_axes in enumerate(axes_of_grads) if grad_axes == axes]
        # One call for each set of axes. Leaves of one call may share a collective, see `_buckets`.
        sums = all_reduce([grads[i] for i in indices], axes, [plans[i].tensor for i in indices])
        reduced = replaced(reduced, indices, sums)
    return reduced


def scale(grad: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `grad * factor`, computed in fp32 at least."""
    wide = wide_dtype(grad.dtype)
    return cast(cast(grad, wide) * cast(factor, jnp.finfo(wide).dtype), grad.dtype)


def sum_parts(parts: LossParts, axes: AxisTable) -> LossParts:
    """Add parts up over stacked micro-batches and over devices.

    Updates take the mean, or the maximum if they are integers, or the first if they are random keys.

    In a pipeline the parts are zeros on all stages but the last block's, so a sum over pipeline
    gives them to all stages.
    """

    def combine_update(value: jax.Array) -> jax.Array:
        if is_key(value):
            return _first_key(value[0], axes)
        if axes.stages:
            # all stages but one have zeros
            summable = value.astype(jnp.int32) if value.dtype == bool else value
            (total,) = all_reduce([summable], axes.stages)
            value = total.astype(value.dtype)
        # Counters and flags: all devices count the same steps, so the maximum is the count.
        if not is_inexact(value):
            return jax.lax.pmax(value.max(0), axes.summed)
        # Running statistics: an unweighted mean of means, in fp32 so that bf16 does not round each
        # share.
        wide = widened(value).mean(0)
        return (all_reduce([wide], axes.summed)[0] / jax.lax.axis_size(axes.summed)).astype(
            value.dtype
        )

    summed_metrics = {name: metric for name, metric in parts.metrics.items() if adds_up(metric)}
    sums, treedef = jax.tree.flatten((parts.loss, summed_metrics))
    loss, summed_metrics = treedef.unflatten(
        all_reduce([jnp.sum(x, 0) for x in sums], (*axes.summed, *axes.stages))
    )

    def extreme(metric: Metric) -> Metric:
        """Sum over stages, since only the last stage has the metric.

        Then take the largest or smallest over the other axes.
        """
        metric = jax.tree.map(lambda x: all_reduce([x], axes.stages)[0], metric)

        def largest(x):
            return extreme_over(jax.lax.pmax, x.max(0), axes.summed)

        return combined(
            metric, largest, largest, lambda x: extreme_over(jax.lax.pmin, x.min(0), axes.summed)
        )

    metrics = {
        name: summed_metrics[name] if name in summed_metrics else extreme(metric)
        for name, metric in parts.metrics.items()
    }
    return LossParts(
        loss, metrics, {path: combine_update(value) for path, value in parts.updates.items()}
    )


def _first_key(key: jax.Array, axes: AxisTable) -> jax.Array:
    """Return the random key of the first device along the summed axes; keys have no mean."""
    numbers = jax.random.key_data(key)
    if axes.summed:
        is_first = jax.lax.axis_index(axes.summed) == 0
        (numbers,) = all_reduce([jnp.where(is_first, numbers, 0)], axes.summed)
    (numbers,) = all_reduce([numbers], axes.stages)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))
