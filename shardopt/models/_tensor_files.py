"""Files of tensors in the form of safetensors, read and written a part at a time, by several
processes at once.

A file is eight bytes with the length of the header, the header (JSON: name -> dtype, shape,
offsets), and the bytes of the tensors. A part is read and written in contiguous runs of bytes, so
nothing else of the file moves.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardopt.core import error_text, num_bytes, value_error
from shardopt.partition._plan import Shape

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER = 2**28


class Tensor(NamedTuple):
    """A tensor of a file.

    Attributes:
      path: the file.
      code: the name of the dtype in the file.
      shape: its shape.
      offset: its first byte in the file.
    """

    path: Path
    code: str
    shape: Shape
    offset: int

    @classmethod
    def of(cls, path: Path, dtype: np.dtype, shape: Shape, offset: int) -> "Tensor":
        """Return a tensor of a dtype in numpy."""
        return cls(path, _CODES[dtype], shape, offset)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in numpy.

        Raises:
          ValueError: if the numbers are no floats.
        """
        if self.code not in _DTYPES:
            problem = (
                f"a tensor of {self.path} has dtype {self.code}, which is none of"
                f" {', '.join(_DTYPES)}."
            )
            raise value_error(
                problem, fix="load the model in bfloat16 with transformers, and save it."
            )
        return _DTYPES[self.code]

    def view(self) -> np.ndarray:
        """Return the tensor as a read-only map of its file.

        Reading it in place would read whole pages.
        """
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """Return name -> tensor of a file, from its header alone.

    Raises:
      ValueError: if the header is damaged, or a tensor lies outside of the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(size, _MAX_HEADER) else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(
                path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }
        ends = [8 + length + entry["data_offsets"][1] for entry in header.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise value_error(
            f"{path} has no header of safetensors.", fix="download the file again."
        ) from error
    if ends and max(ends) > size:
        problem = f"{path} has {size} bytes, and its tensors end at byte {max(ends)}."
        raise value_error(problem, fix="download the file again.")
    for name, end in zip(tensors, ends, strict=True):
        tensor = tensors[name]
        if tensor.code in _DTYPES and num_bytes(tensor) != end - tensor.offset:
            raise value_error(
                f"the bytes of {name} in {path} do not fit its shape {list(tensor.shape)}."
            )
    return tensors


def header_of(
    tensors: Mapping[str, tuple[np.dtype, Shape]],
) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a file with these tensors, the offset of each tensor, and the size
    of the file.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    first = len(text) + 8
    offsets = {name: first + entries[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(8, "little") + text, offsets, first + begin


class Part(NamedTuple):
    """A part of a tensor: a view of its map, with any order of dims.

    Attributes:
      tensor: the tensor.
      view: the part, a view of `tensor.view()`.
      start: the address of the first byte of that map.
    """

    tensor: Tensor
    view: np.ndarray
    start: int

    def read(self) -> np.ndarray:
        """Return the numbers of the part, from a read of just its bytes."""
        order, length = self._runs()
        ordered = np.empty([self.view.shape[axis] for axis in order], self.view.dtype)
        with self.tensor.path.open("rb", buffering=0) as file:
            for row, offset in self._rows(ordered, order, length):
                if os.preadv(file.fileno(), [row.data], offset) != row.size:
                    raise OSError(error_text(f"{self.tensor.path} ended while it was read."))
        return ordered.transpose(np.argsort(order))

    def write(self, values: np.ndarray) -> None:
        """Write the numbers of the part, and nothing else of the file."""
        order, length = self._runs()
        ordered = np.ascontiguousarray(values.transpose(order).astype(self.view.dtype, copy=False))
        with self.tensor.path.open("r+b", buffering=0) as file:
            for row, offset in self._rows(ordered, order, length):
                written = 0
                while written < row.size:
                    written += os.pwrite(file.fileno(), row.data[written:], offset + written)

    def _rows(
        self, ordered: np.ndarray, order: list[int], length: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the bytes of each run of numbers, and where they lie in the file."""
        rows = ordered.reshape(-1, length).view(np.uint8).reshape(-1, length * self.view.itemsize)
        return zip(rows, self._offsets(order, length), strict=True)

    def _runs(self) -> tuple[list[int], int]:
        """Return the dims in the order of the file, and how many numbers lie side by side there."""
        shape = self.view.shape
        strides = self.view.strides
        order = sorted(range(self.view.ndim), key=lambda axis: -strides[axis])
        length = 1
        side_by_side = self.view.itemsize
        for axis in reversed(order):
            if shape[axis] != 1 and strides[axis] != side_by_side:
                break
            length = length * shape[axis]
            side_by_side = side_by_side * shape[axis]
        return order, length

    def _offsets(self, order: list[int], length: int) -> Iterator[int]:
        """Yield the first byte of each run in the file."""
        first = self.tensor.offset + self.view.__array_interface__["data"][0] - self.start
        outer = []
        count = self.view.size
        for axis in order:
            if count == length:
                break
            count //= self.view.shape[axis]
            outer.append(axis)
        strides = np.array([self.view.strides[axis] for axis in outer], np.int64)
        for index in np.ndindex(*(self.view.shape[axis] for axis in outer)):
            yield first + int(np.dot(strides, index)) if outer else first
