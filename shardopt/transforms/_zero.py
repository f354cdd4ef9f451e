"""`zero`: each device stores its shard of an optimizer state, between the steps of one's own loop."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardopt.core._arguments import check_transformation
from shardopt.core._axis import axis_size, is_bound
from shardopt.core._device_state import DeviceNumber, PerDevice
from shardopt.core._errors import calling, error_text, plural
from shardopt.core._types import PyTree, abstract, leaves_with_paths
from shardopt.reducers._axis import tracks_varying, varying
from shardopt.transforms._own_state import (
    FIX_STACKED,
    number_of_device,
    unless_of_another_device,
)

FREE = PartitionSpec.UNCONSTRAINED


class ZeroState(NamedTuple):
    """The state of `zero` under `shard_map` or `pmap`.

    Attributes:
      shards: leaf number -> this device's shard of a leaf of the state, flat.
      whole: the leaves that are too small to shard, in order.
      device: the number of the device that the shards belong to.
    """

    shards: PerDevice
    whole: tuple[Any, ...]
    device: DeviceNumber


@calling("zero")
def zero(
    inner: optax.GradientTransformation, axis_name: str, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """Shard the state of any optimizer over an axis, in your own loop: ZeRO stage 1.

    Args:
      inner: any optax transformation, or a whole chain.
      axis_name: the mesh axis, or the axis of the `pmap`, that the state is sharded over.
      mesh: the mesh of a loop under `jax.jit`; by default the mesh of `jax.set_mesh`. Not needed
        where the axis is bound.

    Returns:
      An optax transformation. Its gradients are those of the whole batch: under `jit` as they are,
      under `shard_map` and `pmap` after their mean.

    Raises:
      TypeError: if `inner` is no transformation.
      ValueError: if the axis is neither bound nor on a mesh, or axes are Explicit; in `update` under `shard_map`, if the
        types show that gradients are not averaged yet.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> mesh = so.make_mesh(data=8)
      >>> tx = so.transforms.zero(optax.adam(1e-3), "data", mesh)
      >>> state = tx.init({"w": jnp.zeros((64, 32))})
      >>> state[0].mu["w"].addressable_shards[0].data.shape
      (8, 32)

    **Equivalence**: equal to `inner`, for any optimizer: it computes on whole leaves.

    **Placement**: under `jit` the state keeps its structure, and each leaf is sharded along its
    largest dim that the axis divides. A leaf without such a dim stays whole. Under `shard_map` and
    `pmap` leaves are flattened, padded and cut, except those with fewer numbers than devices; a
    state that was made outside of the axis is whole until the first update. `so.transforms.on_mesh`
    carries it in and out of `shard_map`. A device that gets the shards of another one, after an
    unreplicate and a replicate, returns NaN.

    **Communication**: under `jit` the partitioner reduce-scatters gradients, or all-reduces and
    cuts them, and all-gathers updates. Where the axis is bound, the state is all-gathered at each
    update: memory is saved between steps. `so.zero` sends gradients and updates only.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020, section 5.1.
    """
    tx = check_transformation("inner", inner)
    by_constraints, by_shards = _ByConstraints(tx, axis_name, mesh), _ByShards(tx, axis_name)

    @calling("zero")
    def init(params: PyTree) -> PyTree:
        if is_bound(axis_name):
            return by_shards.init(params)
        return by_constraints.init(params)

    @calling("zero")
    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if is_bound(axis_name):
            return by_shards.update(updates, state, params, **extra)
        return by_constraints.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _ByConstraints:
    """The form under `jit`: sharding constraints on gradients, state and updates."""

    tx: optax.GradientTransformationExtraArgs
    axis_name: str
    given_mesh: Mesh | None

    def init(self, params: PyTree) -> PyTree:
        state = self.tx.init(params)
        # without a mesh: the axis of a pmap or shard_map that is opened later
        return state if self.mesh() is None else self.place(state)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if self.mesh() is None:
            problem = f"axis {self.axis_name!r} is not bound here, and there is no mesh with it."
            fix = 'pass the mesh of the loop: so.transforms.zero(tx, "data", mesh).'
            raise ValueError(error_text(problem, fix=fix))
        updates, state = self.tx.update(self.place(updates), self.place(state), params, **extra)
        return self.place(updates, whole=True), self.place(state)

    def mesh(self) -> Mesh | AbstractMesh | None:
        mesh = self.given_mesh or jax.sharding.get_abstract_mesh()
        if self.axis_name not in mesh.axis_names:
            return None
        if AxisType.Explicit in mesh.axis_types:
            problem = (
                f"the mesh has Explicit axes {mesh.axis_names}, which constraints cannot shard."
            )
            fix = "make the mesh with axis_types=AxisType.Auto, or update inside of jax.shard_map."
            raise ValueError(error_text(problem, fix=fix))
        return mesh

    def place(self, tree: PyTree, *, whole: bool = False) -> PyTree:
        """Return the tree with each array sharded along one dim, or whole along that dim."""
        mesh = self.mesh()
        assert mesh is not None
        size = mesh.shape[self.axis_name]

        def place_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            dim = _largest_dim(leaf.shape, size)
            if dim is None:
                return leaf
            entries: list[Any] = [FREE] * leaf.ndim
            entries[dim] = None if whole else self.axis_name
            sharding = NamedSharding(mesh, PartitionSpec(*entries))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree.map(place_leaf, tree)


def _largest_dim(shape: tuple[int, ...], size: int) -> int | None:
    dims = [dim for dim, length in enumerate(shape) if length and length % size == 0]
    return max(dims, key=lambda dim: shape[dim], default=None)


@dataclasses.dataclass(frozen=True)
class _ByShards:
    """The form where the axis is bound: shards are gathered, updated and cut again."""

    tx: optax.GradientTransformationExtraArgs
    axis_name: str

    def init(self, params: PyTree) -> ZeroState:
        return self.cut(self.tx.init(params))

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, ZeroState]:
        self.check_averaged(updates)
        device = number_of_device(self.axis_name)
        if isinstance(state, ZeroState):
            like = jax.eval_shape(self.tx.init, abstract(updates if params is None else params))
            whole, device = self.join(state, like), state.device
        else:  # made outside of the axis, so it is whole
            whole = state
        updates, whole = self.tx.update(updates, whole, params, **extra)
        return unless_of_another_device(device, self.axis_name, updates), self.cut(whole)

    def check_averaged(self, updates: PyTree) -> None:
        """Refuse gradients that differ between devices, where types show it."""
        if not tracks_varying(self.axis_name):
            return
        local = [
            path for path, leaf in leaves_with_paths(updates) if self.axis_name in varying(leaf)
        ]
        if local:
            problem = (
                f"{plural(len(local), 'gradient leaf')} {'differs' if len(local) == 1 else 'differ'}"
                f" along {self.axis_name!r}: they are no mean yet."
            )
            fix = "put so.transforms.average_gradients, or jax.lax.pmean, before it."
            raise ValueError(error_text(problem, local, fix))

    def is_cut(self, leaf: Any) -> bool:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys
            return False
        return math.prod(leaf.shape) >= axis_size(self.axis_name) > 1

    def cut(self, whole: PyTree) -> ZeroState:
        """Return this device's shards of a state."""
        size, index = axis_size(self.axis_name), jax.lax.axis_index(self.axis_name)

        def shard_of(leaf: jax.Array) -> jax.Array:
            length = -(-leaf.size // size)
            rows = jnp.pad(leaf.reshape(-1), (0, length * size - leaf.size)).reshape(size, length)
            return jax.lax.dynamic_index_in_dim(rows, index, keepdims=False)

        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(whole)]
        shards = {str(i): shard_of(leaf) for i, leaf in enumerate(leaves) if self.is_cut(leaf)}
        others = tuple(leaf for leaf in leaves if not self.is_cut(leaf))
        return ZeroState(PerDevice(shards), others, number_of_device(self.axis_name))

    def join(self, state: ZeroState, like: PyTree) -> PyTree:
        """Return the whole state, with the structure of `like`."""
        likes, treedef = jax.tree.flatten(like)
        others, leaves = iter(state.whole), []
        for i, leaf_like in enumerate(likes):
            if not self.is_cut(leaf_like):
                leaves.append(next(others))
                continue
            shard = state.shards.value[str(i)]
            self.check_shard(str(i), shard, leaf_like)
            to = "invarying" if varying(shard) else "varying"
            flat = jax.lax.all_gather(shard, self.axis_name, tiled=True, to=to)
            leaves.append(flat[: math.prod(leaf_like.shape)].reshape(leaf_like.shape))
        return treedef.unflatten(leaves)

    def check_shard(self, name: str, shard: jax.Array, like: jax.ShapeDtypeStruct) -> None:
        length = -(-math.prod(like.shape) // axis_size(self.axis_name))
        if shard.shape == (length,):
            return
        problem = (
            f"shard {name} of the state has shape {shard.shape}, where a device has {(length,)}."
        )
        raise ValueError(error_text(problem, fix=FIX_STACKED))
