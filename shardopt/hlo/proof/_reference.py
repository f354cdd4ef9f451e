"""The program that XLA was given, interpreted on whole arrays.

The compiled program has to compute the same results.

Before XLA partitions a program, its values are whole arrays. Only the bodies of `shard_map` are
written for devices. Here such a body runs on all devices, and everything around it runs once. No
partitioner and no pass of XLA takes part.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardopt.hlo._hlo_text import Instruction, attributes
from shardopt.hlo.proof._interpret import Interpreter, Step
from shardopt.hlo.proof._interpret_collectives import Devices
from shardopt.hlo.proof._interpret_shards import same
from shardopt.hlo.proof._lines import Line

BODY = "xla.sdy.manual_computation_body"
"""The bodies of `shard_map` are computations with such names."""
WHOLE = -1
"""The position of what runs a computation outside of the bodies of `shard_map`."""


@dataclass
class ReferenceInterpreter(Interpreter):
    """An interpreter of the program that XLA was given.

    A value has one row outside of the bodies of `shard_map`.

    Attributes:
      uneven: whether the body of a `shard_map` made different numbers on devices that are declared
        to hold copies.
    """

    uneven: bool = False

    def __post_init__(self) -> None:
        """Read the mesh."""
        super().__post_init__()
        self.meshes = {
            name: {axis: int(size) for axis, size in re.findall(r'"([^"]+)"=(\d+)', axes)}
            for name, axes in re.findall(
                r"(\w+) = #sdy\.mesh<\[([^\]]*)\]", self.module.header.replace("\\", "")
            )
        }
        self.replicas, self.partitions = (
            1,
            max([math.prod(sizes.values()) for sizes in self.meshes.values()] or [1]),
        )

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the whole results for whole arguments."""
        once = self.devices._replace(positions=np.array([WHOLE if self.partitions > 1 else 0]))
        return [value[0] for value in self._results(once, [value[None] for value in inputs])]

    def with_equal_pieces(self, value: np.ndarray, parameter: Instruction, axis: str) -> np.ndarray:
        """Return an argument in which all devices along a mesh axis have the pieces of the first
        one.
        """
        text = attributes(parameter).get("frontend_attributes", "").replace("\\", "")
        for mesh, dims in re.findall(r"sharding<@(\w+), \[(.*?)\][,>]", text):
            sizes = self.meshes[mesh]
            for dim, names in enumerate(_axes_of_dims(dims, list(sizes))):
                if axis in names:
                    split = [sizes[name] for name in names]
                    shape = (*value.shape[:dim], *split, -1, *value.shape[dim + 1 :])
                    first = value.reshape(shape).take([0], dim + names.index(axis))
                    value = np.broadcast_to(first, value.reshape(shape).shape).reshape(value.shape)
        return value

    def _call(self, line: Line) -> Step:
        is_body = line.callee.startswith(BODY)
        return lambda devices, values: self.call(
            line.callee, self._inside(devices) if is_body else devices, values
        )

    def _inside(self, devices: Devices) -> Devices:
        """Return the devices that run the body of a `shard_map`."""
        return self.devices if devices.positions[0] == WHOLE else devices

    def _custom_call(self, line: Line) -> Step:
        target = line.target
        if target == "Sharding" or target in (
            "xla.sdy.FuncResultSharding",
            "xla.sdy.PropagationBarrier",
        ):
            return lambda devices, values: values[0] if len(values) == 1 else tuple(values)
        if target not in ("xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"):
            return super()._custom_call(line)
        into = "GlobalToLocal" in target
        text = line.attributes["frontend_attributes"].replace("\\", "")
        manual = re.findall(r'"([^"]+)"', text.partition("manual_axes{")[2].partition("}")[0])
        listed = (
            text.partition("in_shardings=" if into else "out_shardings=")[2].partition("]>]>")[0]
            + "]>"
        )
        shardings = re.findall(r"<@(\w+), \[(.*?)\](?:, \w+=\{[^}]*\})*>", listed)
        places = [
            _Places(self.meshes[mesh], tuple(manual), _axes_of_dims(dims, manual))
            for mesh, dims in shardings
        ]

        change = self._cut if into else self._joined

        def step(devices, values):
            pairs = zip(places, values, strict=True)
            return line.results([change(place, value, devices) for place, value in pairs])

        return step

    def _cut(self, place: "_Places", value: np.ndarray, devices: Devices) -> np.ndarray:
        return place.cut(value, self._inside(devices))

    def _joined(self, place: "_Places", value: np.ndarray, devices: Devices) -> np.ndarray:
        if devices.positions[0] != WHOLE:
            return place.joined(value, devices, devices.positions)
        result = place.joined(value, self.devices, np.arange(1))
        self.uneven = self.uneven or not same(place.cut(result, self.devices), value)
        return result


@dataclass(frozen=True)
class _Places:
    """The places of the devices' pieces in an array at the border of a body of `shard_map`.

    Attributes:
      sizes: mesh axis to size.
      manual: the axes that the body is written for.
      dims: for each dim the manual axes that split it, major first.
    """

    sizes: dict[str, int]
    manual: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]

    @property
    def _coordinates(self) -> dict[str, np.ndarray]:
        """Mesh axis -> the coordinate of each device."""
        sizes = tuple(self.sizes.values())
        places = np.unravel_index(np.arange(math.prod(sizes)), sizes)
        return dict(zip(self.sizes, places, strict=True))

    def _windows(self, local: tuple[int, ...]) -> list[tuple[slice, ...]]:
        """Return the place of each device's piece."""
        coordinates, starts = self._coordinates, []
        for axes, size in zip(self.dims, local, strict=True):
            index = np.zeros(math.prod(self.sizes.values()), int)
            for axis in axes:
                index = index * self.sizes[axis] + coordinates[axis]
            starts.append(index * size)
        return [
            tuple(slice(at, at + size) for at, size in zip(place, local, strict=True))
            for place in zip(*(at.tolist() for at in starts), strict=True)
        ]

    def _pieces(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def cut(self, value: np.ndarray, devices: Devices) -> np.ndarray:
        """Return the piece of each device; `value` has one row, or one per device."""
        count = len(devices.positions)
        if not any(self.dims):
            return np.broadcast_to(value, (count, *value.shape[1:]))
        local = tuple(
            size // self._pieces(axes)
            for size, axes in zip(value.shape[1:], self.dims, strict=True)
        )
        windows = self._windows(local)
        rows = np.broadcast_to(value, (count, *value.shape[1:]))
        return np.stack(
            [row[windows[device]] for row, device in zip(rows, devices.positions, strict=True)]
        )

    def joined(self, value: np.ndarray, devices: Devices, targets: np.ndarray) -> np.ndarray:
        """Return for each target the whole array that it and its neighbours along the split axes
        make up.
        """
        if not any(self.dims):
            return value[: len(targets)]
        local = value.shape[1:]
        split = {axis for axes in self.dims for axis in axes}
        whole_shape = tuple(
            size * self._pieces(axes) for size, axes in zip(local, self.dims, strict=True)
        )
        windows = self._windows(local)
        unsplit = [place for axis, place in self._coordinates.items() if axis not in split]
        row_of = {int(device): row for row, device in enumerate(devices.positions)}
        result = np.empty((len(targets), *whole_shape), value.dtype)
        for row, target in enumerate(targets):
            is_neighbour = np.all([place == place[target] for place in unsplit], axis=0)
            for device in np.flatnonzero(np.broadcast_to(is_neighbour, len(windows))).tolist():
                result[row][windows[device]] = value[row_of[device]]
        return result


def _axes_of_dims(dims: str, manual: list[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(axis for axis in re.findall(r'"([^"]+)"', dim) if axis in manual)
        for dim in re.findall(r"\{(.*?)\}", dims)
    )
