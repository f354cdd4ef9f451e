"""The loss of local rows, in the per-device view: gathers on the way, a random key of its own for every piece."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardopt.collectives import LITTLE, gather
from shardopt.core.block_model import BLOCKS, as_block_model, call, run_blocks, takes_rng
from shardopt.core.types import PyTree
from shardopt.mesh import data_axes
from shardopt.partition import LeafPlan
from shardopt.strategies.gathered_block import gathered_block
from shardopt.strategies.layout import Layout
from shardopt.strategies.loss import LossParts, loss_parts
from shardopt.strategies.recipe import Recipe

_GATHERED = "shardopt_gathered"
"""The `checkpoint_name` of weights gathered for the moment."""


def num_pieces(recipe: Recipe) -> int:
    """Return into how many pieces the global batch is cut: devices along the data axes times micro-batches."""
    return math.prod(recipe.mesh.shape[axis] for axis in recipe.axes) * recipe.micro_batches


def cut(batch: PyTree, count: int) -> tuple[PyTree, Any]:
    """Return the local rows as micro-batches [count, rows, ...], and their numbers."""
    cut = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    return cut, jnp.arange(count, dtype=jnp.int32)


def step_key(recipe: Recipe, step: Any, rng: Any, micro_batch: Any) -> Any:
    """A key of its own for each step, device along the data axes, and micro-batch."""
    if not takes_rng(recipe.loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    key = jax.random.fold_in(key, jax.lax.axis_index(data_axes(recipe.mesh)))
    return jax.random.fold_in(key, micro_batch)


def whole_loss(recipe: Recipe, layout: Layout, params: PyTree, batch: PyTree, key: Any) -> LossParts:
    """Return the local loss; parameters that are split, or cast to travel, are gathered on the way."""
    plans = layout.treedef.unflatten(layout.plans)
    model, rows = as_block_model(recipe.loss_fn), jax.tree.leaves(batch)[0].shape[0]
    gathers = recipe.placement.params or recipe.gather_dtype is not None
    if model is not None:
        hooks = {}
        if gathers:
            outer_plans = {name: value for name, value in plans.items() if name != BLOCKS}
            hooks["gather_outer"] = lambda outer: gather_leaves(recipe, outer, outer_plans)
            gather_one = lambda block: gather_leaves(recipe, block, plans[BLOCKS], of_block=True)  # noqa: E731
            hooks["run_block"] = gathered_block(recipe.who, model, gather_one)
        return loss_parts(recipe.who, run_blocks(model, params, batch, key, **hooks), rows)
    if not gathers:
        return loss_parts(recipe.who, call(recipe.loss_fn, key, 0, params, batch), rows)

    def gathered_loss(params, batch):
        whole = gather_leaves(recipe, params, plans, joined=0)  # or all would be whole at the same time
        return loss_parts(recipe.who, call(recipe.loss_fn, key, 0, whole, batch), rows)

    if recipe.micro_batches > 1:
        # Or the compiler sees that every micro-batch gathers the same, and keeps the whole model through the loop.
        params, batch = _tied_together((params, batch))
    # The backward pass gathers again what it needs rather than keeping every whole weight from the forward pass.
    return jax.checkpoint(gathered_loss, policy=_save_all_but_gathers)(params, batch)


def gather_leaves(
    recipe: Recipe, tree: PyTree, plans: PyTree, *, of_block: bool = False, joined: int = LITTLE
) -> PyTree:
    """Make the leaves of a tree whole over data, each cast to what travels; one block of them if `of_block`."""
    leaves, treedef = jax.tree.flatten(tree)
    flat: list[LeafPlan] = treedef.flatten_up_to(plans)
    if of_block:
        flat = [plan.of_block() for plan in flat]
    # Only what is trained: running statistics would stop moving in half precision.
    cast = [plan.trainable and jnp.issubdtype(plan.dtype, jnp.floating) for plan in flat]
    dtypes = [recipe.gather_dtype if one else None for one in cast]
    where = [plan.dim for plan in flat], [plan.tensor for plan in flat]
    whole = gather(leaves, *where, axis="data", dtypes=dtypes, joined=joined)
    return treedef.unflatten([checkpoint_name(leaf, _GATHERED) for leaf in whole])


def _save_all_but_gathers(primitive: Any, *_: Any, **params: Any) -> bool:
    """Say, as a `jax.checkpoint` policy, that the backward pass recomputes weight gathers and nothing else.

    Every step from the gather (of bits, in half precision) to its named result is refused: one that was saved
    would keep the whole weight, and make recomputing the rest free.
    """
    return primitive.name not in ("all_gather", "bitcast_convert_type") and params.get("name") != _GATHERED


def _tied_together(tree: PyTree) -> PyTree:
    """Return the tree behind one barrier, so that nothing computed from a part of it moves ahead of the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    plain = [i for i, leaf in enumerate(leaves) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    for i, leaf in zip(plain, jax.lax.optimization_barrier([leaves[i] for i in plain]), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)
