"""The program that XLA was given, interpreted on whole arrays: what the compiled program has to compute.

Before XLA partitions a program, its values are whole arrays. Only the bodies of `shard_map` are written for devices. Here
such a body runs on all devices, and everything around it runs once. No partitioner and no pass of XLA takes part.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardopt.hlo.proof._interpret import Interpreter, Step, Value
from shardopt.hlo.proof._interpret_collectives import Devices
from shardopt.hlo.proof._interpret_numpy import Line
from shardopt.hlo.proof._interpret_shards import same

BODY = "xla.sdy.manual_computation_body"
"""The bodies of `shard_map` are computations with such names."""


@dataclass
class ReferenceInterpreter(Interpreter):
    """An interpreter of the program that XLA was given. A value has one row outside of the bodies of `shard_map`.

    Attributes:
      uneven: whether the body of a `shard_map` made different numbers on devices that are declared to hold copies.
    """

    uneven: bool = False

    def __post_init__(self) -> None:
        """Read the mesh."""
        super().__post_init__()
        self.meshes = {
            name: {axis: int(size) for axis, size in re.findall(r'"([^"]+)"=(\d+)', axes)}
            for name, axes in re.findall(r"(\w+) = #sdy\.mesh<\[([^\]]*)\]", self.module.header.replace("\\", ""))
        }
        self.replicas, self.partitions = 1, max([math.prod(sizes.values()) for sizes in self.meshes.values()] or [1])

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the whole results for whole arguments."""
        first = self.devices._replace(positions=np.arange(1))
        return [value[0] for value in self._results(first, [value[None] for value in inputs])]

    def _call(self, line: Line) -> Step:
        name = self._callee(line, "to_apply")
        if not name.startswith(BODY):
            return lambda devices, values: self.call(name, devices, values)
        return lambda devices, values: self.call(name, self.devices, values)

    def _custom_call(self, line: Line) -> Step:
        target = line.attributes.get("custom_call_target", "").strip('"')
        if target == "Sharding" or target in ("xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier"):
            return lambda devices, values: values[0] if len(values) == 1 else tuple(values)
        if target not in ("xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"):
            return super()._custom_call(line)
        is_tuple, into = line.shape.startswith("("), "GlobalToLocal" in target
        text = line.attributes["frontend_attributes"].replace("\\", "")
        manual = re.findall(r'"([^"]+)"', text.partition("manual_axes{")[2].partition("}")[0])
        listed = text.partition("in_shardings=" if into else "out_shardings=")[2].partition("]>]>")[0] + "]>"
        shardings = re.findall(r"<@(\w+), \[(.*?)\](?:, \w+=\{[^}]*\})*>", listed)
        places = [_Places(self.meshes[mesh], tuple(manual), _axes_of_dims(dims, manual)) for mesh, dims in shardings]

        def step(devices: Devices, values: list[Value]) -> Value:
            pairs = zip(places, values, strict=True)
            results = [
                place.cut(value) if into else self._joined(place, value, len(devices.positions))
                for place, value in pairs
            ]
            return tuple(results) if is_tuple else results[0]

        return step

    def _joined(self, place: "_Places", value: np.ndarray, rows: int) -> np.ndarray:
        result = place.joined(value, rows)
        if rows == 1 and not self.uneven:
            self.uneven = not same(place.cut(result), value)
        return result


@dataclass(frozen=True)
class _Places:
    """Where the piece of each device is in an array at the border of a body of `shard_map`.

    Attributes:
      sizes: mesh axis to size.
      manual: the axes that the body is written for.
      dims: for each dim the manual axes that split it, major first.
    """

    sizes: dict[str, int]
    manual: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]

    @property
    def _grid(self) -> np.ndarray:
        return np.arange(math.prod(self.sizes.values())).reshape(tuple(self.sizes.values()))

    def _windows(self, local: tuple[int, ...]) -> list[tuple[slice, ...]]:
        """Return the place of each device's piece."""
        coordinates = dict(zip(self.sizes, np.indices(self._grid.shape).reshape(len(self.sizes), -1), strict=True))
        windows = []
        for device in range(self._grid.size):
            starts = []
            for axes, size in zip(self.dims, local, strict=True):
                index = 0
                for axis in axes:
                    index = index * self.sizes[axis] + int(coordinates[axis][device])
                starts.append(index * size)
            windows.append(tuple(slice(at, at + size) for at, size in zip(starts, local, strict=True)))
        return windows

    def _pieces(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def cut(self, value: np.ndarray) -> np.ndarray:
        """Return the piece of each device; `value` has one row, or one per device."""
        count = self._grid.size
        if not any(self.dims):
            return np.broadcast_to(value, (count, *value.shape[1:]))
        local = tuple(size // self._pieces(axes) for size, axes in zip(value.shape[1:], self.dims, strict=True))
        windows = self._windows(local)
        return np.stack([value[row if len(value) > 1 else 0][windows[row]] for row in range(count)])

    def joined(self, value: np.ndarray, rows: int) -> np.ndarray:
        """Return whole arrays of pieces: one array, or for each device the array that its neighbours make up."""
        if not any(self.dims):
            return value[:rows]
        local = value.shape[1:]
        whole = tuple(size * self._pieces(axes) for size, axes in zip(local, self.dims, strict=True))
        split = [list(self.sizes).index(axis) for axes in self.dims for axis in axes]
        grid, windows = self._grid, self._windows(local)
        result = np.empty((rows, *whole), value.dtype)
        for row in range(rows):
            place = [int(index) for index in np.unravel_index(row, grid.shape)]
            for indexes in itertools.product(*(range(grid.shape[axis]) for axis in split)):
                for axis, index in zip(split, indexes, strict=True):
                    place[axis] = index
                device = int(grid[tuple(place)])
                result[row][windows[device]] = value[device]
        return result


def _axes_of_dims(dims: str, manual: list[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(axis for axis in re.findall(r'"([^"]+)"', dim) if axis in manual) for dim in re.findall(r"\{(.*?)\}", dims)
    )
