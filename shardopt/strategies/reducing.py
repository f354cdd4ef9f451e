"""Means through a reducer: where its state lives, and how it is called in the per-device view."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardopt.collectives.per_device import TENSOR
from shardopt.core.types import PyTree
from shardopt.reducers import Reducer, state_specs


class Reduced(NamedTuple):
    """An optimizer state beside the state of the reducer of its gradients.

    Attributes:
      optimizer: the state of the wrapped optax transformation.
      reducer: the reducer's state, one row a device: leaves that differ along the axes reduced over are
        [N, sizes of the other axes..., local shape...], all others [sizes of the other axes..., local shape...].
    """

    optimizer: PyTree
    reducer: PyTree


class ReducerPlan(NamedTuple):
    """A reducer on a mesh.

    Attributes:
      reducer: the reducer.
      mesh: the mesh.
      axes: the axes that it takes the mean over.
      leaves: what it reduces, as each device holds it: shapes and dtypes.
      specs: how each of them is split over tensor.
    """

    reducer: Reducer
    mesh: Mesh
    axes: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]

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


def local_shape(mesh: Mesh, leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Return the shape that each device holds of a leaf."""
    shape = list(leaf.shape)
    for dim, entry in enumerate(spec):
        for axis in entry if isinstance(entry, tuple) else (entry,):
            shape[dim] //= 1 if axis is None else mesh.shape[axis]
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def init_reducer(plan: ReducerPlan) -> PyTree:
    """Return the first state, with a row for every device."""
    state = plan.reducer.init([jnp.zeros(leaf.shape, leaf.dtype) for leaf in plan.leaves])
    leaves, treedef = jax.tree.flatten(state)
    rows = [_rows(plan, marked) for marked in _marks(state)]
    return treedef.unflatten([jnp.broadcast_to(x, (*r, *jnp.shape(x))) for x, r in zip(leaves, rows, strict=True)])


def reducer_specs(plan: ReducerPlan) -> PyTree:
    """Return where the rows live: each on its device."""
    state = jax.eval_shape(plan.reducer.init, list(plan.leaves))
    along = next(iter(plan.axes)) if len(plan.axes) == 1 else plan.axes
    specs = [PartitionSpec(*([along] if marked else []), *plan.others) for marked in _marks(state)]
    return jax.tree.unflatten(jax.tree.structure(state), specs)


def manual_specs(plan: ReducerPlan) -> PyTree:
    """Return the same for the per-device view, in which tensor is not named."""
    specs = reducer_specs(plan)
    drop = lambda spec: PartitionSpec(*(None if entry == TENSOR else entry for entry in spec))  # noqa: E731
    return jax.tree.map(drop, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def reduce_through(plan: ReducerPlan, leaves: Sequence[Any], state: PyTree) -> tuple[list[Any], PyTree]:
    """Return the means over the axes of the plan, and the new state; call it in the per-device view.

    It runs in a nested region that is manual over tensor too, so that what crosses the wire is what the reducer
    sends, and each shard is compressed by itself.
    """
    tensor = jax.tree.map(
        lambda spec: PartitionSpec(*(entry if entry == TENSOR else None for entry in spec)),
        reducer_specs(plan),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )

    def run(leaves, state):
        rows, treedef = jax.tree.flatten(state)
        marks = _marks(state)
        count = [len(plan.others) + marked for marked in marks]
        own = treedef.unflatten([x.reshape(x.shape[n:]) for x, n in zip(rows, count, strict=True)])
        means, new = plan.reducer.reduce(leaves, own, plan.axes)
        stored = [x.reshape((1,) * n + x.shape) for x, n in zip(jax.tree.leaves(new), count, strict=True)]
        return means, treedef.unflatten(stored)

    specs = (list(plan.specs), tensor)
    return jax.shard_map(run, in_specs=specs, out_specs=specs, axis_names={TENSOR}, check_vma=False)(
        list(leaves), state
    )


def _rows(plan: ReducerPlan, marked: bool) -> tuple[int, ...]:
    return (*([plan.size] if marked else []), *(plan.mesh.shape[axis] for axis in plan.others))


def _marks(state: PyTree) -> list[bool]:
    """Return of each leaf whether it differs between the devices that a mean is taken over."""
    specs = jax.tree.leaves(state_specs(state, "any"), is_leaf=lambda x: isinstance(x, PartitionSpec))
    return [spec != PartitionSpec() for spec in specs]
