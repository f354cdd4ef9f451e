"""`make_mesh`: sizes that multiply up, and devices laid so that the busiest axis has the shortest wires."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardopt.core.arguments import is_integer
from shardopt.core.errors import format_error

AXES = ("replica", "data", "pipeline", "expert", "context", "tensor")
"""All mesh axes, outermost first: tensor neighbours are adjacent devices."""
_OPTIONAL = ("replica", "expert", "context")
"""Those that a mesh has only above size 1."""


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
    """Lay the devices out as a mesh with axes data, pipeline and tensor (and replica, expert and context, if above 1).

    Tensor neighbours are adjacent devices, context comes next, then expert and pipeline; data is outermost, replica outside
    it. On TPU the physical torus is respected; several slices are put on replica and data.

    Args:
      data: size of the data axis; at most one size may be -1, which takes what the others leave.
      tensor: size of the tensor axis.
      pipeline: size of the pipeline axis.
      replica: size of the replica axis, which exists only when it is above 1.
      context: size of the context axis, which splits the positions of sequences and exists only when it is above 1.
      expert: size of the expert axis, which splits the experts of leaves that a strategy's `expert_leaves` name, and rows
        of the batch as data does; it exists only when it is above 1.
      devices: the devices to use, in whatever shape; by default `jax.devices()`.

    Returns:
      A `jax.sharding.Mesh` with `AxisType.Auto` axes.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is zero or below -1, two are -1, the product is not the device count, or there are no
        devices.

    Example:
      >>> import jax, shardopt as so
      >>> so.make_mesh(devices=jax.devices()[:1]).axis_names
      ('data', 'pipeline', 'tensor')
    """
    devices = jax.devices() if devices is None else list(np.asarray(devices, dtype=object).flat)
    if not devices:
        raise ValueError(format_error("make_mesh", "there are no devices.", fix="pass some, or leave devices out."))
    asked = {"replica": replica, "data": data, "pipeline": pipeline}
    asked |= {"expert": expert, "context": context, "tensor": tensor}
    sizes = _infer_sizes({axis: asked[axis] for axis in AXES}, len(devices))
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis not in _OPTIONAL}
    grid = _arrange(sizes, devices, outer=len([axis for axis in sizes if axis in ("replica", "data")]))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def spec_axes(spec: Iterable[str | tuple[str | None, ...] | None]) -> list[str]:
    """Return the mesh axes that a `PartitionSpec` names, in the order of the dims."""
    return [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None]


def data_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes that the rows of a batch are split over: data, and replica and expert where there are such."""
    return tuple(axis for axis in ("replica", "data", "expert") if axis in mesh.axis_names)


_roles: ContextVar[Mapping[str, tuple[str, ...]] | None] = ContextVar("roles", default=None)


def axes_of_role(role: str) -> tuple[str, ...]:
    """Return the axes of the mesh under trace that play a role ("data", "tensor"): a user's mesh may call them otherwise."""
    roles = _roles.get()
    if roles is not None:
        return roles.get(role, ())
    return (role,) if role in mesh_under_trace().axis_names else ()


_under_trace: ContextVar[AbstractMesh | None] = ContextVar("mesh under trace", default=None)


def mesh_under_trace() -> AbstractMesh:
    """Return the mesh under trace, also where jax is not told of it."""
    return _under_trace.get() or jax.sharding.get_abstract_mesh()


def without_types(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` traced without jax knowing of the mesh, which may be done where every axis is manual.

    Arrays then have no mesh in their types. With it some have and some have not, and equinox's loops, which diffrax is
    made of, take these for others. `mesh_under_trace` still tells of it, with every axis manual.
    """

    def run(*args: Any) -> Any:
        mesh = mesh_under_trace()
        token = _under_trace.set(mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual)))
        try:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return f(*args)
        finally:
            _under_trace.reset(token)

    return run


def on_mesh(
    mesh: Mesh, f: Callable[..., Any], roles: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[..., Any]:
    """Return `f` traced on this mesh, whatever mesh the user's program has set with `jax.set_mesh`.

    Args:
      mesh: the mesh.
      f: the function.
      roles: role -> its axes, where they have other names than ours.
    """

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        token = _roles.set(roles)
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return f(*args)
        finally:
            _roles.reset(token)

    return run


_analysed: ContextVar[bool] = ContextVar("analysed", default=False)


@contextlib.contextmanager
def analysis() -> Iterator[None]:
    """Say, while a loss is traced, that it is only to be seen what it does with rows."""
    token = _analysed.set(True)
    try:
        yield
    finally:
        _analysed.reset(token)


def is_analysed() -> bool:
    """Return whether a loss is traced only to see what it does with rows: then a layer shows its plain form, not a kernel."""
    return _analysed.get()


def device_kind() -> str | None:
    """Return the kind of the devices of the mesh under trace ("cpu", "TPU v4"); None where jax does not tell."""
    return getattr(getattr(mesh_under_trace(), "abstract_device", None), "device_kind", None)


def device_kind_or_default() -> str:
    """Return `device_kind()`, or the kind of the default device, on which a model runs that no strategy has."""
    return device_kind() or jax.devices()[0].device_kind


def _infer_sizes(asked: dict[str, int], count: int) -> dict[str, int]:
    listed = ", ".join(
        f"{axis}={size}" for axis, size in asked.items() if (axis, size) not in (("context", 1), ("expert", 1))
    )
    for axis, size in asked.items():
        if not is_integer(size):
            raise TypeError(f"make_mesh: {axis} must be an integer, got {size!r} ({type(size).__name__}).")
    if bad := [f"{axis}={size}" for axis, size in asked.items() if size < 1 and size != -1]:
        raise ValueError(
            format_error("make_mesh", f"sizes must be positive, or -1 for one of them; got {', '.join(bad)}.")
        )
    unknown = [axis for axis, size in asked.items() if size == -1]
    if len(unknown) > 1:
        fix = "give every size but one."
        raise ValueError(format_error("make_mesh", f"only one size can be -1, got {' and '.join(unknown)}.", fix=fix))
    known = math.prod(size for size in asked.values() if size != -1)
    if unknown and count % known:
        what = f"cannot infer {unknown[0]}: {count} devices are not divisible by {known} ({listed})."
        raise ValueError(format_error("make_mesh", what, fix=f"choose sizes whose product divides {count}."))
    if not unknown and known != count:
        what = f"{listed} needs {known} devices, but there are {count}."
        fix = f"set one size to -1, choose sizes whose product is {count}, or pass devices=jax.devices()[:{known}]."
        if known > count:
            fix = f"set one size to -1, or choose sizes whose product is {count}."
        raise ValueError(format_error("make_mesh", what, fix=fix))
    return {axis: count // known if size == -1 else int(size) for axis, size in asked.items()}


def _arrange(sizes: dict[str, int], devices: list[Any], *, outer: int) -> np.ndarray:
    """Return the devices in a shape whose first `outer` dims may go from slice to slice."""
    shape = tuple(sizes.values())
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(slices) == 1:
        return _within_slice(sizes, devices)
    if len({len(members) for members in slices.values()}) > 1:
        listed = ", ".join(f"slice {index}: {len(slices[index])}" for index in sorted(slices))
        fix = "pass as many devices of every slice."
        raise ValueError(format_error("make_mesh", f"the slices have different sizes ({listed}).", fix=fix))
    within, across = _over_slices(shape, len(slices), outer)
    inner = dict(zip(sizes, within, strict=True))
    grids = np.stack([_within_slice(inner, slices[index]) for index in sorted(slices)])
    # each mesh axis counts slices first, then devices within one
    order = [axis for dim in range(len(shape)) for axis in (dim, dim + len(shape))]
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
    # Weights are gathered over these together: laid as data alone, that is a gather; else XLA:TPU makes it an all-reduce.
    together = [axis for axis in ("data", "expert", "context") if axis in sizes]
    order = [*(axis for axis in sizes if axis not in (*together, "tensor")), *together, "tensor"]
    joined = [sizes[axis] for axis in order if axis not in together]
    joined.insert(len(joined) - 1, math.prod(sizes[axis] for axis in together))
    grid = mesh_utils.create_device_mesh(joined, devices, allow_split_physical_axes=True)
    return grid.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in sizes])


def _over_cores(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Arrange chips that show up as several devices: their cores become neighbours on the innermost axis they divide.

    `mesh_utils` arranges chips only, one device each.
    """
    cores = 1 + max(device.core_on_chip for device in devices)
    dims = [dim for dim, size in enumerate(shape) if size % cores == 0]
    if not dims:
        what = f"chips have {cores} cores each, and none of the sizes {shape} is divisible by {cores}."
        raise ValueError(
            format_error("make_mesh", what, fix="make one axis even, so that it can hold both cores of a chip.")
        )
    dim = dims[-1]
    chips = tuple(size // cores if at == dim else size for at, size in enumerate(shape))
    by_place = {(device.process_index, tuple(device.coords), device.core_on_chip): device for device in devices}
    first = [device for device in devices if device.core_on_chip == 0]
    grid = mesh_utils.create_device_mesh(chips, first, allow_split_physical_axes=True)
    pick = np.vectorize(lambda device, core: by_place[device.process_index, tuple(device.coords), core], otypes="O")
    return np.stack([pick(grid, core) for core in range(cores)], axis=dim + 1).reshape(shape)


def _over_slices(shape: tuple[int, ...], slices: int, outer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a mesh shape into the part within a slice and the part across slices, outermost axes across."""
    within, across, left = list(shape), [1] * len(shape), slices
    for dim in range(outer):  # replica and data; the others stay inside a slice
        across[dim] = math.gcd(within[dim], left)
        within[dim] //= across[dim]
        left //= across[dim]
    if left != 1:
        what = f"{slices} slices cannot be laid along replica and data, whose sizes are {shape[:outer]}."
        raise ValueError(format_error("make_mesh", what, fix=f"choose data (times replica) divisible by {slices}."))
    return tuple(within), tuple(across)
