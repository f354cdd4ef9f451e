"""The blocks of a stage, as they are stored and as they are run.

Blocks that do not divide into equal stages are the harder case: a stage stores a slice of every
block, and runs whole blocks.

JAX cannot cut an array into unequal parts over a mesh axis. So a stack of such blocks, [L, ...], is
sharded over pipeline on an inner dim, or not at all. One all-to-all a step brings each stage its
whole blocks, and another one returns gradients.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives import shard_by_shard
from shardopt.core import Arrays
from shardopt.partition import LeafPlan
from shardopt.partition._counts import Counts, is_even
from shardopt.pipeline import _messages as messages
from shardopt.pipeline._cut import stage_rows
from shardopt.pipeline._messages import PIPELINE
from shardopt.pipeline._schedule import Schedule


def to_schedule(
    schedule: Schedule, counts: Counts, leaves: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> Arrays:
    """Bring to each stage the blocks that it runs: [L, ..., d / S, ...] -> [chunks * k, ..., d,
    ...], with k the largest count.

    A chunk with fewer than k blocks is padded with block 0, which nobody runs.
    """
    if is_even(counts):
        return messages.to_schedule(schedule, leaves, [plan.tensor for plan in plans])
    # A leaf [L, d] whose stack no axis can cut, on two stages that run 1 and 3 blocks (k = 3):
    #
    # stored    every stage: all 4 blocks, half of d
    # take      rows [S, k]: stage 0 runs 0 - -, stage 1 runs 1 2 3; each device picks both
    # exchange  stage 0 gets its row, d whole
    rows = jnp.asarray(stage_rows(schedule, counts)[0])
    stage_blocks = rows[jax.lax.axis_index(PIPELINE)]
    selected = [
        jnp.take(x, stage_blocks if plan.spread is None else rows.reshape(-1), axis=0)
        for x, plan in zip(leaves, plans, strict=True)
    ]

    def redistribute(x: jax.Array, dim: int | None) -> jax.Array:
        return x if dim is None else jax.lax.all_to_all(x, PIPELINE, 0, dim, tiled=True)

    return _redistribute_each(redistribute, selected, plans)


def to_model(
    schedule: Schedule, counts: Counts, leaves: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> Arrays:
    """Bring blocks, or their gradients, back to the stages that store them: the inverse of
    `to_schedule`.
    """
    if is_even(counts):
        return messages.to_model(schedule, leaves, [plan.tensor for plan in plans])

    def redistribute(x: jax.Array, dim: int | None) -> jax.Array:
        if dim is None:
            return jax.lax.all_gather(x, PIPELINE, tiled=True)
        return jax.lax.all_to_all(x, PIPELINE, dim, 0, tiled=True)

    # Padding is dropped here: no block of the model has its place.
    places = jnp.asarray(stage_rows(schedule, counts)[1])
    return [jnp.take(x, places, axis=0) for x in _redistribute_each(redistribute, leaves, plans)]


def _redistribute_each(
    redistribute: Callable[[jax.Array, int | None], jax.Array],
    leaves: Sequence[jax.Array],
    plans: Sequence[LeafPlan],
) -> Arrays:
    def redistribute_all(xs: Arrays) -> Arrays:
        return [redistribute(x, plan.spread) for x, plan in zip(xs, plans, strict=True)]

    return shard_by_shard(redistribute_all, leaves, [plan.tensor for plan in plans])
