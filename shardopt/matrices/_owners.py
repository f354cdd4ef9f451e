"""Moves between shards of every matrix and whole matrices at their owners, by all-to-alls."""

import functools
import math

import jax
import numpy as np

from shardopt.collectives import all_to_all
from shardopt.config._config import StrategyConfig
from shardopt.mesh import size_along, spec_axes
from shardopt.partition import LeafPlan
from shardopt.partition._owners import dims_of_matrix_axes


def is_moved(plan: LeafPlan) -> bool:
    """Return whether the optimizer state of a leaf is sharded differently from the leaf itself."""
    return plan.dim is not None and plan.owned not in (None, plan.spec(sharded=True))


def move(config: StrategyConfig, plan: LeafPlan, x: jax.Array, *, to_owners: bool) -> jax.Array:
    """Move an array from the sharding of its parameter to the sharding of the optimizer state, or
    back.

    Over data each device sends 1/N of its shard to every other device, (N-1)/N in total; the same
    over expert and tensor.
    """
    param_spec = plan.spec(sharded=True)
    state_spec = plan.state_spec(sharded=True)
    specs = (param_spec, state_spec) if to_owners else (state_spec, param_spec)
    run = functools.partial(_exchange, plan=plan, to_owners=to_owners)
    return jax.shard_map(
        run, mesh=config.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )(x)


def _exchange(x: jax.Array, plan: LeafPlan, *, to_owners: bool) -> jax.Array:
    """Cut blocks over the axes and join the shards of each block: over data, then expert, then
    tensor. Or the inverse.
    """
    assert plan.dim is not None
    steps = [] if plan.dim == 0 else [(plan.axes, plan.dim)]
    steps += dims_of_matrix_axes(plan).items()
    for axis, dim in steps if to_owners else reversed(steps):
        x = all_to_all(x, axis, *((0, dim) if to_owners else (dim, 0)))
    return x


def moved_bytes(config: StrategyConfig, plan: LeafPlan, dtype: np.dtype) -> int:
    """Return the bytes of an array like a parameter that a device sends, one way."""
    param_spec = plan.spec(sharded=True)
    sizes = config.mesh_shape
    steps = [] if plan.dim == 0 else [plan.shard_axes]
    steps += [(axis,) for axis in dims_of_matrix_axes(plan)]
    shard = math.prod(plan.shape) * dtype.itemsize // size_along(sizes, spec_axes(param_spec))
    groups = [size_along(sizes, axes) for axes in steps]
    return sum(shard * (n - 1) // n for n in groups)
