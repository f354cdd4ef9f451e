"""The user's own mesh: the names of its axes, and the arrays that live on it.

The step runs on a mesh with our own axis names, with the same devices in the same order and Auto
axes. Inputs and outputs of the compiled programs (state, batch, metrics) live on the user's mesh,
whose shardings are equivalent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardopt.config._axes import TABLE
from shardopt.core import PyTree, Rule, Rules, is_array_like, quoted, type_error, value_error
from shardopt.mesh import AXES, on_mesh, size_along, spec_axes
from shardopt.partition._rules import check_rules


class Axes(NamedTuple):
    """Your own mesh, and the names of its axes: for each role one name, or several names.

    A role without an axis in the mesh has size 1. Several names are one merged axis: `Axes(mesh,
    data=("dp", "fsdp"))` shards over both axes. `Axes(mesh, replica="dp", data="fsdp")` copies over
    dp and shards over fsdp (HSDP).

    Attributes:
      mesh: the mesh.
      data: splits rows of the batch, and all leaves that the placement shards.
      tensor: splits inner dims of leaves, by rule. Rules use the names of the mesh.
      replica: splits rows of the batch; parameters are copied.
      pipeline: splits blocks of the model.
      context: splits positions of sequences; leaves that the placement shards are sharded over data
        and context together.
      expert: splits rows of the batch, and the experts of leaves that `rules` call experts. Other
        leaves that the placement shards are sharded over data and expert together.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> mesh = jax.make_mesh((len(jax.devices()), 1), ("dp", "tp"))
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> opt = so.fsdp(optax.sgd(0.1), so.Axes(mesh, data="dp", tensor="tp"), loss_fn)
      >>> state = opt.init({"w": jnp.ones((4,))})
      >>> state.params["w"].sharding.mesh == mesh
      True
    """

    mesh: Mesh
    data: str | Sequence[str] = "data"
    tensor: str | Sequence[str] = "tensor"
    replica: str | Sequence[str] = "replica"
    pipeline: str | Sequence[str] = "pipeline"
    context: str | Sequence[str] = "context"
    expert: str | Sequence[str] = "expert"


class UserMesh(NamedTuple):
    """The user's mesh, and the role of each of its axes.

    Attributes:
      mesh: the mesh that the user passed.
      axes: role -> its axes, in the order of the mesh.
    """

    mesh: Mesh
    axes: dict[str, tuple[str, ...]]

    @property
    def auto(self) -> Mesh:
        """The same mesh with Auto axes."""
        return Mesh(
            self.mesh.devices,
            self.mesh.axis_names,
            axis_types=(AxisType.Auto,) * self.mesh.devices.ndim,
        )

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return a spec of roles as a spec of the user's axes, without axes of size 1."""
        entries = []
        for entry in spec:
            roles = spec_axes((entry,))
            entries.append(tuple(axis for role in roles for axis in self._sharded_axes(role)))
        return PartitionSpec(*entries)

    def specs(self, specs: PyTree) -> PyTree:
        """Return a tree of specs of roles as specs of the user's axes."""
        return jax.tree.map(self.spec, specs)

    def shardings(self, specs: PyTree) -> PyTree:
        """Return a tree of specs of roles as `NamedSharding` on the user's mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, self.spec(spec)), specs)

    def rules(self, rules: Rules) -> Rules:
        """Return rules that name the user's axes as rules that name roles."""
        return tuple(map(self._rule, check_rules(rules, axes=None)))

    def _rule(self, rule: Rule) -> Rule:
        if callable(rule):
            return lambda path, shape: self._roles(rule(path, shape))
        return rule[0], self._roles(rule[1])

    def _roles(self, what: Any) -> Any:
        return PartitionSpec(*map(self._role, what)) if isinstance(what, PartitionSpec) else what

    def _role(self, entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        named = set(entry) if isinstance(entry, tuple) else {entry}
        for role, axes in self.axes.items():
            if named <= set(axes) and named >= set(self._sharded_axes(role)):
                return role
        return entry

    def _sharded_axes(self, role: str) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes.get(role, ()) if self.mesh.shape[axis] > 1)


def on_auto_axes(sharding: Any) -> Any:
    """Return a sharding on Explicit axes as the same sharding on Auto axes.

    Return any other sharding unchanged.
    """
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return sharding
    assert isinstance(sharding.mesh, Mesh)
    return NamedSharding(UserMesh(sharding.mesh, {}).auto, sharding.spec)


def abstract_on_auto_axes(leaf: Any) -> Any:
    """Return a leaf as its shape, dtype and sharding.

    A number is returned as it is, because its type is weak.
    """
    if not is_array_like(leaf):
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=on_auto_axes(getattr(leaf, "sharding", None))
    )


def put_on_auto_axes(leaf: Any) -> Any:
    """Return an array on the Auto mesh of its sharding; anything else as it is."""
    sharding = getattr(leaf, "sharding", None)
    return (
        leaf if on_auto_axes(sharding) is sharding else jax.device_put(leaf, on_auto_axes(sharding))
    )


def on_auto_mesh(sharding: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function traced within the mesh of a sharding, with Auto axes.

    The function itself without a mesh.
    """
    auto_sharding = on_auto_axes(sharding)
    mesh = auto_sharding.mesh if isinstance(auto_sharding, NamedSharding) else None
    return on_mesh(mesh, run) if isinstance(mesh, Mesh) else run


def read_mesh(mesh: Mesh, names: Axes | None, *, pipelined: bool) -> tuple[Mesh, UserMesh]:
    """Return a mesh with our axis names, every axis that strategies need, all Auto.

    And the user's mesh.

    Raises:
      TypeError: if the mesh is not a `Mesh`, or the names are not `Axes`.
      ValueError: if a name is used twice or is not an axis of the mesh. If a name is not ASCII, or
        has a backslash. If the mesh has no axis for data or, pipelined, for pipeline. If an axis
        above 1 has no role, or the axes of a role are not next to each other.
    """
    if not isinstance(mesh, Mesh):
        raise type_error(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Fix: use so.make_mesh()."
        )
    # XLA reads names as escaped text, and ends the process on others
    unreadable_names = [name for name in mesh.axis_names if "\\" in ascii(name)]
    if unreadable_names:
        problem = f"XLA cannot read these names of mesh axes: {unreadable_names}."
        raise value_error(problem, fix="use ASCII letters, digits and _.")
    axes = _axes_of_roles(mesh, Axes(mesh) if names is None else names)
    role_of = {axis: role for role, role_axes in axes.items() for axis in role_axes}
    _check_roles(mesh, role_of, pipelined)
    _check_neighbours(mesh, role_of)
    # The same devices with all axes, as Auto: jax.make_mesh makes Explicit axes, and the
    # partitioner can only handle the tensor axis if it is Auto.
    order = [*dict.fromkeys(role_of[axis] for axis in mesh.axis_names if axis in role_of)]
    order += [role for role in ("pipeline", "tensor") if role not in order]
    sizes = [size_along(mesh.shape, axes.get(role, ())) for role in order]
    grid = mesh.devices.reshape(sizes)
    return Mesh(grid, tuple(order), axis_types=(AxisType.Auto,) * len(order)), UserMesh(mesh, axes)


def _axes_of_roles(mesh: Mesh, names: Axes) -> dict[str, tuple[str, ...]]:
    """Return role -> its axes, in the order of the mesh, for the roles that the mesh has."""
    named_axes = {
        role: _axes_named(mesh, role, names_of_role)
        for role, names_of_role in names._asdict().items()
        if role != "mesh"
    }
    all_axes = [axis for axes in named_axes.values() for axis in axes]
    repeated = sorted({axis for axis in all_axes if all_axes.count(axis) > 1})
    if repeated:
        problem = f"mesh axis {quoted(repeated)} has two roles: {names[1:]}."
        raise value_error(problem, fix="give each axis one role.")
    return {role: named_axes[role] for role in AXES if named_axes[role]}


def _axes_named(mesh: Mesh, role: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the axes of the mesh that one role names, in the order of the mesh."""
    axes = (names,) if isinstance(names, str) else names
    if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
        fix = 'write so.Axes(mesh, data="dp", tensor="tp"); several axes of one role as a tuple.'
        raise type_error(f"{role} of so.Axes must name mesh axes, got {names!r}.", fix=fix)
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    # the name of the role itself is the default, which a mesh need not have
    if missing and names != role:
        problem = (
            f"{role} of so.Axes names {quoted(missing)}, but the mesh has axes {mesh.axis_names}."
        )
        raise value_error(problem, fix="name axes of the mesh.")
    return tuple(axis for axis in mesh.axis_names if axis in axes)


def _check_roles(mesh: Mesh, role_of: dict[str, str], pipelined: bool) -> None:
    """Refuse, by a ValueError, a role that no axis has, and an axis above 1 that splits nothing."""
    for role in ("data", "pipeline") if pipelined else ("data",):
        if role not in role_of.values():
            problem = f"the mesh has axes {mesh.axis_names}, none of them {role!r}."
            fix = (
                f"make the mesh with so.make_mesh({role}=...), or say which axis it is:"
                f" so.Axes(mesh, {role}=...)."
            )
            raise value_error(problem, fix=fix)
    known_roles = {role for role, row in TABLE.items() if pipelined or row.splits != "blocks"}
    for axis, size in mesh.shape.items():
        if size == 1 or role_of.get(axis) in known_roles:
            continue
        problem = f"mesh axis {axis!r} (size {size}) is above 1, but nothing is split over it."
        data_axes = [name for name in mesh.axis_names if role_of.get(name) == "data"]
        fix = (
            "use the axes data, tensor, pipeline, context, expert, replica, or say what it is:"
            f" so.Axes(mesh, data={(*data_axes, axis)!r}), or tensor={axis!r}."
        )
        if axis in role_of:
            fix = "use so.hybrid, or make the mesh with pipeline=1."
        raise value_error(problem, fix=fix)


def _check_neighbours(mesh: Mesh, role_of: dict[str, str]) -> None:
    order = [role_of[axis] for axis, size in mesh.shape.items() if size > 1]
    runs = [role for i, role in enumerate(order) if i == 0 or order[i - 1] != role]
    separated = [role for role in dict.fromkeys(runs) if runs.count(role) > 1]
    if separated:
        problem = (
            f"the axes of {' and '.join(separated)} are not next to each other in the mesh"
            f" {dict(mesh.shape)}."
        )
        raise value_error(problem, fix="make the mesh with the axes of one role side by side.")
