"""State that differs between devices: how it is marked, stored as global arrays, and carried to
another axis size.

Such state has two forms:

- Local: inside `shard_map`, a device sees its own value of each leaf.
- Stored: between steps and in a checkpoint, a leaf is an array [N, ...] whose first dim is sharded
  over the axis.

All other state is replicated. The marks are pytree nodes, so the functions of this file find them
in any state: of a reducer, of an optax chain, or in a `TrainState`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, error_text, value_error
from shardopt.core._types import PyTree, merge_replicas, path_text


class PerDevice(NamedTuple):
    """Marks state whose leaves differ between devices.

    Attributes:
      value: a tree of arrays.
    """

    value: PyTree


class ErrorFeedback(NamedTuple):
    """Marks the residual that a device has not sent yet.

    It differs between devices, but later steps depend only on its mean over devices.

    Attributes:
      value: a tree like the gradients, in fp32 or wider.
    """

    value: PyTree


class DeviceNumber(NamedTuple):
    """Marks the number of the device that a state belongs to.

    Attributes:
      value: int32, the number along the axis; -1 before the first update of a state that was made
        outside of the axis.
    """

    value: jax.Array


@dataclass(frozen=True)
class Stacked:
    """An optax transformation for your own loop, over state that `shard_map` takes and returns.

    Leaves that differ between devices are stacked to [N, ...]. Its functions are the functions of
    the wrapped transformation, over this form of the state.

    Attributes:
      tx: an optax transformation, such as a chain of `so.transforms`.
      axis_name: the mesh axis that the stacked leaves are sharded over.
      axis_size: N, the number of devices along the axis.

    Raises:
      TypeError: if the axis name is no string, or the axis size no integer.
      ValueError: if the axis size is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> tx = so.transforms.average_gradients("data", so.reducers.error_feedback(so.reducers.int8()))
      >>> tx = so.reducers.Stacked(tx, "data", axis_size=4)
      >>> state = tx.init({"w": jnp.zeros(3)})
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]
      [(4, 3)]
      >>> tx.specs(state).reducer.memory.value["w"] == jax.P("data")
      True
    """

    tx: optax.GradientTransformation
    axis_name: str
    axis_size: int

    @calling("Stacked")
    def __post_init__(self) -> None:
        if not isinstance(self.axis_name, str):
            raise TypeError(error_text(f"axis_name must be a string, got {self.axis_name!r}."))
        check_count("axis_size", self.axis_size)

    def init(self, params: PyTree) -> PyTree:
        """Return the first state of all devices; call it outside of `shard_map`.

        It also works for transformations whose `init` needs the axis, and for abstract parameters
        under `jax.eval_shape`.

        Args:
          params: parameters, the same on all devices.
        """
        size = int(self.axis_size)
        stacked_init = jax.vmap(
            lambda _: self.tx.init(params), axis_name=self.axis_name, axis_size=size
        )
        return _map(stacked_init(jnp.zeros(size)), lambda leaf: leaf, lambda leaf: leaf[0])

    def specs(self, state: PyTree) -> PyTree:
        """Return the `PartitionSpec` of each leaf of a state, for `in_specs` and `out_specs`."""
        return state_specs(state, self.axis_name)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the updates of this device and the new state; call it inside of `shard_map`.

        Args:
          updates: the gradients of this device.
          state: the state as `shard_map` hands it in: stacked leaves are [1, ...].
          params: the parameters.
          **extra: further arguments of the transformation.
        """
        own = _map(state, lambda leaf: leaf.reshape(leaf.shape[1:]), lambda leaf: leaf)
        update = optax.with_extra_args_support(self.tx).update
        updates, own = update(updates, own, params, **extra)
        return updates, _map(own, lambda leaf: jnp.asarray(leaf)[None], lambda leaf: leaf)

    @calling("Stacked.resized")
    def resized(self, state: PyTree) -> PyTree:
        """Return a state of another axis size for this one: each device gets the mean of the error
        memories.

        The next update adds the mean of the memories to the mean of the gradients, so nothing is
        lost.

        Args:
          state: a state with stacked leaves of any size.

        Raises:
          ValueError: if the state has leaves marked `PerDevice`. They have no meaning on other
            devices.
        """
        nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_marked)
        per_device_paths = [
            path_text(path)
            for path, node in nodes
            if isinstance(node, PerDevice) and jax.tree.leaves(node)
        ]
        if per_device_paths:
            problem = "state that belongs to its device cannot be carried to another axis size."
            fix = "make it again with init, or use so.zero or so.ddp, whose state can be resharded."
            raise value_error(problem, per_device_paths, fix)

        size = int(self.axis_size)

        def merge(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(merge_replicas(leaf), (size, *leaf.shape[1:]))

        def carry(node: PyTree) -> PyTree:
            if isinstance(node, DeviceNumber):
                return DeviceNumber(jnp.arange(size, dtype=jnp.int32))
            return jax.tree.map(merge, node) if _is_marked(node) else node

        return jax.tree.map(carry, state, is_leaf=_is_marked)


def state_specs(state: PyTree, axis_name: str) -> PyTree:
    """Return the `PartitionSpec`s of a state with stacked leaves.

    Marked leaves are sharded over the axis. All other leaves are replicated.
    """
    return _map(state, lambda leaf: PartitionSpec(axis_name), lambda leaf: PartitionSpec())


def _is_marked(node: object) -> bool:
    return isinstance(node, PerDevice | ErrorFeedback | DeviceNumber)


def differs_by_device(state: PyTree) -> bool:
    """Return whether a part of a state differs between devices."""
    nodes = jax.tree.leaves(state, is_leaf=_is_marked)
    return any(_is_marked(node) and jax.tree.leaves(node) for node in nodes)


def _map(
    state: PyTree, map_marked: Callable[[PyTree], PyTree], map_unmarked: Callable[[PyTree], PyTree]
) -> PyTree:
    """Apply one function to the leaves under marks, and another function to all other leaves."""

    def map_node(node):
        return jax.tree.map(map_marked, node) if _is_marked(node) else map_unmarked(node)

    return jax.tree.map(map_node, state, is_leaf=_is_marked)
