"""Shard optimizer state and updates by whole matrices: each block of a stack has one device as its
owner.
"""

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from shardopt.mesh import size_along
from shardopt.partition._plan import EXPERT, LeafPlan, largest_divisible_dim

TENSOR = "tensor"


def owned_by_blocks(plan: LeafPlan, sizes: Mapping[str, int], *, scattered: bool) -> LeafPlan:
    """Return the plan of a leaf with its optimizer state sharded by whole blocks, if the leaf is a
    stack of matrices.

    Dim 0, which counts blocks, is then sharded over all axes that shard the leaf: pipeline, the
    axes of the placement, expert and tensor. A leaf keeps its plan if it is not a stack of
    matrices, if it is replicated over data, or if these axes do not divide its number of blocks.

    Outside of a `BlockModel`, the first dim of a leaf may count matrices. Parameters are sharded
    along it as well, if the axes of the placement divide it and neither tensor nor expert shards
    the leaf. Nothing moves then. Otherwise another dim is sharded if possible, so that each device
    holds a piece of each matrix.

    Args:
      plan: the plan of a leaf.
      sizes: mesh axis name -> size.
      scattered: whether gradients may be reduce-scattered by blocks directly, because parameters
        are not sharded over data.
    """
    if plan.dim is None or len(plan.shape) < 3:
        return plan
    axes = plan.shard_axes
    if not plan.stacked:
        if not plan.experts:
            size = size_along(sizes, axes)
            plan = dataclasses.replace(plan, dim=_dim_of_stack(plan, size))
        spec = plan.spec(sharded=True)
        return plan if spec[0] is None else dataclasses.replace(plan, owned=spec)
    if plan.pipelined:
        axes = ("pipeline", *axes)
    # Tensor and expert cut inside of a matrix. As owners they take whole matrices like the others.
    axes = (*axes, *dims_of_matrix_axes(plan))
    if plan.shape[0] % size_along(sizes, axes):
        return plan
    block_entries = [None if entry in axes else entry for entry in plan.spec(sharded=False)[1:]]
    owner_spec = PartitionSpec(axes, *block_entries)
    return dataclasses.replace(
        plan, owned=owner_spec, dim=0 if scattered and not plan.pipelined else plan.dim
    )


def dims_of_matrix_axes(plan: LeafPlan) -> dict[str, int]:
    """Return expert and tensor, if they shard a dim of a block, with this dim.

    The placement's own dim is not among them.
    """
    spec = plan.spec(sharded=False)
    return {axis: spec.index(axis) for axis in (EXPERT, TENSOR) if axis in tuple(spec)[1:]}


def _dim_of_stack(plan: LeafPlan, size: int) -> int:
    """Return the dim over which a placement shards a leaf whose first dim may count matrices."""
    assert plan.dim is not None
    if TENSOR not in tuple(plan.tensor) and plan.shape[0] % size == 0:
        return 0
    dim_of_matrix = largest_divisible_dim(plan.shape, size, (TENSOR, *plan.tensor[1:]))
    return plan.dim if dim_of_matrix is None else dim_of_matrix
