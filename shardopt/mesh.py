"""`make_mesh`: it infers axis sizes, and puts the devices that communicate most next to each other."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_state_clean  # jax has no public name for it
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardopt.core import calling, check_integer, value_error
from shardopt.core._place import check_joined
from shardopt.core._trace_context import trace_context, within_trace
from shardopt.core._tracebacks import api_boundary

AXES = ("replica", "data", "pipeline", "expert", "context", "tensor")
"""All mesh axes, outermost first: tensor neighbours are adjacent devices."""
_NO_MESH = AbstractMesh((), ())
_OPTIONAL_AXES = ("replica", "expert", "context")
"""Axes that a mesh has only if their size is above 1."""


@api_boundary
@calling("make_mesh")
def make_mesh(
    data: int = -1,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    replica: int = 1,
    context: int = 1,
    expert: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arrange the devices in a mesh with axes data, pipeline and tensor (and replica, expert and
    context, if above 1).

    Args:
      data: size of the data axis. At most one size may be -1; it is inferred from the number of
        devices.
      tensor: size of the tensor axis.
      pipeline: size of the pipeline axis.
      replica: size of the replica axis, which exists only if it is above 1.
      context: size of the context axis, which splits the positions of sequences. It exists only if
        it is above 1.
      expert: size of the expert axis, which exists only if it is above 1. It splits rows of the
        batch, as data does, and the experts of the leaves that a strategy's `rules` call experts.
      devices: the devices to use, in any shape; by default `jax.devices()`.

    Returns:
      A `jax.sharding.Mesh` with `AxisType.Auto` axes.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is zero or below -1, two sizes are -1, the product is not the device
        count, or there are no devices. If a launcher states several processes, and this one did not
        join them by `initialize`.

    Example:
      >>> import jax, shardopt as so
      >>> so.make_mesh(devices=jax.devices()[:1]).axis_names
      ('data', 'pipeline', 'tensor')

    **Order of devices**: tensor neighbours are adjacent devices. Then follow, from the inside out,
    context, expert, pipeline, data and replica. On TPU the mesh follows the physical torus. Several
    slices are put on replica and data.
    """
    if devices is None:
        # before `jax.devices()`: alone, each process would take the memory of all GPUs
        check_joined()
        devices = jax.devices()
    devices = list(np.asarray(devices, dtype=object).flat)
    if not devices:
        raise value_error("there are no devices.", fix="pass some, or leave devices out.")
    check_joined(devices[0])
    # in the order of `AXES`, which the mesh has too
    requested_sizes = {
        "replica": replica,
        "data": data,
        "pipeline": pipeline,
        "expert": expert,
        "context": context,
        "tensor": tensor,
    }
    sizes = _infer_sizes(requested_sizes, devices)
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis not in _OPTIONAL_AXES}
    grid = arrange(sizes, devices, num_outer_dims=len({"replica", "data"}.intersection(sizes)))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def spec_axes(spec: Iterable[str | tuple[str | None, ...] | None]) -> list[str]:
    """Return the mesh axes in a `PartitionSpec`, in the order of the dims."""
    return [
        axis
        for entry in spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
        if axis is not None
    ]


def size_along(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Return the number of devices along some axes together."""
    return math.prod(sizes[axis] for axis in axes)


def data_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes that split the rows of a batch: data, and replica and expert if the mesh has
    them.
    """
    return tuple(axis for axis in ("replica", "data", "expert") if axis in mesh.axis_names)


def axes_of_role(role: str) -> tuple[str, ...]:
    """Return the axes of the mesh under trace that play a role ("data", "tensor").

    A user's mesh may have other names.
    """
    roles = trace_context().roles
    if roles is not None:
        return roles.get(role, ())
    return (role,) if role in mesh_under_trace().axis_names else ()


def mesh_under_trace() -> AbstractMesh:
    """Return the mesh under trace, including a mesh that `trace_without_mesh` hides from jax."""
    return trace_context().hidden_mesh or jax.sharding.get_abstract_mesh()


def not_manual_axes() -> frozenset[str]:
    """Return the axes of the mesh under trace that are not manual yet.

    They include axes of size 1. jax refuses a kernel for TPU in a region that is not manual over
    all axes.
    """
    mesh = mesh_under_trace()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def manual_context_axes() -> dict[str, int]:
    """Return axis -> size of the context axes whose shards the function under trace sees."""
    mesh = mesh_under_trace()
    axes = (axis for axis in axes_of_role("context") if axis in mesh.manual_axes)
    return {axis: mesh.shape[axis] for axis in axes if mesh.shape[axis] > 1}


def trace_without_mesh(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f`, traced without a mesh in jax's types. Every mesh axis must be manual.

    Otherwise some arrays have a mesh in their types and some do not. The loops of equinox, which
    diffrax uses, then refuse them as different types. `mesh_under_trace` still returns the mesh,
    with every axis manual.
    """

    def run(*args: Any) -> Any:
        mesh = mesh_under_trace()
        manual_mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
        with within_trace(hidden_mesh=manual_mesh), jax.sharding.use_abstract_mesh(_NO_MESH):
            return f(*args)

    return run


@contextlib.contextmanager
def under_mesh(mesh: Mesh, roles: Mapping[str, tuple[str, ...]] | None = None) -> Iterator[None]:
    """Trace on this mesh inside the context, even if the user's program has set another mesh with
    `jax.set_mesh`.

    Args:
      mesh: the mesh.
      roles: role -> its axes, for a mesh with other axis names than `AXES`.
    """
    # jax refuses to change the size of a mesh that is set
    with (
        within_trace(roles=roles),
        jax.sharding.use_abstract_mesh(_NO_MESH),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context without a mesh of `jax.set_mesh`.

    jax refuses `set_mesh` inside of `jax.grad`, `jax.vmap` and others, with arrays that have values
    too. There the mesh is hidden from traces alone.
    """
    if trace_state_clean():
        return jax.set_mesh(None)
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def on_mesh(
    mesh: Mesh, f: Callable[..., Any], roles: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[..., Any]:
    """Return `f`, traced within `under_mesh`."""

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        with under_mesh(mesh, roles):
            return f(*args)

    return run


def analysis() -> contextlib.AbstractContextManager[None]:
    """Mark traces inside this context as an analysis: they only show how a loss uses the rows of a
    batch.
    """
    return within_trace(is_analysis=True)


def is_analysed() -> bool:
    """Return whether a trace is an analysis of a loss: a layer then uses its plain form, not a
    kernel.
    """
    return trace_context().is_analysis


def device_kind() -> str | None:
    """Return the kind of the devices of the mesh under trace, such as "cpu" or "TPU v4".

    None if jax does not know it.
    """
    return getattr(getattr(mesh_under_trace(), "abstract_device", None), "device_kind", None)


def device_kind_or_default() -> str:
    """Return `device_kind()`, or the kind of the default device, for a model that runs outside of
    every strategy.
    """
    return device_kind() or jax.devices()[0].device_kind


def _infer_sizes(requested_sizes: dict[str, int], devices: list[Any]) -> dict[str, int]:
    num_devices = len(devices)
    inferred_axis = _inferred_axis(requested_sizes)
    sizes_text = ", ".join(
        f"{axis}={size}"
        for axis, size in requested_sizes.items()
        if (axis, size) not in (("context", 1), ("expert", 1))
    )
    known_product = math.prod(size for size in requested_sizes.values() if size != -1)
    if inferred_axis is None and known_product != num_devices:
        problem = f"{sizes_text} needs {known_product} devices, but there are {num_devices}."
        fix = (
            f"set one size to -1, choose sizes whose product is {num_devices}, or pass"
            f" devices=jax.devices()[:{known_product}]."
        )
        if known_product > num_devices:
            fix = f"set one size to -1, or choose sizes whose product is {num_devices}."
            if devices[0].platform == "cpu":
                fix += f" JAX_NUM_CPU_DEVICES={known_product} simulates more devices."
        raise value_error(problem, fix=fix)
    if num_devices % known_product:
        problem = (
            f"cannot infer {inferred_axis}: {num_devices} devices are not divisible by"
            f" {known_product} ({sizes_text})."
        )
        raise value_error(problem, fix=f"choose sizes whose product divides {num_devices}.")
    return {
        axis: num_devices // known_product if size == -1 else int(size)
        for axis, size in requested_sizes.items()
    }


def _inferred_axis(requested_sizes: dict[str, int]) -> str | None:
    """Return the axis whose size is -1, if there is one, of sizes that are checked."""
    for axis, size in requested_sizes.items():
        check_integer(axis, size)
    invalid_sizes = [
        f"{axis}={size}" for axis, size in requested_sizes.items() if size < 1 and size != -1
    ]
    if invalid_sizes:
        raise value_error(
            f"sizes must be positive, or -1 for one of them; got {', '.join(invalid_sizes)}."
        )
    inferred_axes = [axis for axis, size in requested_sizes.items() if size == -1]
    if len(inferred_axes) > 1:
        problem = f"only one size can be -1, got {' and '.join(inferred_axes)}."
        raise value_error(problem, fix="give every size but one.")
    return inferred_axes[0] if inferred_axes else None


def arrange(sizes: dict[str, int], devices: list[Any], *, num_outer_dims: int) -> np.ndarray:
    """Return the devices in the shape of the mesh.

    Only its first `num_outer_dims` dims may cross slices.
    """
    shape = tuple(sizes.values())
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(slices) == 1:
        return _within_slice(sizes, devices)
    if len({len(members) for members in slices.values()}) > 1:
        sizes_text = ", ".join(f"slice {index}: {len(slices[index])}" for index in sorted(slices))
        fix = "pass as many devices of every slice."
        raise value_error(f"the slices have different sizes ({sizes_text}).", fix=fix)
    within, across = _over_slices(shape, len(slices), num_outer_dims)
    inner = dict(zip(sizes, within, strict=True))
    grids = np.stack([_within_slice(inner, slices[index]) for index in sorted(slices)])
    # along each mesh axis, slices come first, then the devices within a slice
    order = [i for dim in range(len(shape)) for i in (dim, dim + len(shape))]
    return grids.reshape(across + within).transpose(order).reshape(shape)


def _within_slice(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    shape = tuple(sizes.values())
    if devices[0].platform != "tpu":
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        return np.asarray(ordered).reshape(shape)
    if any(getattr(device, "core_on_chip", 0) for device in devices):
        return _over_cores(shape, devices)
    if all(sizes.get(axis, 1) == 1 for axis in ("expert", "context")):
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    # Weights are gathered over these axes together. If the devices lie as along one data axis,
    # XLA:TPU emits a gather, else an all-reduce.
    joined_axes = [axis for axis in ("data", "expert", "context") if axis in sizes]
    order = [
        *(axis for axis in sizes if axis not in (*joined_axes, "tensor")),
        *joined_axes,
        "tensor",
    ]
    grid_sizes = [sizes[axis] for axis in order if axis not in joined_axes]
    grid_sizes.insert(len(grid_sizes) - 1, size_along(sizes, joined_axes))
    grid = mesh_utils.create_device_mesh(grid_sizes, devices, allow_split_physical_axes=True)
    return grid.reshape([sizes[axis] for axis in order]).transpose(
        [order.index(axis) for axis in sizes]
    )


def _over_cores(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Arrange chips with several devices (cores): cores are neighbours on the innermost axis that
    their number divides.

    `mesh_utils` only arranges chips with one device each.
    """
    cores = 1 + max(device.core_on_chip for device in devices)
    dims = [dim for dim, size in enumerate(shape) if size % cores == 0]
    if not dims:
        problem = (
            f"chips have {cores} cores each, and none of the sizes {shape} is divisible by {cores}."
        )
        raise value_error(
            problem, fix="make one axis even, so that it can hold both cores of a chip."
        )
    dim = dims[-1]
    chips = tuple(size // cores if i == dim else size for i, size in enumerate(shape))
    device_at = {
        (device.process_index, tuple(device.coords), device.core_on_chip): device
        for device in devices
    }
    first_cores = [device for device in devices if device.core_on_chip == 0]
    grid = mesh_utils.create_device_mesh(chips, first_cores, allow_split_physical_axes=True)
    pick_core = np.vectorize(
        lambda device, core: device_at[device.process_index, tuple(device.coords), core], otypes="O"
    )
    return np.stack([pick_core(grid, core) for core in range(cores)], axis=dim + 1).reshape(shape)


def _over_slices(
    shape: tuple[int, ...], num_slices: int, num_outer_dims: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a mesh shape into a shape within a slice and a shape across slices.

    Only the first `num_outer_dims` dims cross slices.
    """
    within = list(shape)
    across = [1] * len(shape)
    remaining_slices = num_slices
    for dim in range(num_outer_dims):  # replica and data; the others stay inside a slice
        across[dim] = math.gcd(within[dim], remaining_slices)
        within[dim] //= across[dim]
        remaining_slices //= across[dim]
    if remaining_slices != 1:
        problem = (
            f"{num_slices} slices cannot be laid along replica and data, whose sizes are"
            f" {shape[:num_outer_dims]}."
        )
        raise value_error(problem, fix=f"choose data (times replica) divisible by {num_slices}.")
    return tuple(within), tuple(across)
