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
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardopt.core._types import PyTree


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


def state_specs(state: PyTree, axis_name: str) -> PyTree:
    """Return the `PartitionSpec`s of a state with stacked leaves.

    Marked leaves are sharded over the axis. All other leaves are replicated.
    """
    return map_by_mark(state, lambda leaf: PartitionSpec(axis_name), lambda leaf: PartitionSpec())


def is_marked(node: object) -> bool:
    """Return whether a node marks state that differs between devices."""
    return isinstance(node, PerDevice | ErrorFeedback | DeviceNumber)


def differs_by_device(state: PyTree) -> bool:
    """Return whether a part of a state differs between devices."""
    nodes = jax.tree.leaves(state, is_leaf=is_marked)
    return any(map(is_marked, nodes))


def map_by_mark(
    state: PyTree, map_marked: Callable[[PyTree], PyTree], map_unmarked: Callable[[PyTree], PyTree]
) -> PyTree:
    """Apply one function to the leaves under marks, and another function to all other leaves."""

    def map_node(node):
        return jax.tree.map(map_marked, node) if is_marked(node) else map_unmarked(node)

    return jax.tree.map(map_node, state, is_leaf=is_marked)
