"""`zero` under `jit`: the partitioner keeps the state in shards, by constraints or by types."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from shardopt.core import (
    PyTree,
    calling,
    error_text,
    leaves_with_paths,
    plural,
    replaced,
    value_error,
)
from shardopt.mesh import spec_axes
from shardopt.partition._plan import largest_divisible_dim
from shardopt.transforms._watch import Place, may_watch, watch_shardings

FREE = PartitionSpec.UNCONSTRAINED


@dataclasses.dataclass(frozen=True)
class ByConstraints:
    """The form under `jit`: sharding constraints on gradients, state and updates.

    Explicit axes of a mesh are Auto while the optimizer runs: no optimizer is written for types of
    shardings.
    """

    tx: optax.GradientTransformationExtraArgs
    axis_name: str
    mesh_of_caller: Mesh | None

    def init(self, params: PyTree) -> PyTree:
        state = self.tx.init(params)
        mesh = self.mesh()
        # without a mesh: the axis of a pmap or shard_map that is opened later
        if mesh is None:
            return state
        self.check_params(params, mesh)
        if isinstance(mesh, Mesh):
            state = jax.tree.map(functools.partial(_on_mesh, mesh=mesh), state)
        specs = self.specs(state, mesh)
        return _with_auto_axes(lambda mesh, state: _constrain(state, specs, mesh), mesh, specs)(
            state
        )

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        mesh = self.mesh()
        if mesh is None:
            problem = f"axis {self.axis_name!r} is not bound here, and there is no mesh with it."
            fix = 'pass the mesh of the loop: so.transforms.zero(tx, "data", mesh).'
            raise value_error(problem, fix=fix)
        state = self.watched(state, mesh)
        specs = self.specs(updates, mesh)
        state_specs = self.specs(state, mesh)
        # Updates leave the optimizer whole along the axis, since parameters are.
        unsharded = jax.tree.map(self.unsharded_spec, specs)

        def run(mesh: Mesh | AbstractMesh, updates: PyTree, state: PyTree, params: PyTree, extra):
            # From here to the last constraint, every elementwise operation runs on 1/N of the
            # numbers.
            updates = _constrain(updates, specs, mesh)
            state = _constrain(state, state_specs, mesh)
            updates, state = self.tx.update(updates, state, params, **extra)
            return _constrain(updates, unsharded, mesh), _constrain(state, state_specs, mesh)

        return _with_auto_axes(run, mesh, (unsharded, state_specs))(updates, state, params, extra)

    def mesh(self) -> Mesh | AbstractMesh | None:
        """Return the mesh with the axis, if there is one."""
        mesh = self.mesh_of_caller or jax.sharding.get_abstract_mesh()
        return mesh if self.axis_name in mesh.axis_names else None

    def specs(self, tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
        """Return how each array is sharded: along the largest dim that its type leaves free."""

        def leaf_spec(leaf: Any) -> PartitionSpec:
            if not isinstance(leaf, jax.Array):
                return PartitionSpec()
            spec = jax.typeof(leaf).sharding.spec
            entries = [*spec, *[None] * (leaf.ndim - len(spec))]
            dim = largest_divisible_dim(leaf.shape, mesh.shape[self.axis_name], entries)
            if dim is not None and self.axis_name not in spec_axes(spec):
                entries[dim] = self.axis_name
            # FREE and not None: None would gather a dim that the partitioner shards over another
            # axis.
            return PartitionSpec(*[FREE if entry is None else entry for entry in entries])

        return jax.tree.map(leaf_spec, tree)

    def unsharded_spec(self, spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*[None if entry == self.axis_name else entry for entry in spec])

    def watched(self, state: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
        """Return the state, and warn, when the step is compiled, if leaves of it come in whole.

        Only the compiler knows how arrays of a program are sharded, and jax gives the program the
        address of a function to call with it.
        """
        if not may_watch() or mesh.shape[self.axis_name] == 1:
            return state
        all_leaves = leaves_with_paths(state)
        places = [
            i for i, (_, leaf) in enumerate(all_leaves) if self.axis_name in self.specs(leaf, mesh)
        ]
        leaves = [all_leaves[i] for i in places]
        arrays, treedef = jax.tree.flatten(state)
        watched = watch_shardings(
            [arrays[i] for i in places], lambda watched: self.warn_of_whole(leaves, watched)
        )
        return treedef.unflatten(replaced(arrays, places, watched))

    def check_params(self, params: PyTree, mesh: Mesh | AbstractMesh) -> None:
        """Warn if an Auto axis shards the dim of a parameter that this axis takes in the state."""
        taken = []
        for path, leaf in leaves_with_paths(params):
            spec = self.specs(leaf, mesh)
            # under jit only the compiler knows the sharding over Auto axes
            if self.axis_name not in spec or isinstance(leaf, Tracer):
                continue
            if not isinstance(leaf.sharding, NamedSharding):
                continue
            dim = spec.index(self.axis_name)
            axes = set(spec_axes(PartitionSpec(*leaf.sharding.spec[dim : dim + 1])))
            other_axes = sorted(
                name for name in axes - {self.axis_name} if mesh.shape.get(name, 1) > 1
            )
            if other_axes:
                taken.append(f"{path}: dim {dim} of shape {leaf.shape}, split by {other_axes}")
        if not taken:
            return
        problem = (
            f"{self.axis_name!r} takes dims that Auto axes shard in parameters. The state is"
            " sharded over fewer axes than it could be."
        )
        fix = "make these axes of the mesh Explicit: zero then takes a dim that is free."
        with calling("zero"):
            warnings.warn(error_text(problem, taken, fix), stacklevel=2)

    def warn_of_whole(self, leaves: list[tuple[str, jax.Array]], places: list[Place]) -> None:
        """Warn if leaves are whole along the axis."""
        whole_leaves = []
        num_bytes = 0
        for (path, leaf), (shape, sharding) in zip(leaves, places, strict=True):
            if not _is_whole(shape, sharding, self.axis_name):
                continue
            whole_leaves.append(f"{path}: shape {shape}")
            num_bytes += math.prod(shape) * leaf.dtype.itemsize
        if not whole_leaves:
            return
        count = f"{len(whole_leaves)} of {plural(len(leaves), 'leaf')} of the optimizer state"
        problem = (
            f"{count} come in unsharded along {self.axis_name!r}, {num_bytes:,} bytes on each"
            " device, though zero shards them."
        )
        fix = (
            "leave the state out of your out_shardings, in_shardings, filter_shard and device_put."
            " Place a restored state as the first one, jax.tree.map(lambda x: x.sharding,"
            " tx.init(params))."
        )
        with calling("zero"):
            warnings.warn(error_text(problem, whole_leaves, fix), stacklevel=2)


def _constrain(tree: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the tree with each array sharded by its spec.

    A count, or coefficients of muon, are placed on the mesh too: the second step would be compiled
    again otherwise.
    """

    def constrain_leaf(leaf: Any, spec: PartitionSpec) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(constrain_leaf, tree, specs)


def _on_mesh(leaf: Any, mesh: Mesh) -> Any:
    """Return a leaf that an eager `init` made on one device as a replicated array of the mesh."""
    if not isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding):
        return leaf
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))


def _with_auto_axes(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, out_specs: PyTree
) -> Callable[..., Any]:
    """Return `function(mesh, ...)` with all axes of the mesh Auto while it runs.

    Args:
      function: the function.
      mesh: the mesh of the caller.
      out_specs: the type of each result, from the axes that are Explicit on the mesh.
    """
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in axes if kind == AxisType.Explicit)
    if not explicit:
        return functools.partial(function, mesh)

    def explicit_part(spec: PartitionSpec) -> NamedSharding:
        entries = [entry if entry in explicit else None for entry in spec]
        return NamedSharding(mesh, PartitionSpec(*entries))

    def run(*args: PyTree) -> PyTree:
        return function(jax.sharding.get_abstract_mesh(), *args)

    shardings = jax.tree.map(explicit_part, out_specs)
    return jax.sharding.auto_axes(run, axes=explicit, out_sharding=shardings)


def _is_whole(shape: tuple[int, ...], sharding: Sharding, axis_name: str) -> bool:
    if isinstance(sharding, NamedSharding):
        return axis_name not in spec_axes(sharding.spec)
    return sharding.shard_shape(shape) == shape
