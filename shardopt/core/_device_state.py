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
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.core._arguments import check_count
from shardopt.core._axis import AxisName, axis_names
from shardopt.core._errors import calling, format_error
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


@calling("init_state")
def init_state(
    tx: optax.GradientTransformation, params: PyTree, axis_name: AxisName, axis_size: int
) -> PyTree:
    """Return `tx.init(params)` in the stored form: leaves that differ between devices are stacked
    to [N, ...].

    Call it outside `shard_map`. It also works for transformations whose `init` needs the axis
    (`shard_updates`), and for abstract parameters under `jax.eval_shape`.

    Args:
      tx: an optax transformation, or a `Reducer`.
      params: parameters, the same on all devices.
      axis_name: the axis that the state will be sharded over.
      axis_size: N, the number of devices along the axis.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> tx = so.transforms.average_gradients("data", so.reducers.error_feedback(so.reducers.int8()))
      >>> state = so.reducers.init_state(tx, {"w": jnp.zeros(3)}, "data", axis_size=4)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]
      [(4, 3)]
      >>> so.reducers.state_specs(state, "data").reducer.memory.value["w"] == jax.P("data")
      True
    """
    check_count("axis_size", axis_size)
    names = axis_names(axis_name)
    if len(names) > 1:
        fix = (
            "make the state for one axis; stacked leaves can be sharded over several by"
            " state_specs."
        )
        raise ValueError(
            format_error(
                "init_state", f"one axis is bound to make a state, got {names!r}.", fix=fix
            )
        )
    stacked_init = jax.vmap(
        lambda _: tx.init(params), axis_name=next(iter(names)), axis_size=int(axis_size)
    )
    return _map(stacked_init(jnp.zeros(int(axis_size))), lambda leaf: leaf, lambda leaf: leaf[0])


@calling("stack_state")
def stack_state(state: PyTree, axis_size: int) -> PyTree:
    """Return the stored form of a state that is still equal on all devices: marked leaves are
    repeated to [N, ...].
    """
    check_count("axis_size", axis_size)

    def repeat(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((int(axis_size), *leaf.shape), leaf.dtype)
        return jnp.broadcast_to(leaf, (int(axis_size), *jnp.shape(leaf)))

    return _map(state, repeat, lambda leaf: leaf)


@calling("state_specs")
def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """Return the `PartitionSpec`s of a state in the stored form.

    Marked leaves are sharded over the axis. All other leaves are replicated.
    """
    names = axis_names(axis_name)
    sharded = PartitionSpec(names[0] if len(names) == 1 else names)
    return _map(state, lambda leaf: sharded, lambda leaf: PartitionSpec())


def own_state(state: PyTree) -> PyTree:
    """Convert a state from the stored to the local form, inside `shard_map`: marked leaves lose
    their first dim of 1.
    """
    return _map(state, lambda leaf: leaf.reshape(leaf.shape[1:]), lambda leaf: leaf)


def stored_state(state: PyTree) -> PyTree:
    """Convert a state from the local to the stored form, the inverse of `own_state`.

    Marked leaves get a first dim of 1, which `shard_map` concatenates over the axis.
    """
    return _map(state, lambda leaf: jnp.asarray(leaf)[None], lambda leaf: leaf)


@calling("resize_state")
def resize_state(state: PyTree, axis_size: int) -> PyTree:
    """Return a state in the stored form for another axis size: each device gets the mean of the
    error memories.

    The next `reduce` adds the mean of the memories to the mean of the gradients, so nothing is
    lost.

    Args:
      state: a state in the stored form, with marked leaves [N, ...].
      axis_size: the new N.

    Returns:
      The state with error memories [axis_size, ...].

    Raises:
      ValueError: if the state holds leaves marked `PerDevice`. They have no meaning on other
        devices.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> memory = so.reducers.ErrorFeedback({"w": jnp.array([[1.0], [3.0]])})
      >>> so.reducers.resize_state(memory, axis_size=3).value["w"].tolist()
      [[2.0], [2.0], [2.0]]
    """
    check_count("axis_size", axis_size)
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_marked)
    if per_device_paths := [
        path_text(path)
        for path, node in nodes
        if isinstance(node, PerDevice) and jax.tree.leaves(node)
    ]:
        problem = "state that belongs to its device cannot be carried to another axis size."
        fix = (
            "make it again with init_state, or use so.zero or so.ddp, whose state can be resharded."
        )
        raise ValueError(format_error("resize_state", problem, per_device_paths, fix))

    def merge(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(merge_replicas(leaf), (int(axis_size), *leaf.shape[1:]))

    return _map(state, merge, lambda leaf: leaf)


def _is_marked(node: object) -> bool:
    return isinstance(node, PerDevice | ErrorFeedback)


def _map(
    state: PyTree, map_marked: Callable[[PyTree], PyTree], map_unmarked: Callable[[PyTree], PyTree]
) -> PyTree:
    """Apply one function to the leaves under marks, and another function to all other leaves."""

    def map_node(node):
        return jax.tree.map(map_marked, node) if _is_marked(node) else map_unmarked(node)

    return jax.tree.map(map_node, state, is_leaf=_is_marked)
