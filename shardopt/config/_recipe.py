"""How a strategy is made again in another process: the call that made it, with the shape of its
mesh in place of devices.
"""

import copyreg
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardopt.config._user_mesh import Axes
from shardopt.core import calling, plural, value_error
from shardopt.mesh import arrange


class MeshShape(NamedTuple):
    """A mesh without its devices.

    Attributes:
      sizes: axis -> size.
      axis_types: of the axes.
      data_axis: the axis that becomes longer or shorter if there are other devices.
      device_ids: the ids of the devices, in the order of the mesh.
      device_kind: the kind of the devices.
      has_all: whether the mesh has all devices of the job.
    """

    sizes: dict[str, int]
    axis_types: tuple[AxisType, ...]
    data_axis: str | None
    device_ids: tuple[int, ...]
    device_kind: str
    has_all: bool

    def build(self) -> Mesh:
        """Return the mesh on the devices of this process's job.

        The same devices have the same places. Other devices are arranged as `so.make_mesh` arranges
        them. A mesh of all devices takes all, and its data axis gets the size that is left.

        Raises:
          ValueError: if there are too few devices, or their number is not divisible by the other
            axes.
        """
        devices = {device.id: device for device in jax.devices()}
        has_same = all(
            id in devices and devices[id].device_kind == self.device_kind for id in self.device_ids
        )
        sizes = self.sizes
        if has_same and (len(devices) == len(self.device_ids) or not self.has_all):
            ordered = [devices[id] for id in self.device_ids]
            grid = np.asarray(ordered, dtype=object).reshape(list(sizes.values()))
        else:
            sizes = self._sizes_for(len(devices))
            chosen = list(devices.values())[: math.prod(sizes.values())]
            num_outer_dims = 1 + list(sizes).index(self.data_axis) if self.data_axis else 0
            grid = arrange(sizes, chosen, num_outer_dims=num_outer_dims)
        return Mesh(grid, tuple(sizes), axis_types=self.axis_types)

    def _sizes_for(self, num_devices: int) -> dict[str, int]:
        wanted = len(self.device_ids)
        if num_devices == wanted or (num_devices > wanted and not self.has_all):
            return self.sizes
        sizes_text = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        other = wanted // self.sizes.get(self.data_axis or "", wanted)
        if not self.has_all or self.data_axis is None or num_devices % other:
            problem = (
                f"the strategy was made for a mesh of {plural(wanted, 'device')} ({sizes_text}), and"
                f" this process has {num_devices}."
            )
            fix = (
                "make the strategy here, on a mesh of these devices, or send it to as many devices."
            )
            raise value_error(problem, fix=fix)
        return {**self.sizes, self.data_axis: num_devices // other}


class Recipe(NamedTuple):
    """The call that made a strategy.

    Attributes:
      function: the function, such as `so.fsdp`; a name leads to it.
      args: its positional arguments.
      keywords: its keyword arguments.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    keywords: Mapping[str, Any]

    def without_devices(self) -> "Recipe":
        """Return the call with the shapes of its meshes."""
        return self._map(_shape_of)

    def call(self) -> Any:
        """Make the strategy, with meshes of the devices here."""
        with calling(self.function.__name__):
            call = self._map(_mesh_of)
        return call.function(*call.args, **call.keywords)

    def _map(self, convert: Callable[[Any], Any]) -> "Recipe":
        keywords = {name: convert(value) for name, value in self.keywords.items()}
        return Recipe(self.function, [convert(value) for value in self.args], keywords)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Axes) and isinstance(value.mesh, Mesh):
        data = (value.data,) if isinstance(value.data, str) else value.data
        return value._replace(mesh=_mesh_shape(value.mesh, data))
    return _mesh_shape(value, ("data",)) if isinstance(value, Mesh) else value


def _mesh_shape(mesh: Mesh, data_axes: Sequence[str]) -> MeshShape:
    devices = list(mesh.devices.flat)
    data_axis = next((axis for axis in mesh.axis_names if axis in data_axes), None)
    return MeshShape(
        dict(mesh.shape),
        mesh.axis_types,
        data_axis,
        tuple(device.id for device in devices),
        devices[0].device_kind,
        {device.id for device in devices} == {device.id for device in jax.devices()},
    )


def _mesh_of(value: Any) -> Any:
    if isinstance(value, Axes) and isinstance(value.mesh, MeshShape):
        return value._replace(mesh=value.mesh.build())
    return value.build() if isinstance(value, MeshShape) else value


def _device(platform: str, device_id: int) -> Any:
    """Return a device of this process's job.

    Raises:
      ValueError: if it has no such device.
    """
    for device in jax.devices(platform):
        if device.id == device_id:
            return device
    problem = f"a loss or an optimizer holds device {platform}:{device_id}, which this job has not."
    fix = "let it hold the mesh in place of the device; or make the strategy here."
    raise value_error(problem, fix=fix)


def _reduce_mesh(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return MeshShape.build, (_mesh_shape(mesh, ("data",)),)


def _reduce_device(device: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _device, (device.platform, device.id)


# jax has no way to pickle devices. A loss may close over a mesh, for a sharding constraint; it is
# pickled after the strategy, by the pickler of the user. So pickle must know what to do.
copyreg.pickle(Mesh, _reduce_mesh)
copyreg.pickle(jax.Device, _reduce_device)
