"""Checks that a link gets the state of its own device, in the form that it had when it left the
device.

A state that differs between devices is lost without an error where a loop takes it for a replicated
one: by `P()` in `out_specs` without types, or by an unreplicate and a replicate around a
checkpoint. Every device then gets the state of device 0.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardopt.core import PyTree, leaves_with_paths, type_error, value_error
from shardopt.core._axis import AxisName, axis_names, is_bound
from shardopt.core._device_state import DeviceNumber
from shardopt.reducers._axis import varying


def check_mesh(mesh: Mesh, axis_name: str) -> None:
    """Refuse a mesh that is none, or has no such axis."""
    if not isinstance(mesh, Mesh):
        raise type_error(f"mesh must be a jax.sharding.Mesh, got {mesh!r:.80}.")
    if not isinstance(axis_name, str):
        problem = f"it takes the name of one mesh axis, got {axis_name!r}."
        raise type_error(problem, fix="make a mesh where one axis splits the batch.")
    if axis_name not in mesh.axis_names:
        problem = f"the mesh has no axis {axis_name!r}, it has {mesh.axis_names}."
        raise value_error(problem, fix="name the axis that splits the batch.")


def number_of_device(axis_name: AxisName) -> DeviceNumber:
    """Return the number of this device along the axis; -1 where the axis is not bound."""
    if all(map(is_bound, axis_names(axis_name))):
        return DeviceNumber(jax.lax.axis_index(axis_name).astype(jnp.int32))
    return DeviceNumber(jnp.array(-1, jnp.int32))


def nan_for_state_of_another_device(
    number: DeviceNumber, axis_name: AxisName, updates: PyTree, *, agreed: bool = True
) -> PyTree:
    """Return the updates, or NaN if this device has the state of another one.

    If `agreed`, all devices return NaN where one has to; otherwise nothing is sent. A program
    cannot raise an error that depends on its numbers. NaN is seen at the next loss.
    """
    is_own = (number.value < 0) | (number.value == jax.lax.axis_index(axis_name))
    if agreed:
        is_own = jax.lax.pmin(is_own.astype(jnp.int32), axis_name) == 1
    return jax.tree.map(lambda u: jnp.where(is_own, u, jnp.nan).astype(u.dtype), updates)


def check_alike(tree: PyTree, axis_name: str, problem: str, fix: str) -> None:
    """Raise an error with this text if types show that leaves differ along an axis."""
    local = [path for path, leaf in leaves_with_paths(tree) if axis_name in varying(leaf)]
    if local:
        raise value_error(problem, local, fix)


def check_form(state: PyTree, expected: PyTree) -> None:
    """Refuse a state whose leaves have other shapes than the leaves of a device.

    Args:
      state: the state that `update` got.
      expected: the state that `init` makes on a device, as shapes and dtypes.

    Raises:
      ValueError: if there is such a leaf.
    """
    leaves = jax.tree.leaves(expected)
    if len(jax.tree.leaves(state)) != len(leaves):
        problem = "the state has another structure than the state that init makes."
        raise value_error(problem, fix="make it again with init.")
    wrong = [
        f"{path}: shape {jnp.shape(leaf)}, where a device has {like.shape}"
        for (path, leaf), like in zip(leaves_with_paths(state), leaves, strict=True)
        if jnp.shape(leaf) != like.shape
    ]
    if wrong:
        fix = (
            "between steps it is stacked [N, ...]: wrap the chain in so.transforms.on_mesh, whose"
            " update takes what shard_map hands in; its specs are the in_specs and out_specs."
        )
        raise value_error("the state is not in the form of one device.", wrong, fix)


def check_structure(old: PyTree, new: PyTree) -> None:
    """Refuse a state of `inner` whose structure changes in an update."""
    if jax.tree.structure(old) == jax.tree.structure(new):
        return
    problem = (
        "the update of inner returns a state of another structure. That of zero is cut only where"
        " its axis is bound."
    )
    fix = "make the state where the axis is bound, jax.pmap(tx.init, axis_name=...)(params)."
    raise value_error(problem, fix=fix)
