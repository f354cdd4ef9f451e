"""Sums in the per-device view: each gradient over the axes that the axis table says, and the loss over all axes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives import BUCKET_BYTES, all_reduce, reduce_scatter
from shardopt.core._types import Metric, wide_dtype
from shardopt.engine._axes import AxisTable
from shardopt.engine._config import StrategyConfig
from shardopt.engine._loss import LossParts
from shardopt.engine._metrics import adds_up, combined
from shardopt.partition import LeafPlan


def reduce_scatter_grads(
    config: StrategyConfig, grads: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> list[jax.Array]:
    """Sum gradients over data, each device keeping its shard; gradients of leaves that stay replicated are not summed."""
    dims, tensor_specs = [plan.dim for plan in plans], [plan.tensor for plan in plans]
    dtypes, axes = [config.wire_dtype(plan.dtype) for plan in plans], [plan.axes for plan in plans]
    return reduce_scatter(grads, dims, tensor_specs, axes=axes, dtypes=dtypes, bucket_bytes=BUCKET_BYTES)


def all_reduce_grads(
    grads: Sequence[jax.Array], plans: Sequence[LeafPlan], axes_of_grads: Sequence[tuple[str, ...]]
) -> list[jax.Array]:
    """Sum each gradient over its axes; gradients with the same axes are summed together."""
    reduced = list(grads)
    for axes in dict.fromkeys(axes_of_grads):
        indices = [i for i, grad_axes in enumerate(axes_of_grads) if grad_axes == axes]
        sums = all_reduce([grads[i] for i in indices], axes, [plans[i].tensor for i in indices])
        for i, total in zip(indices, sums, strict=True):
            reduced[i] = total
    return reduced


def scale(grad: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `grad * factor`, computed in fp32 at least."""
    wide = wide_dtype(grad.dtype)
    return (grad.astype(wide) * factor.astype(jnp.finfo(wide).dtype)).astype(grad.dtype)


def sum_parts(parts: LossParts, axes: AxisTable) -> LossParts:
    """Add parts up over stacked micro-batches and over devices; updates take the mean, or the maximum if they are integers.

    In a pipeline the parts are zeros on all stages but the last block's, so a sum over pipeline gives them to all stages.
    """

    def combine_update(value: jax.Array) -> jax.Array:
        if axes.stages:
            (value,) = all_reduce([value.astype(jnp.int32) if value.dtype == bool else value], axes.stages)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return jax.lax.pmax(value.max(0), axes.summed)
        wide = value.astype(wide_dtype(value.dtype)).mean(0)
        return (all_reduce([wide], axes.summed)[0] / jax.lax.axis_size(axes.summed)).astype(value.dtype)

    summed_metrics = {name: metric for name, metric in parts.metrics.items() if adds_up(metric)}
    sums, treedef = jax.tree.flatten((parts.loss, summed_metrics))
    loss, summed_metrics = treedef.unflatten(all_reduce([jnp.sum(x, 0) for x in sums], (*axes.summed, *axes.stages)))

    def extreme(metric: Metric) -> Metric:
        """Sum over stages, since only the last stage has the metric; then take the largest or smallest over the other axes."""
        metric = jax.tree.map(lambda x: all_reduce([x], axes.stages)[0], metric)
        largest, smallest = (
            lambda x: jax.lax.pmax(x.max(0), axes.summed),
            lambda x: jax.lax.pmin(x.min(0), axes.summed),
        )
        return combined(metric, largest, largest, smallest)

    metrics = {
        name: summed_metrics[name] if name in summed_metrics else extreme(metric)
        for name, metric in parts.metrics.items()
    }
    return LossParts(loss, metrics, {path: combine_update(value) for path, value in parts.updates.items()})
