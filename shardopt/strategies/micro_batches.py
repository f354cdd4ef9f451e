"""Gradients of one micro-batch after another, in a scan."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, wide_dtype
from shardopt.partition import LeafPlan
from shardopt.strategies.layout import Layout
from shardopt.strategies.local_loss import cut, num_pieces, step_key, whole_loss
from shardopt.strategies.loss import LossParts
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.reduction import scatter


def micro_batch_gradients(
    recipe: Recipe, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any
) -> tuple[list[Any], LossParts]:
    """Return the local gradients of the trained leaves, summed over micro-batches, and parts [micro_batches, ...].

    Where the placement splits gradients they come reduce-scattered over data.
    """
    trained = [i for i, plan in enumerate(layout.plans) if plan.trainable]
    plans, pieces, split = [layout.plans[i] for i in trained], num_pieces(recipe), recipe.placement

    def total(train_leaves, micro_batch, key):
        parts = whole_loss(recipe, layout, layout.merge(params, train_leaves), micro_batch, key)
        return parts.loss.total / pieces, parts

    def one_micro_batch(micro_batch, index):
        key = step_key(recipe, step, rng, index)
        grads, parts = jax.grad(total, has_aux=True)([params[i] for i in trained], micro_batch, key)
        return scatter(grads, plans) if split.grads and not split.params else grads, parts

    return _accumulate(one_micro_batch, batch, recipe.micro_batches, plans)


def micro_batch_losses(
    recipe: Recipe, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any
) -> LossParts:
    """Return the parts of the local loss, [micro_batches, ...]; no keys if rng is None."""
    tree = layout.treedef.unflatten(params)

    @jax.checkpoint  # a line search differentiates this: one micro-batch at a time then, too
    def one_micro_batch(micro_batch, index):
        key = None if rng is None else step_key(recipe, step, rng, index)
        return whole_loss(recipe, layout, tree, micro_batch, key)

    def body(_, micro_batch_and_index):
        return None, one_micro_batch(*micro_batch_and_index)

    if recipe.micro_batches == 1:
        return jax.tree.map(lambda x: x[None], one_micro_batch(batch, jnp.int32(0)))
    return jax.lax.scan(body, None, cut(batch, recipe.micro_batches))[1]


def _accumulate(one_micro_batch: Callable[..., Any], batch: PyTree, count: int, plans: Sequence[LeafPlan]) -> Any:
    """Sum gradients over micro-batches in a scan, in fp32 at least; parts come stacked [count, ...]."""
    if count == 1:
        grads, parts = one_micro_batch(batch, jnp.int32(0))
        return grads, jax.tree.map(lambda x: x[None], parts)

    def body(sums, micro_batch_and_index):
        grads, parts = one_micro_batch(*micro_batch_and_index)
        return keep([total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]), parts

    # Left alone, the partitioner would keep the accumulators whole over tensor.
    def keep(sums):
        return [jax.lax.with_sharding_constraint(x, plan.tensor) for x, plan in zip(sums, plans, strict=True)]

    micro_batches = cut(batch, count)
    shapes, _ = jax.eval_shape(one_micro_batch, *jax.tree.map(lambda x: x[0], micro_batches))
    zeros = keep([jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in shapes])
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    return [total.astype(one.dtype) for total, one in zip(sums, shapes, strict=True)], parts
