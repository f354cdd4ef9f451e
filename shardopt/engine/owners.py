"""To the owners of whole matrices and back: from shards of every matrix to whole matrices of some, by all-to-alls."""

import functools
import math

import jax
import numpy as np

from shardopt.collectives import all_to_all
from shardopt.engine.config import StrategyConfig
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan
from shardopt.partition.owners import TENSOR


def is_moved(plan: LeafPlan) -> bool:
    """Return whether optimizer state of a leaf is not where the leaf itself is sharded."""
    return plan.dim is not None and plan.owned not in (None, plan.spec(sharded=True))


def move(config: StrategyConfig, plan: LeafPlan, x: jax.Array, *, there: bool) -> jax.Array:
    """Move an array like a parameter from where this is sharded to where its optimizer state is, or back.

    Over data each device sends 1/N of its shard to every other, (N-1)/N of it in all, and so over tensor.
    """
    home, owned = plan.spec(sharded=True), plan.state_spec(sharded=True)
    specs = (home, owned) if there else (owned, home)
    run = functools.partial(_exchange, plan=plan, there=there)
    return jax.shard_map(run, mesh=config.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(x)


def _exchange(x: jax.Array, plan: LeafPlan, *, there: bool) -> jax.Array:
    """Cut blocks over the axes, and join what they hold of each: over data, then over tensor; or back."""
    assert plan.dim is not None
    steps = [] if plan.dim == 0 else [(plan.axes, plan.dim)]
    steps += [(TENSOR, dim) for dim, entry in enumerate(plan.tensor) if entry == TENSOR]
    for axis, dim in steps if there else reversed(steps):
        x = all_to_all(x, axis, *((0, dim) if there else (dim, 0)))
    return x


def moved_bytes(config: StrategyConfig, plan: LeafPlan, dtype: np.dtype) -> int:
    """Return what a device sends of an array like a parameter, one way."""
    home, sizes = plan.spec(sharded=True), config.mesh_shape
    steps = [] if plan.dim == 0 else [plan.shard_axes]
    steps += [(TENSOR,)] if TENSOR in tuple(plan.tensor) else []
    shard = math.prod(plan.shape) * dtype.itemsize // math.prod(sizes[axis] for axis in spec_axes(home))
    groups = [math.prod(sizes[axis] for axis in axes) for axes in steps]
    return sum(shard * (n - 1) // n for n in groups)
