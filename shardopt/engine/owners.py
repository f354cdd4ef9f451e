"""To the owners of whole matrices and back: from shards of every matrix to whole matrices of some, by all-to-alls."""

import math

import jax

from shardopt.collectives import all_to_all
from shardopt.core.types import PyTree
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan
from shardopt.partition.owners import TENSOR


def to_owners(config: StrategyConfig, layout: Layout, tree: PyTree) -> PyTree:
    """Move leaves like the trainable parameters from where these are sharded to where their optimizer state is."""
    return _move(config, layout, tree, there=True)


def from_owners(config: StrategyConfig, layout: Layout, tree: PyTree) -> PyTree:
    """Move them back."""
    return _move(config, layout, tree, there=False)


def _move(config: StrategyConfig, layout: Layout, tree: PyTree, *, there: bool) -> PyTree:
    """Over data each device sends 1/N of its shard to every other, (N-1)/N of it in all, and so over tensor."""
    leaves, treedef = jax.tree.flatten(tree)
    moved = [i for i, plan in enumerate(layout.trained) if plan.owned not in (None, plan.spec(sharded=True))]
    if not moved:
        return tree
    plans = [layout.trained[i] for i in moved]
    home, owned = [plan.spec(sharded=True) for plan in plans], [plan.state_spec(sharded=True) for plan in plans]

    def local(xs: list[jax.Array]) -> list[jax.Array]:
        return [_exchange(x, plan, there=there) for x, plan in zip(xs, plans, strict=True)]

    specs = (home, owned) if there else (owned, home)
    run = jax.shard_map(local, mesh=config.mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False)
    for i, x in zip(moved, run([leaves[i] for i in moved]), strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def _exchange(x: jax.Array, plan: LeafPlan, *, there: bool) -> jax.Array:
    """Cut blocks over the axes, and join what they hold of each: over data, then over tensor; or back."""
    assert plan.dim is not None
    steps = [] if plan.dim == 0 else [(plan.axes, plan.dim)]
    steps += [(TENSOR, dim) for dim, entry in enumerate(plan.tensor) if entry == TENSOR]
    for axis, dim in steps if there else reversed(steps):
        x = all_to_all(x, axis, *((0, dim) if there else (dim, 0)))
    return x


def moved_bytes(config: StrategyConfig, plan: LeafPlan) -> int:
    """Return what a device sends of a leaf: its gradient and parameter there, the new parameter back."""
    home, sizes = plan.spec(sharded=True), config.mesh_shape
    if plan.owned in (None, home) or plan.dim is None:
        return 0
    steps = [] if plan.dim == 0 else [plan.shard_axes]
    steps += [(TENSOR,)] if TENSOR in tuple(plan.tensor) else []
    shard = math.prod(plan.shape) * plan.dtype.itemsize // math.prod(sizes[axis] for axis in spec_axes(home))
    groups = [math.prod(sizes[axis] for axis in axes) for axes in steps]
    return sum(3 * shard * (n - 1) // n for n in groups)
