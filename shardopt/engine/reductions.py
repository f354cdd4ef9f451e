"""Sums of the per-device view: each gradient once over each axis that the table says, and the loss over all."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives import BUCKET_BYTES, all_reduce, reduce_scatter
from shardopt.core.types import Metric, wide_dtype
from shardopt.engine.axes import AxisTable
from shardopt.engine.config import StrategyConfig
from shardopt.engine.loss import LossParts
from shardopt.engine.metrics import adds_up, combined
from shardopt.partition import LeafPlan


def reduce_scatter_grads(
    config: StrategyConfig, grads: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> list[jax.Array]:
    """Sum gradients over data, each device keeping its shard; those of leaves that stay replicated are left local."""
    where = [plan.dim for plan in plans], [plan.tensor for plan in plans]
    dtypes, axes = [config.wire_dtype(plan.dtype) for plan in plans], [plan.axes for plan in plans]
    return reduce_scatter(grads, *where, axes=axes, dtypes=dtypes, bucket_bytes=BUCKET_BYTES)


def all_reduce_grads(
    grads: Sequence[jax.Array], plans: Sequence[LeafPlan], over: Sequence[tuple[str, ...]]
) -> list[jax.Array]:
    """Sum each gradient over the axes given for it, those of the same axes together."""
    reduced = list(grads)
    for axes in dict.fromkeys(over):
        chosen = [i for i, one in enumerate(over) if one == axes]
        sums = all_reduce([grads[i] for i in chosen], axes, [plans[i].tensor for i in chosen])
        for i, total in zip(chosen, sums, strict=True):
            reduced[i] = total
    return reduced


def scale(grad: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `grad * factor`, computed in fp32 at least."""
    wide = wide_dtype(grad.dtype)
    return (grad.astype(wide) * factor.astype(jnp.finfo(wide).dtype)).astype(grad.dtype)


def sum_parts(parts: LossParts, axes: AxisTable) -> LossParts:
    """Add parts up, over stacked micro-batches and over devices; updates take the mean, integers the maximum.

    In a pipeline they are zeros but on the last block's stage, so a sum over pipeline hands them to all.
    """

    def update(value: jax.Array) -> jax.Array:
        if axes.stages:
            (value,) = all_reduce([value.astype(jnp.int32) if value.dtype == bool else value], axes.stages)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return jax.lax.pmax(value.max(0), axes.summed)
        wide = value.astype(wide_dtype(value.dtype)).mean(0)
        return (all_reduce([wide], axes.summed)[0] / jax.lax.axis_size(axes.summed)).astype(value.dtype)

    added = {name: one for name, one in parts.metrics.items() if adds_up(one)}
    sums, treedef = jax.tree.flatten((parts.loss, added))
    loss, added = treedef.unflatten(all_reduce([jnp.sum(x, 0) for x in sums], (*axes.summed, *axes.stages)))

    def extreme(metric: Metric) -> Metric:
        """Only the last stage has it: the sum over stages, then the largest or smallest over the others."""
        metric = jax.tree.map(lambda x: all_reduce([x], axes.stages)[0], metric)
        largest, smallest = (
            lambda x: jax.lax.pmax(x.max(0), axes.summed),
            lambda x: jax.lax.pmin(x.min(0), axes.summed),
        )
        return combined(metric, largest, largest, smallest)

    metrics = {name: added[name] if name in added else extreme(one) for name, one in parts.metrics.items()}
    return LossParts(loss, metrics, {path: update(value) for path, value in parts.updates.items()})
