"""Means over devices by a reducer: a filling of the slot `reduce`, the placement of the reducer's
state, and its call in the per-device view.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardopt.collectives import has_auto_tensor
from shardopt.collectives._per_device import TENSOR
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import Arrays, PyTree, Weighted, with_leaves
from shardopt.core._device_state import state_specs
from shardopt.core._reducer import Reducer, grouped
from shardopt.losses._metrics import factor
from shardopt.losses._sums import all_reduce_grads, scale
from shardopt.mesh import size_along, spec_axes
from shardopt.partition import LeafPlan
from shardopt.step._update import norm_of_shards


class CompressedOptState(NamedTuple):
    """An optimizer state, and the state of the reducer of its gradients.

    Attributes:
      optimizer: the state of the wrapped optax transformation.
      reducer: the stacked reducer states of all devices. Leaves that differ along the axes of the
        mean are [N, sizes of the other axes..., local shape...]; all other leaves are [sizes of the
        other axes..., local shape...].
    """

    optimizer: PyTree
    reducer: PyTree


class CompressionPlan(NamedTuple):
    """A reducer on a mesh.

    Attributes:
      reducer: the reducer.
      mesh: the mesh.
      axes: the axes that it takes the mean over.
      leaves: the gradients that it reduces, as each device holds them: shapes and dtypes.
      specs: how each gradient is sharded over tensor.
      shards: the axes along which any gradient is sharded.
    """

    reducer: Reducer
    mesh: Mesh
    axes: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[PartitionSpec, ...]
    shards: tuple[str, ...]

    @property
    def size(self) -> int:
        """N, the number of devices that a mean is taken over."""
        return size_along(self.mesh.shape, self.axes)

    @property
    def others(self) -> tuple[str, ...]:
        """The other axes, along which each coordinate has its own mean."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.axes)

    @property
    def wire_bytes(self) -> int:
        """The bytes that each device sends in a step."""
        return self.reducer.wire_bytes(list(self.leaves), self.size)


def compression_plan(
    reducer: Reducer, mesh: Mesh, axes: Sequence[str], plans: Sequence[LeafPlan], *, sharded: bool
) -> CompressionPlan:
    """Return how gradients go through a reducer.

    Leaves that are sharded over different axes are sent separately.

    Args:
      reducer: the reducer.
      mesh: the mesh.
      axes: the axes that the mean is taken over.
      plans: of the leaves.
      sharded: whether the leaves are sharded over data where their plans say so.
    """
    specs = [plan.spec(sharded=sharded) for plan in plans]
    sharded_over = [set(spec_axes(spec)) for spec in specs]
    # Leaves with other keys share no buffer: a replicated leaf would be rounded by the scale of its
    # sharded neighbours, and so differ between devices.
    keys = [
        frozenset(axis for axis in mesh.axis_names if axis in leaf_axes and mesh.shape[axis] > 1)
        for leaf_axes in sharded_over
    ]
    shapes = tuple(local_shape(mesh, plan, spec) for plan, spec in zip(plans, specs, strict=True))
    shards = tuple(axis for axis in mesh.axis_names if any(axis in key for key in keys))
    tensor = tuple(plan.tensor for plan in plans)
    grouped_reducer = grouped(reducer, keys, [plan.path for plan in plans])
    return CompressionPlan(grouped_reducer, mesh, tuple(axes), shapes, tensor, shards)


@dataclasses.dataclass(frozen=True)
class CompressedMean:
    """Gradients are averaged by a reducer, whose state is part of the optimizer state; see
    `Reduce`.

    Attributes:
      plan: how the gradients go through the reducer.
    """

    plan: CompressionPlan

    @property
    def state_specs(self) -> PyTree:
        """The specs of the reducer's state in the per-device view."""
        return manual_specs(self.plan)

    def grad_specs(self, config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
        """Return how averaged gradients are sharded: over no axis that a mean is taken over."""
        return [config.axes.stack(plan.data_spec(sharded=False)) for plan in layout.trained]

    norm = staticmethod(norm_of_shards)

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: Arrays,
        loss: Weighted,
        state: PyTree,
        stored_order: Callable[[Arrays], Arrays],
    ) -> tuple[Arrays, PyTree]:
        """Return the gradients of the union batch and the new state of the reducer."""
        # The mean over N devices of N times each device's part is the sum.
        remaining_factor = factor(loss, config.num_pieces)
        axes = config.axes
        other_axes = [axes.gradient(plan, done=axes.summed) for plan in layout.trained]
        # The residuals of the reducer have the stored order of blocks.
        grads = stored_order(all_reduce_grads(grads, layout.trained, other_axes))
        grads = [scale(grad, remaining_factor * self.plan.size) for grad in grads]
        return compress_mean(self.plan, grads, state)

    def init(self) -> PyTree:
        """Return the first state of the reducer."""
        return init_compression(self.plan)

    def specs(self) -> PyTree:
        """Return the specs of the reducer's state."""
        return compression_specs(self.plan)

    def join(self, opt_state: PyTree, state: PyTree) -> PyTree:
        """Return the states of optimizer and reducer together."""
        return CompressedOptState(opt_state, state)

    def split(self, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the states of the optimizer and of the reducer."""
        return opt_state.optimizer, opt_state.reducer


def compressed_mean(config: StrategyConfig, trained: Sequence[LeafPlan]) -> CompressedMean:
    """Return the reduction of these leaves by the reducer of a strategy."""
    assert config.wire.reducer is not None
    plan = compression_plan(
        config.wire.reducer, config.mesh, config.axes.summed, trained, sharded=False
    )
    return CompressedMean(plan)


def local_shape(mesh: Mesh, leaf: LeafPlan, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the shard of a leaf on each device."""
    shape = list(leaf.shape)
    for dim, entry in enumerate(spec):
        shape[dim] //= size_along(mesh.shape, spec_axes((entry,)))
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def init_compression(plan: CompressionPlan) -> PyTree:
    """Return the stacked first reducer states of all devices."""
    state = plan.reducer.init([jnp.zeros(leaf.shape, leaf.dtype) for leaf in plan.leaves])
    leaves, treedef = jax.tree.flatten(state)
    leading_shapes = [_leading_shape(plan, differs) for differs in _differs_by_device(state)]
    pairs = zip(leaves, leading_shapes, strict=True)
    return treedef.unflatten(
        [jnp.broadcast_to(x, (*leading, *jnp.shape(x))) for x, leading in pairs]
    )


def compression_specs(plan: CompressionPlan) -> PyTree:
    """Return the specs of the stacked reducer states: each device holds its own."""
    state = jax.eval_shape(plan.reducer.init, list(plan.leaves))
    mean_entry = next(iter(plan.axes)) if len(plan.axes) == 1 else plan.axes
    specs = [
        PartitionSpec(*([mean_entry] if differs else []), *plan.others)
        for differs in _differs_by_device(state)
    ]
    return with_leaves(state, specs)


def manual_specs(plan: CompressionPlan) -> PyTree:
    """Return the same specs for the per-device view, without the tensor axis."""
    return _specs_of_axes(plan, lambda axis: axis != TENSOR)


def _specs_of_axes(plan: CompressionPlan, selects: Callable[[Any], bool]) -> PyTree:
    """Return the specs of the stacked reducer states over the selected axes alone."""

    def select(spec):
        return PartitionSpec(*(entry if selects(entry) else None for entry in spec))

    return jax.tree.map(select, compression_specs(plan))


def compress_mean(
    plan: CompressionPlan, leaves: Sequence[jax.Array], state: PyTree
) -> tuple[Arrays, PyTree]:
    """Return the means over the axes of the plan, and the new state.

    Call it in the per-device view.

    If tensor is above 1, the reducer runs in a nested region that is manual over tensor too. Each
    shard is then compressed by itself, and only the reducer's messages cross the wire. If any mean
    of any shard is not finite, no shard changes its state.
    """
    tensor_specs = _specs_of_axes(plan, lambda axis: axis == TENSOR)

    def run(leaves, state):
        stacked_leaves, treedef = jax.tree.flatten(state)
        differing = _differs_by_device(state)
        leading_dims = [len(plan.others) + differs for differs in differing]
        # Inside the view every leading dim has size 1: N and the sizes of the other axes are cut
        # up.
        local_state = treedef.unflatten(
            [x.reshape(x.shape[n:]) for x, n in zip(stacked_leaves, leading_dims, strict=True)]
        )
        means, new_state = plan.reducer.reduce(leaves, local_state, plan.axes)
        new_state = _if_finite_everywhere(plan, means, new_state, local_state)
        stored = [
            x.reshape((1,) * n + x.shape)
            for x, n in zip(jax.tree.leaves(new_state), leading_dims, strict=True)
        ]
        return means, treedef.unflatten(stored)

    if not has_auto_tensor():
        return run(leaves, state)
    specs = (list(plan.specs), tensor_specs)
    return jax.shard_map(
        run, in_specs=specs, out_specs=specs, axis_names={TENSOR}, check_vma=False
    )(list(leaves), state)


def _if_finite_everywhere(
    plan: CompressionPlan, means: Sequence[jax.Array], new_state: PyTree, old_state: PyTree
) -> PyTree:
    """Return the new state, or the old one if any shard of any mean has a NaN or inf: the reducer
    skips the whole step.
    """
    if not jax.tree.leaves(new_state) or not means:
        return new_state
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(mean)) for mean in means])).astype(jnp.int32)
    # Along the axes of the mean all devices have the same means. Along the axes of shards they have
    # other coordinates, and must still decide alike.
    finite = (jax.lax.pmin(finite, plan.shards) if plan.shards else finite) > 0
    return jax.tree.map(
        lambda after, before: jnp.where(finite, after, before), new_state, old_state
    )


def _leading_shape(plan: CompressionPlan, differs: bool) -> tuple[int, ...]:
    return (*([plan.size] if differs else []), *(plan.mesh.shape[axis] for axis in plan.others))


def _differs_by_device(state: PyTree) -> list[bool]:
    """Return for each leaf whether it differs between the devices that a mean is taken over."""
    return [spec != PartitionSpec() for spec in jax.tree.leaves(state_specs(state, "any"))]
