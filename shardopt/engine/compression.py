"""Means through a reducer: where its state lives, and how it is called in the per-device view."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardopt.collectives import has_auto_tensor
from shardopt.collectives.per_device import TENSOR
from shardopt.core.types import PyTree
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan
from shardopt.reducers import Reducer, state_specs
from shardopt.reducers.reducer import grouped


class CompressedOptState(NamedTuple):
    """An optimizer state beside the state of the reducer of its gradients.

    Attributes:
      optimizer: the state of the wrapped optax transformation.
      reducer: the reducer's state, stacked, one per device: leaves that differ along the axes reduced over are
        [N, sizes of the other axes..., local shape...], all others [sizes of the other axes..., local shape...].
    """

    optimizer: PyTree
    reducer: PyTree


class CompressionPlan(NamedTuple):
    """A reducer on a mesh.

    Attributes:
      reducer: the reducer.
      mesh: the mesh.
      axes: the axes that it takes the mean over.
      leaves: what it reduces, as each device holds it: shapes and dtypes.
      specs: how each of them is sharded over tensor.
      shards: the axes along which any of them is sharded.
    """

    reducer: Reducer
    mesh: Mesh
    axes: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    shards: tuple[str, ...]

    @property
    def size(self) -> int:
        """N, the devices that a mean is taken over."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def others(self) -> tuple[str, ...]:
        """The axes along which there is a mean each."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.axes)

    @property
    def wire_bytes(self) -> int:
        """What each device sends in a step."""
        return self.reducer.wire_bytes(list(self.leaves), self.size)


def compression_plan(
    reducer: Reducer, mesh: Mesh, axes: Sequence[str], plans: Sequence[LeafPlan], *, sharded: bool
) -> CompressionPlan:
    """Return how leaves go through a reducer; those that are sharded over different axes travel apart.

    Args:
      reducer: the reducer.
      mesh: the mesh.
      axes: what the mean is taken over.
      plans: of the leaves.
      sharded: whether the leaves are sharded over data where their plans say so.
    """
    specs = [plan.spec(sharded=sharded) for plan in plans]
    named = [set(spec_axes(spec)) for spec in specs]
    keys = [frozenset(axis for axis in mesh.axis_names if axis in own and mesh.shape[axis] > 1) for own in named]
    shapes = tuple(local_shape(mesh, plan, spec) for plan, spec in zip(plans, specs, strict=True))
    shards = tuple(axis for axis in mesh.axis_names if any(axis in key for key in keys))
    tensor = tuple(plan.tensor for plan in plans)
    named_leaves = grouped(reducer, keys, [plan.path for plan in plans])
    return CompressionPlan(named_leaves, mesh, tuple(axes), shapes, tensor, shards)


def local_shape(mesh: Mesh, leaf: LeafPlan, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Return the shape that each device holds of a leaf."""
    shape = list(leaf.shape)
    for dim, entry in enumerate(spec):
        shape[dim] //= math.prod(mesh.shape[axis] for axis in spec_axes((entry,)))
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def init_compression(plan: CompressionPlan) -> PyTree:
    """Return the first state, stacked, one per device."""
    state = plan.reducer.init([jnp.zeros(leaf.shape, leaf.dtype) for leaf in plan.leaves])
    leaves, treedef = jax.tree.flatten(state)
    rows = [_rows(plan, marked) for marked in _marks(state)]
    return treedef.unflatten([jnp.broadcast_to(x, (*r, *jnp.shape(x))) for x, r in zip(leaves, rows, strict=True)])


def compression_specs(plan: CompressionPlan) -> PyTree:
    """Return where it lives: each device has its own."""
    state = jax.eval_shape(plan.reducer.init, list(plan.leaves))
    along = next(iter(plan.axes)) if len(plan.axes) == 1 else plan.axes
    specs = [PartitionSpec(*([along] if marked else []), *plan.others) for marked in _marks(state)]
    return jax.tree.unflatten(jax.tree.structure(state), specs)


def manual_specs(plan: CompressionPlan) -> PyTree:
    """Return the same for the per-device view, in which tensor is not named."""
    specs = compression_specs(plan)
    drop = lambda spec: PartitionSpec(*(None if entry == TENSOR else entry for entry in spec))  # noqa: E731
    return jax.tree.map(drop, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def compress_mean(plan: CompressionPlan, leaves: Sequence[jax.Array], state: PyTree) -> tuple[list[jax.Array], PyTree]:
    """Return the means over the axes of the plan, and the new state; call it in the per-device view.

    Where tensor is above 1 it runs in a nested region that is manual over it too, so that what crosses the wire is what
    the reducer sends, and each shard is compressed by itself. Where a mean is not finite on one of them, none changes its state.
    """
    tensor = jax.tree.map(
        lambda spec: PartitionSpec(*(entry if entry == TENSOR else None for entry in spec)),
        compression_specs(plan),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )

    def run(leaves, state):
        rows, treedef = jax.tree.flatten(state)
        marks = _marks(state)
        count = [len(plan.others) + marked for marked in marks]
        own = treedef.unflatten([x.reshape(x.shape[n:]) for x, n in zip(rows, count, strict=True)])
        means, new = plan.reducer.reduce(leaves, own, plan.axes)
        new = _if_finite_everywhere(plan, means, new, own)
        stored = [x.reshape((1,) * n + x.shape) for x, n in zip(jax.tree.leaves(new), count, strict=True)]
        return means, treedef.unflatten(stored)

    if not has_auto_tensor():
        return run(leaves, state)
    specs = (list(plan.specs), tensor)
    return jax.shard_map(run, in_specs=specs, out_specs=specs, axis_names={TENSOR}, check_vma=False)(
        list(leaves), state
    )


def _if_finite_everywhere(plan: CompressionPlan, means: Sequence[jax.Array], new: PyTree, old: PyTree) -> PyTree:
    """Return the new state, or the old one if any shard of any mean has a NaN or inf: a step is skipped as a whole."""
    if not jax.tree.leaves(new) or not means:
        return new
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(mean)) for mean in means])).astype(jnp.int32)
    finite = (jax.lax.pmin(finite, plan.shards) if plan.shards else finite) > 0
    return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)


def _rows(plan: CompressionPlan, marked: bool) -> tuple[int, ...]:
    return (*([plan.size] if marked else []), *(plan.mesh.shape[axis] for axis in plan.others))


def _marks(state: PyTree) -> list[bool]:
    """Return of each leaf whether it differs between the devices that a mean is taken over."""
    specs = jax.tree.leaves(state_specs(state, "any"), is_leaf=lambda x: isinstance(x, PartitionSpec))
    return [spec != PartitionSpec() for spec in specs]
