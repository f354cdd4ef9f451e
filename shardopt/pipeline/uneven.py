"""Blocks that do not divide into equal stages: stored by slices of every block, run as whole blocks where the schedule says.

An array cannot be cut into unequal parts over a mesh axis. So a stack of such blocks, [L, ...], is sharded over pipeline on
an inner dim, or on none, and one all-to-all a step brings each stage the whole of its own blocks; one brings gradients back.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.collectives import shard_by_shard
from shardopt.pipeline.cut import Counts, stage_rows
from shardopt.pipeline.messages import PIPELINE
from shardopt.pipeline.schedule import Schedule
from shardopt.remat.split_backward import Arrays

Dims = Sequence[int | None]
"""Which dim of each leaf is sharded over pipeline; None if each stage stores all of it."""


def to_schedule(
    schedule: Schedule, counts: Counts, leaves: Sequence[jax.Array], dims: Dims, specs: Sequence[PartitionSpec]
) -> Arrays:
    """Bring each stage the blocks that it runs: [L, ..., d / S, ...] -> [chunks * k, ..., d, ...], k the largest count.

    A chunk with fewer than k blocks has block 0 in their place, which nobody runs. `specs` say how leaves lie over tensor.
    """
    rows = jnp.asarray(stage_rows(schedule, counts)[0])
    own = rows[jax.lax.axis_index(PIPELINE)]
    taken = [jnp.take(x, own if dim is None else rows.reshape(-1), axis=0) for x, dim in zip(leaves, dims, strict=True)]

    def move(x: jax.Array, dim: int | None) -> jax.Array:
        return x if dim is None else jax.lax.all_to_all(x, PIPELINE, 0, dim, tiled=True)

    return _each(move, taken, dims, specs)


def to_model(
    schedule: Schedule, counts: Counts, leaves: Sequence[jax.Array], dims: Dims, specs: Sequence[PartitionSpec]
) -> Arrays:
    """Bring blocks, or their gradients, back to where they are stored: the inverse of `to_schedule`."""

    def move(x: jax.Array, dim: int | None) -> jax.Array:
        if dim is None:
            return jax.lax.all_gather(x, PIPELINE, tiled=True)
        return jax.lax.all_to_all(x, PIPELINE, dim, 0, tiled=True)

    places = jnp.asarray(stage_rows(schedule, counts)[1])
    return [jnp.take(x, places, axis=0) for x in _each(move, leaves, dims, specs)]


def _each(
    move: Callable[[jax.Array, int | None], jax.Array],
    leaves: Sequence[jax.Array],
    dims: Dims,
    specs: Sequence[PartitionSpec],
) -> Arrays:
    return shard_by_shard(lambda xs: [move(x, dim) for x, dim in zip(xs, dims, strict=True)], leaves, specs)
