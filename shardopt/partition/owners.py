"""Whole matrices on owners: optimizer state and update sharded over blocks, not within them."""

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from shardopt.partition.plan import LeafPlan

TENSOR = "tensor"


def owned_by_blocks(plan: LeafPlan, sizes: Mapping[str, int], *, scattered: bool) -> LeafPlan:
    """Return the plan of a leaf whose optimizer state lives on whole blocks, if it is a stack of matrices that divides.

    Dim 0, which counts blocks, is sharded over all axes that the leaf is sharded over: pipeline, what the placement shards
    over, and tensor where a rule names it. What is no stack of matrices, is replicated over data, or has a number of blocks
    that these axes do not divide, keeps its plan.

    Args:
      plan: of a leaf.
      sizes: mesh axis name -> size.
      scattered: whether gradients may be reduce-scattered by blocks at once, because parameters are not sharded over data.
    """
    if not plan.stacked or plan.dim is None or len(plan.shape) < 3:
        return plan
    over = plan.shard_axes
    if plan.pipelined:
        over = ("pipeline", *over)
    if TENSOR in tuple(plan.tensor):
        over = (*over, TENSOR)
    if plan.shape[0] % math.prod(sizes[axis] for axis in over):
        return plan
    kept = [None if entry == TENSOR else entry for entry in plan.spec(sharded=False)[1:]]
    owned = PartitionSpec(over[0] if len(over) == 1 else over, *kept)
    return dataclasses.replace(plan, owned=owned, dim=0 if scattered and not plan.pipelined else plan.dim)
