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
from shardopt.hlo.proof._interpret_shards import error_between, windows_of
from shardopt.hlo.proof._lines import Line

BODY = "xla.sdy.manual_computation_body"
"""The bodies of `shard_map` are computations with such names."""
UNEVEN = 1e-5
"""Copies differ if their numbers differ by more than this part of the largest."""
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
        # Outside of `shard_map` a value has one row, and all that runs there runs once.
        once = np.array([WHOLE if self.partitions > 1 else 0])
        return [value[0] for value in self._results(once, [value[None] for value in inputs])]

    def with_equal_pieces(self, value: np.ndarray, parameter: Instruction, axis: str) -> np.ndarray:
        """Return an argument with equal pieces along a mesh axis: all devices have the pieces of
        the first one.
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

    def _inside(self, devices: np.ndarray) -> np.ndarray:
        """Return the devices that run the body of a `shard_map`."""
        return self.devices if devices[0] == WHOLE else devices

    def _custom_call(self, line: Line) -> Step:
        target = line.target
        if target in ("Sharding", "xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier"):
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
        pieces = [
            _Pieces(self.meshes[mesh], _axes_of_dims(dims, manual)) for mesh, dims in shardings
        ]

        change = self._cut if into else self._joined

        def step(devices, values):
            pairs = zip(pieces, values, strict=True)
            return line.results([change(piece, value, devices) for piece, value in pairs])

        return step

    def _cut(self, pieces: "_Pieces", value: np.ndarray, devices: np.ndarray) -> np.ndarray:
        return pieces.cut(value, self._inside(devices))

    def _joined(self, pieces: "_Pieces", value: np.ndarray, devices: np.ndarray) -> np.ndarray:
        if devices[0] != WHOLE:
            return pieces.joined(value, devices, devices)
        result = pieces.joined(value, self.devices, np.arange(1))
        # `joined` takes the pieces of one device of each group of copies. The others must have the
        # same.
        self.uneven = self.uneven or error_between(pieces.cut(result, self.devices), value) > UNEVEN
        return result


@dataclass(frozen=True)
class _Pieces:
    """The devices' pieces of an array at the border of a body of `shard_map`.

    Attributes:
      sizes: mesh axis to size.
      dims: for each dim the axes of the body that split it, major first.
    """

    sizes: dict[str, int]
    dims: tuple[tuple[str, ...], ...]

    def _places(self, axes: Sequence[str]) -> np.ndarray:
        """Return the place of each device along some axes, major first."""
        shape = tuple(self.sizes.values())
        coordinates = np.unravel_index(np.arange(math.prod(shape)), shape)
        place = np.zeros(math.prod(shape), int)
        for axis in axes:
            place = place * self.sizes[axis] + coordinates[list(self.sizes).index(axis)]
        return place

    @property
    def _tiles(self) -> np.ndarray:
        """The tile of each device, [devices, rank]."""
        return np.stack([self._places(axes) for axes in self.dims], axis=1)

    @property
    def _counts(self) -> np.ndarray:
        """The number of tiles along each dim."""
        return np.array([math.prod(self.sizes[axis] for axis in axes) for axes in self.dims])

    def cut(self, value: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Return the piece of each device; `value` has one row, or one per device."""
        rows = np.broadcast_to(value, (len(devices), *value.shape[1:]))
        if not any(self.dims):
            return rows
        windows = windows_of(self._tiles, value.shape[1:] // self._counts)
        return np.stack([row[windows[device]] for row, device in zip(rows, devices, strict=True)])

    def joined(self, value: np.ndarray, devices: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return for each target the whole array that it and its neighbours along the split axes
        make up.
        """
        if not any(self.dims):
            return value[: len(targets)]
        local = value.shape[1:]
        windows = windows_of(self._tiles, local)
        split = {axis for axes in self.dims for axis in axes}
        unsplit = self._places([axis for axis in self.sizes if axis not in split])
        row_of = {int(device): row for row, device in enumerate(devices)}
        result = np.empty((len(targets), *(local * self._counts)), value.dtype)
        for row, target in enumerate(targets):
            for device in np.flatnonzero(unsplit == unsplit[target]).tolist():
                result[row][windows[device]] = value[row_of[device]]
        return result


def _axes_of_dims(dims: str, manual: list[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(axis for axis in re.findall(r'"([^"]+)"', dim) if axis in manual)
        for dim in re.findall(r"\{(.*?)\}", dims)
    )
