"""State that differs between devices: how it is marked, stored as global arrays, and carried to another axis size.

Inside the axis a device sees its own part, like everything else. Outside, between steps and in a checkpoint, such a
leaf is an array [N, ...] whose first dim is sharded over the axis; all other state is replicated. The
marks are pytree nodes, so these functions find them in any state: that of a reducer, of an optax chain, a TrainState.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, merge_replicas, path_text
from shardopt.reducers.axis import AxisName, axis_names


class PerDevice(NamedTuple):
    """State whose leaves differ between devices.

    Attributes:
      value: a tree.
    """

    value: PyTree


class ErrorFeedback(NamedTuple):
    """What a device has not sent yet: differs between devices, and only its mean matters to what is to come.

    Attributes:
      value: a tree like the gradients, in fp32 at least.
    """

    value: PyTree


def init_state(tx: optax.GradientTransformation, params: PyTree, axis_name: AxisName, axis_size: int) -> PyTree:
    """Return `tx.init(params)` in the stored form: leaves that differ between devices stacked [N, ...].

    Works outside the axis, also for transformations whose `init` needs it (`shard_updates`), and for abstract
    parameters under `jax.eval_shape`.

    Args:
      tx: a transformation, or a `Reducer`.
      params: parameters, the same on all devices.
      axis_name: the axis that the state will live on.
      axis_size: N.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> tx = so.transforms.average_gradients("data", so.reducers.error_feedback(so.reducers.int8()))
      >>> state = so.reducers.init_state(tx, {"w": jnp.zeros(3)}, "data", axis_size=4)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]
      [(4, 3)]
      >>> so.reducers.state_specs(state, "data").reducer.memory.value["w"] == jax.P("data")
      True
    """
    check_count("init_state", "axis_size", axis_size)
    names = axis_names("init_state", axis_name)
    if len(names) > 1:
        fix = "make the state for one axis; stacked leaves can be sharded over several by state_specs."
        raise ValueError(format_error("init_state", f"one axis is bound to make a state, got {names!r}.", fix=fix))
    run = jax.vmap(lambda _: tx.init(params), axis_name=next(iter(names)), axis_size=int(axis_size))
    return _map(run(jnp.zeros(int(axis_size))), lambda leaf: leaf, lambda leaf: leaf[0])


def stack_state(state: PyTree, axis_size: int) -> PyTree:
    """Return the stored form of a state that is still the same on all devices: marked leaves repeated [N, ...]."""
    check_count("stack_state", "axis_size", axis_size)

    def repeat(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((int(axis_size), *leaf.shape), leaf.dtype)
        return jnp.broadcast_to(leaf, (int(axis_size), *jnp.shape(leaf)))

    return _map(state, repeat, lambda leaf: leaf)


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """Return the specs of a state in the stored form: marked leaves sharded over the axis, the others replicated."""
    names = axis_names("state_specs", axis_name)
    sharded = PartitionSpec(names[0] if len(names) == 1 else names)
    return _map(state, lambda leaf: sharded, lambda leaf: PartitionSpec())


def own_state(state: PyTree) -> PyTree:
    """Return what a device sees of a state in the stored form: inside `shard_map`, marked leaves lose the dim of 1."""
    return _map(state, lambda leaf: leaf.reshape(leaf.shape[1:]), lambda leaf: leaf)


def stored_state(state: PyTree) -> PyTree:
    """Undo `own_state`: marked leaves get a first dim of 1, which `shard_map` concatenates over the axis."""
    return _map(state, lambda leaf: jnp.asarray(leaf)[None], lambda leaf: leaf)


def resize_state(state: PyTree, axis_size: int) -> PyTree:
    """Return a state in the stored form for another axis size: each device gets the mean of the error memories.

    What the next reduce adds to the mean of the gradients is the mean of the memories, so nothing is lost.

    Args:
      state: marked leaves [N, ...].
      axis_size: the new N.

    Returns:
      The state with error memories [axis_size, ...].

    Raises:
      ValueError: if the state holds leaves marked `PerDevice`, which have no meaning on other devices.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> memory = so.reducers.ErrorFeedback({"w": jnp.array([[1.0], [3.0]])})
      >>> so.reducers.resize_state(memory, axis_size=3).value["w"].tolist()
      [[2.0], [2.0], [2.0]]
    """
    check_count("resize_state", "axis_size", axis_size)
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_marked)
    if tied := [path_text(path) for path, node in nodes if isinstance(node, PerDevice) and jax.tree.leaves(node)]:
        what = "state that belongs to its device cannot be carried to another axis size."
        fix = "make it again with init_state, or use so.zero or so.ddp, whose state can be resharded."
        raise ValueError(format_error("resize_state", what, tied, fix))

    def merge(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(merge_replicas(leaf), (int(axis_size), *leaf.shape[1:]))

    return _map(state, merge, lambda leaf: leaf)


def _is_marked(node: object) -> bool:
    return isinstance(node, PerDevice | ErrorFeedback)


def _map(state: PyTree, marked: Callable[[PyTree], PyTree], other: Callable[[PyTree], PyTree]) -> PyTree:
    def node(one):
        return jax.tree.map(marked, one) if _is_marked(one) else other(one)

    return jax.tree.map(node, state, is_leaf=_is_marked)
