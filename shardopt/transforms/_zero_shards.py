"""`zero` under `shard_map` and `pmap`: shards are gathered, updated and cut again."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core import PyTree, abstract
from shardopt.core._axis import axis_size
from shardopt.core._device_state import DeviceNumber, PerDevice
from shardopt.reducers._axis import varying
from shardopt.transforms._state_form import (
    check_alike,
    check_form,
    nan_for_state_of_another_device,
    number_of_device,
)


class ZeroState(NamedTuple):
    """The state of `zero` under `shard_map` or `pmap`.

    Attributes:
      shards: leaf number -> this device's shard of a leaf of the state, flat.
      unsharded: the leaves that are too small to shard, in order.
      device: the number of the device that the shards belong to.
    """

    shards: PerDevice
    unsharded: tuple[Any, ...]
    device: DeviceNumber


@dataclasses.dataclass(frozen=True)
class ByShards:
    """The form where the axis is bound: shards are gathered, updated and cut again."""

    tx: optax.GradientTransformationExtraArgs
    axis_name: str

    def init(self, params: PyTree) -> ZeroState:
        return self.cut(self.tx.init(params))

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, ZeroState]:
        # before gradients that differ between devices are taken for their mean
        problem = f"gradients differ along {self.axis_name!r}: they are no mean yet."
        fix = "put so.transforms.average_gradients, or jax.lax.pmean, before it."
        check_alike(updates, self.axis_name, problem, fix)
        device = number_of_device(self.axis_name)
        # The update needs whole arrays, because no transformation is written for shards. So the
        # memory of the whole state is needed during the update, and saved between steps.
        if isinstance(state, ZeroState):
            shapes = abstract(updates if params is None else params)
            check_form(state, jax.eval_shape(self.init, shapes))
            like = jax.eval_shape(self.tx.init, shapes)
            inner_state = self.join(state, like)
            device = state.device
        else:  # made outside of the axis, so it is unsharded
            inner_state = state
        updates, inner_state = self.tx.update(updates, inner_state, params, **extra)
        updates = nan_for_state_of_another_device(device, self.axis_name, updates)
        return updates, self.cut(inner_state)

    def is_cut(self, leaf: Any) -> bool:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys
            return False
        return math.prod(leaf.shape) >= axis_size(self.axis_name) > 1

    def cut(self, inner_state: PyTree) -> ZeroState:
        """Return this device's shards of a state."""
        size = axis_size(self.axis_name)
        index = jax.lax.axis_index(self.axis_name)

        def shard_of(leaf: jax.Array) -> jax.Array:
            length = -(-leaf.size // size)
            # Flat and padded: any leaf can be cut, whatever its dims.
            rows = jnp.pad(leaf.reshape(-1), (0, length * size - leaf.size)).reshape(size, length)
            return jax.lax.dynamic_index_in_dim(rows, index, keepdims=False)

        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(inner_state)]
        shards = {str(i): shard_of(leaf) for i, leaf in enumerate(leaves) if self.is_cut(leaf)}
        unsharded = tuple(leaf for leaf in leaves if not self.is_cut(leaf))
        return ZeroState(PerDevice(shards), unsharded, number_of_device(self.axis_name))

    def join(self, state: ZeroState, like: PyTree) -> PyTree:
        """Return the unsharded state, with the structure of `like`."""
        likes, treedef = jax.tree.flatten(like)
        unsharded = iter(state.unsharded)
        leaves = []
        for i, leaf_like in enumerate(likes):
            if not self.is_cut(leaf_like):
                leaves.append(next(unsharded))
                continue
            shard = state.shards.value[str(i)]
            # Under `check_vma=True` the type must say that all devices have the gathered value.
            to = "invarying" if varying(shard) else "varying"
            flat = jax.lax.all_gather(shard, self.axis_name, tiled=True, to=to)
            leaves.append(flat[: math.prod(leaf_like.shape)].reshape(leaf_like.shape))
        return treedef.unflatten(leaves)
