"""Gradients of micro-batches that go through a pipeline, each device running the blocks of its stage."""

from typing import Any

from shardopt.core.types import PyTree
from shardopt.pipeline import Schedule
from shardopt.pipeline.executor import execute, forward_only
from shardopt.pipeline.reorder import to_model, to_schedule
from shardopt.strategies.layout import Layout
from shardopt.strategies.loss import LossParts
from shardopt.strategies.parts_of_model import block_and_outer, parts_of_model
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.reduction import scatter


def pipelined_gradients(
    recipe: Recipe, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any
) -> tuple[list[Any], LossParts]:
    """Return what `micro_batch_gradients` returns: of the blocks of this stage, and of the ends that it holds.

    Outer parameters are gathered once a step, and their gradients scattered once; those of blocks are gathered and
    scattered where they are used, as without a pipeline.
    """
    schedule, split = _schedule(recipe), recipe.placement
    blocks, outer = block_and_outer(layout)
    trained_blocks = [i for i in blocks if layout.plans[i].trainable]
    trained_outer = [i for i in outer if layout.plans[i].trainable]
    parts = parts_of_model(recipe, layout, params, batch, step, rng)
    sums = execute(
        schedule,
        parts,
        to_schedule(schedule, [params[i] for i in blocks], [layout.plans[i].tensor for i in blocks]),
        remat=recipe.remat,
        block_specs=[layout.plans[i].tensor for i in trained_blocks],
        outer_specs=[layout.plans[i].tensor for i in trained_outer],
    )
    grads = {i: grad.astype(layout.plans[i].dtype) for i, grad in zip(trained_blocks, sums.blocks, strict=True)}
    outer_grads = [g.astype(layout.plans[i].dtype) for i, g in zip(trained_outer, sums.outer, strict=True)]
    if split.grads:
        outer_grads = scatter(outer_grads, [layout.plans[i] for i in trained_outer])
    grads |= dict(zip(trained_outer, outer_grads, strict=True))
    return [grads[i] for i in sorted(grads)], sums.parts


def stored_order(recipe: Recipe, layout: Layout, grads: list[Any]) -> list[Any]:
    """Return gradients, reduced, in the order in which blocks are stored: the model's."""
    plans = [plan for plan in layout.plans if plan.trainable]
    blocks = [i for i, plan in enumerate(plans) if plan.stacked]
    result = list(grads)
    moved = to_model(_schedule(recipe), [grads[i] for i in blocks], [plans[i].tensor for i in blocks])
    for i, grad in zip(blocks, moved, strict=True):
        result[i] = grad
    return result


def pipelined_losses(
    recipe: Recipe, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any
) -> LossParts:
    """Return what `micro_batch_losses` returns; zeros but on the stage of the last block."""
    blocks, _ = block_and_outer(layout)
    parts = parts_of_model(recipe, layout, params, batch, step, rng)
    weights = to_schedule(_schedule(recipe), [params[i] for i in blocks], [layout.plans[i].tensor for i in blocks])
    return forward_only(_schedule(recipe), parts, weights)


def _schedule(recipe: Recipe) -> Schedule:
    assert recipe.schedule is not None
    return recipe.schedule
