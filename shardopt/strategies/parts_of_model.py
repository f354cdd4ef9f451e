"""A `BlockModel` as what a pipeline runs: functions of lists of arrays and of the number of a micro-batch."""

from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.block_model import BLOCKS, as_block_model, call
from shardopt.core.types import PyTree
from shardopt.pipeline.passes import floating
from shardopt.pipeline.run import Parts
from shardopt.strategies.gathered_block import leaves_like
from shardopt.strategies.layout import Layout
from shardopt.strategies.local_loss import cut, gather_leaves, num_pieces, step_key
from shardopt.strategies.loss import loss_parts
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.reduction import scatter


def block_and_outer(layout: Layout) -> tuple[list[int], list[int]]:
    """Return which leaves belong to blocks, and which are outer."""
    blocks = [i for i, plan in enumerate(layout.plans) if plan.stacked]
    return blocks, [i for i, plan in enumerate(layout.plans) if not plan.stacked]


def parts_of_model(recipe: Recipe, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any) -> Parts:
    """Write the model as functions of lists and micro-batch numbers.

    The outer parameters are gathered here, once for all micro-batches; their gradients are those of the whole.
    """
    model, split = as_block_model(recipe.loss_fn), recipe.placement
    assert model is not None
    gathers = split.params or recipe.gather_dtype is not None
    blocks, outer_indices = block_and_outer(layout)
    plans = layout.treedef.unflatten(layout.plans)
    block_treedef, num_blocks = jax.tree.structure(plans[BLOCKS]), layout.plans[blocks[0]].shape[0]
    micro_batches, _ = cut(batch, recipe.micro_batches)
    rows, pieces = jax.tree.leaves(micro_batches)[0].shape[1], num_pieces(recipe)

    whole = [params[i] for i in outer_indices]
    trained = [place for place, i in enumerate(outer_indices) if layout.plans[i].trainable]
    if gathers:
        whole = gather_leaves(recipe, whole, [layout.plans[i] for i in outer_indices])

    def outer_with(leaves):
        new, all_leaves = list(whole), [None] * len(layout.plans)
        for place, leaf in zip(trained, leaves, strict=True):
            new[place] = leaf
        for i, leaf in zip(outer_indices, new, strict=True):
            all_leaves[i] = leaf
        return {name: value for name, value in layout.treedef.unflatten(all_leaves).items() if name != BLOCKS}

    def rows_of(m):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False), micro_batches)

    def key_of(m):
        return None if rng is None else step_key(recipe, step, rng, m)

    def embed_tree(leaves, m):
        return call(model.embed, key_of(m), num_blocks, outer_with(leaves), rows_of(m))

    trained_outer = [whole[place] for place in trained]
    x_shapes, x_treedef = jax.tree.flatten(jax.eval_shape(embed_tree, trained_outer, jnp.int32(0)))
    moving = floating(x_shapes)

    def loss_of(leaves, m, x):
        returned = call(model.loss, key_of(m), num_blocks + 1, outer_with(leaves), x_treedef.unflatten(x), rows_of(m))
        return loss_parts(recipe.who, returned, rows)

    def embed_grads(m, dx):
        def floats(leaves):
            x = jax.tree.leaves(embed_tree(leaves, m))
            return [x[i] for i in moving]

        return jax.vjp(floats, trained_outer)[1](dx)[0]

    def loss_grads(m, x):
        def total(leaves, floats):
            inputs = list(x)
            for i, leaf in zip(moving, floats, strict=True):
                inputs[i] = leaf
            parts = loss_of(leaves, m, inputs)
            return parts.loss.total / pieces, parts

        (grads, dx), parts = jax.grad(total, argnums=(0, 1), has_aux=True)(trained_outer, [x[i] for i in moving])
        return dx, grads, parts

    def block(given, x):
        *leaves, number, m = given
        weights = block_treedef.unflatten(leaves)
        if gathers:
            weights = gather_leaves(recipe, weights, plans[BLOCKS], of_block=True)

        def run(weights, x):
            return call(model.block, key_of(m), number, weights, x)

        if model.remat not in (None, "full"):
            run = jax.checkpoint(run, policy=model.remat)
        return leaves_like(recipe.who, x_shapes, x_treedef, run(weights, x_treedef.unflatten(x)))

    def reduce(dw):
        if not split.grads or split.params:
            return dw
        return scatter(dw, [layout.plans[i].of_block() for i in blocks if layout.plans[i].trainable])

    return Parts(
        embed=lambda m: jax.tree.leaves(embed_tree(trained_outer, m)),
        embed_grads=embed_grads,
        loss=lambda m, x: loss_of(trained_outer, m, x),
        loss_grads=loss_grads,
        block=block,
        trained=[place for place, i in enumerate(blocks) if layout.plans[i].trainable],
        reduce=reduce,
        remat_blocks=model.remat == "full",
    )
