"""Reductions of the per-device view: each gradient once, over the axes whose devices hold a part of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.collectives import BUCKET_BYTES, all_reduce, reduce_scatter
from shardopt.core.types import wide_dtype
from shardopt.engine.loss import LossParts
from shardopt.partition import LeafPlan


def reduce_scatter_grads(grads: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    """Sum gradients over data, each device keeping its shard; those of leaves that stay whole are left local."""
    where = [plan.dim for plan in plans], [plan.tensor for plan in plans]
    return reduce_scatter(grads, *where, axis="data", joined=BUCKET_BYTES)


def all_reduce_grads(
    grads: Sequence[Any], plans: Sequence[LeafPlan], axes: tuple[str, ...], *, split: bool, pipelined: bool = False
) -> list[Any]:
    """Finish the sum: over every data axis, less those that a reduce-scatter has already summed.

    In a pipeline the outer parameters, which its two ends share, are summed over pipeline as well.
    """

    def over(plan):
        left = [axis for axis in axes if axis != "data" or not split or plan.dim is None]
        return (*left, "pipeline") if pipelined and not plan.stacked else tuple(left)

    reduced = list(grads)
    for group in dict.fromkeys(over(plan) for plan in plans):
        chosen = [i for i, plan in enumerate(plans) if over(plan) == group]
        sums = all_reduce([grads[i] for i in chosen], group, [plans[i].tensor for i in chosen])
        for i, total in zip(chosen, sums, strict=True):
            reduced[i] = total
    return reduced


def all_reduce_outer(grads: Sequence[Any], plans: Sequence[LeafPlan], *, pipelined: bool) -> list[Any]:
    """Sum over pipeline the gradients of the outer parameters, which the two ends of a pipeline share."""
    return all_reduce_grads(grads, plans, (), split=False, pipelined=pipelined)


def scale(grad: Any, factor: Any) -> Any:
    """Return `grad * factor`, computed in fp32 at least."""
    wide = wide_dtype(grad.dtype)
    return (grad.astype(wide) * factor.astype(jnp.finfo(wide).dtype)).astype(grad.dtype)


def sum_parts(parts: LossParts, axes: tuple[str, ...], *, pipelined: bool = False) -> LossParts:
    """Add parts up, over stacked micro-batches and over devices; updates take the mean, integers the maximum.

    In a pipeline they are zeros but on the last block's stage, so a sum over pipeline hands them to all.
    """
    everywhere = (*axes, "pipeline") if pipelined else axes

    def update(value):
        if pipelined:
            (value,) = all_reduce([value.astype(jnp.int32) if value.dtype == bool else value], ["pipeline"])
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return jax.lax.pmax(value.max(0), axes)
        wide = value.astype(wide_dtype(value.dtype)).mean(0)
        return (all_reduce([wide], axes)[0] / jax.lax.axis_size(axes)).astype(value.dtype)

    sums, treedef = jax.tree.flatten((parts.loss, parts.metrics))
    loss, metrics = treedef.unflatten(all_reduce([x.sum(0) for x in sums], everywhere))
    return LossParts(loss, metrics, {path: update(value) for path, value in parts.updates.items()})
