"""The per-device view: gather, differentiate each micro-batch, reduce once."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardopt.collectives import gather, per_device, scatter_sum, sum_over
from shardopt.core.block_model import (
    BLOCKS,
    GATHERED,
    as_block_model,
    call,
    run_blocks,
    save_all_but_gathers,
    takes_rng,
)
from shardopt.core.types import PyTree, wide_dtype
from shardopt.mesh import data_axes
from shardopt.partition import LeafPlan
from shardopt.strategies.layout import Layout
from shardopt.strategies.loss import LossParts, loss_parts
from shardopt.strategies.recipe import Recipe


class Differentiated(NamedTuple):
    """What one global batch gives: the gradient (None for frozen leaves) and loss of the union batch."""

    grads: PyTree
    loss: Any
    metrics: dict[str, Any]
    updates: dict[str, Any]


def make_gradients(recipe: Recipe, layout: Layout) -> Callable[..., Differentiated]:
    """Return `gradients(params, batch, step, rng) -> Differentiated`, to be called in the global view.

    With T_i, W_i the total and weight of the loss on device and micro-batch i (a plain mean has W_i = 1), the
    gradient is that of sum_i T_i / sum_i W_i. What is differentiated and summed is T_i / n, with n the number of
    pieces, and the sum is multiplied by n / sum_i W_i at the end, in fp32 at least: half-precision gradients then
    are of the size of the mean's all the way, and no weight is rounded to half precision.
    """
    trained = [i for i, plan in enumerate(layout.plans) if plan.trainable]
    plans = [layout.plans[i] for i in trained]
    split = recipe.placement
    pieces = math.prod(recipe.mesh.shape[axis] for axis in data_axes(recipe.mesh)) * recipe.micro_batches

    def local(params, batch, step, rng):
        def total(train_leaves, micro_batch, key):
            parts = whole_loss(recipe, layout, layout.merge(params, train_leaves), micro_batch, key)
            return parts.loss.total / pieces, parts

        def one_micro_batch(micro_batch, index):
            key = _step_key(recipe, step, rng, index)
            grads, parts = jax.grad(total, has_aux=True)([params[i] for i in trained], micro_batch, key)
            if split.grads and not split.params:
                grads = _scatter(grads, plans)
            return grads, parts

        grads, parts = _accumulate(one_micro_batch, batch, recipe.micro_batches, plans)
        if split.opt_state and not split.grads:
            grads = _scatter(grads, plans)
        parts = _sum_parts(parts, data_axes(recipe.mesh))
        grads = _reduce(grads, plans, data_axes(recipe.mesh), split=split.opt_state)
        return [_scale(grad, pieces / parts.loss.weight) for grad in grads], parts

    whole = PartitionSpec()
    run = per_device(
        local,
        recipe.mesh,
        in_specs=(_data_specs(layout, split=split.params), batch_spec(recipe), whole, whole),
        out_specs=([plan.data_spec(split=split.opt_state) for plan in plans], whole),
    )

    def gradients(params, batch, step, rng):
        grads, parts = run(layout.treedef.flatten_up_to(params), batch, step, rng)
        return Differentiated(layout.merge([None] * len(layout.plans), grads), *finish(parts))

    return gradients


def make_loss(recipe: Recipe, layout: Layout) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return `loss(params, batch, step=None, rng=None) -> (loss, metrics)` of the union batch.

    With a step and rng it is the very function that `make_gradients` differentiates, with the same keys and
    micro-batches; without them the loss gets no key.
    """

    def local(params, batch, step, rng):
        params = layout.treedef.unflatten(params)

        @jax.checkpoint  # a line search differentiates this: one micro-batch at a time then, too
        def one_micro_batch(micro_batch, index):
            key = None if rng is None else _step_key(recipe, step, rng, index)
            return whole_loss(recipe, layout, params, micro_batch, key)

        def body(_, micro_batch_and_index):
            return None, one_micro_batch(*micro_batch_and_index)

        if recipe.micro_batches == 1:
            parts = jax.tree.map(lambda x: x[None], one_micro_batch(batch, jnp.int32(0)))
        else:
            _, parts = jax.lax.scan(body, None, _cut(batch, recipe.micro_batches))
        return _sum_parts(parts, data_axes(recipe.mesh))

    whole = PartitionSpec()
    in_specs = (_data_specs(layout, split=recipe.placement.params), batch_spec(recipe), whole, whole)
    run = per_device(local, recipe.mesh, in_specs=in_specs, out_specs=whole)

    def loss(params, batch, step=None, rng=None):
        return finish(run(layout.treedef.flatten_up_to(params), batch, step, rng))[:2]

    return loss


def batch_spec(recipe: Recipe) -> PartitionSpec:
    """Return the spec of every batch leaf: its first dim over replica and data."""
    return PartitionSpec(data_axes(recipe.mesh))


def whole_loss(recipe: Recipe, layout: Layout, params: PyTree, batch: PyTree, key: Any) -> LossParts:
    """Return the local loss; parameters that are split, or cast to travel, are gathered on the way."""
    plans = layout.treedef.unflatten(layout.plans)
    model, rows = as_block_model(recipe.loss_fn), jax.tree.leaves(batch)[0].shape[0]
    gathers = recipe.placement.params or recipe.gather_dtype is not None
    if model is not None:
        hooks = {}
        if gathers:
            outer_plans = {name: value for name, value in plans.items() if name != BLOCKS}
            hooks["gather_outer"] = lambda outer: _gather(recipe, outer, outer_plans)
            hooks["gather_block"] = lambda block: _gather(recipe, block, plans[BLOCKS], of_block=True)
        return loss_parts(recipe.who, run_blocks(model, params, batch, key, **hooks), rows)
    if not gathers:
        return loss_parts(recipe.who, call(recipe.loss_fn, key, 0, params, batch), rows)

    def gathered_loss(params, batch):
        whole = _gather(recipe, params, plans)
        return loss_parts(recipe.who, call(recipe.loss_fn, key, 0, whole, batch), rows)

    if recipe.micro_batches > 1:
        # Or the compiler sees that every micro-batch gathers the same, and keeps the whole model through the loop.
        params, batch = _tied_together((params, batch))
    # The backward pass gathers again what it needs rather than keeping every whole weight from the forward pass.
    return jax.checkpoint(gathered_loss, policy=save_all_but_gathers)(params, batch)


def finish(parts: LossParts) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Divide totals by weights: (loss, metrics, updates)."""
    divide = lambda one: one.total / one.weight  # noqa: E731
    return divide(parts.loss), {name: divide(one) for name, one in parts.metrics.items()}, parts.updates


def _gather(recipe: Recipe, tree: PyTree, plans: PyTree, *, of_block: bool = False) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    flat: list[LeafPlan] = treedef.flatten_up_to(plans)
    if of_block:
        flat = [plan.of_block() for plan in flat]
    # Only what is trained: running statistics would stop moving in half precision.
    cast = [plan.trainable and jnp.issubdtype(plan.dtype, jnp.floating) for plan in flat]
    dtypes = [recipe.gather_dtype if one else None for one in cast]
    whole = gather(leaves, [plan.dim for plan in flat], [plan.tensor for plan in flat], axis="data", dtypes=dtypes)
    return treedef.unflatten([checkpoint_name(leaf, GATHERED) for leaf in whole])


def _tied_together(tree: PyTree) -> PyTree:
    """Return the tree behind one barrier, so that nothing computed from a part of it moves ahead of the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    plain = [i for i, leaf in enumerate(leaves) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    for i, leaf in zip(plain, jax.lax.optimization_barrier([leaves[i] for i in plain]), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def _scale(grad: Any, factor: Any) -> Any:
    wide = wide_dtype(grad.dtype)
    return (grad.astype(wide) * factor.astype(jnp.finfo(wide).dtype)).astype(grad.dtype)


def _cut(batch: PyTree, count: int) -> tuple[PyTree, Any]:
    """Return the local rows as micro-batches [count, rows, ...], and their numbers."""
    cut = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    return cut, jnp.arange(count, dtype=jnp.int32)


def _scatter(grads: Sequence[Any], plans: Sequence[LeafPlan]) -> list[Any]:
    return scatter_sum(grads, [plan.dim for plan in plans], [plan.tensor for plan in plans], axis="data")


def _reduce(grads: Sequence[Any], plans: Sequence[LeafPlan], axes: tuple[str, ...], *, split: bool) -> list[Any]:
    """Finish the sum: over every data axis, less those that a reduce-scatter has already summed."""
    reduced = list(grads)
    scattered = [i for i, plan in enumerate(plans) if split and plan.dim is not None]
    local = sorted(set(range(len(plans))) - set(scattered))
    for chosen, over in ((scattered, [axis for axis in axes if axis != "data"]), (local, axes)):
        sums = sum_over([grads[i] for i in chosen], over, [plans[i].tensor for i in chosen])
        for i, total in zip(chosen, sums, strict=True):
            reduced[i] = total
    return reduced


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

    micro_batches = _cut(batch, count)
    shapes, _ = jax.eval_shape(one_micro_batch, *jax.tree.map(lambda x: x[0], micro_batches))
    zeros = keep([jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in shapes])
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    return [total.astype(one.dtype) for total, one in zip(sums, shapes, strict=True)], parts


def _sum_parts(parts: LossParts, axes: tuple[str, ...]) -> LossParts:
    """Add parts up, over stacked micro-batches and over devices; updates take the mean, integers the maximum."""

    def update(value):
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return jax.lax.pmax(value.max(0), axes)
        wide = value.astype(wide_dtype(value.dtype)).mean(0)
        return (sum_over([wide], axes)[0] / jax.lax.axis_size(axes)).astype(value.dtype)

    sums, treedef = jax.tree.flatten((parts.loss, parts.metrics))
    loss, metrics = treedef.unflatten(sum_over([x.sum(0) for x in sums], axes))
    return LossParts(loss, metrics, {path: update(value) for path, value in parts.updates.items()})


def _step_key(recipe: Recipe, step: Any, rng: Any, micro_batch: Any) -> Any:
    """A key of its own for each step, device along the data axes, and micro-batch."""
    if not takes_rng(recipe.loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    key = jax.random.fold_in(key, jax.lax.axis_index(data_axes(recipe.mesh)))
    return jax.random.fold_in(key, micro_batch)


def _data_specs(layout: Layout, *, split: bool) -> list[PartitionSpec]:
    return [plan.data_spec(split=split) for plan in layout.plans]
