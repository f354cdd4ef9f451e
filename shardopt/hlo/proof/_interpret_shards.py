"""Shapes, literals and shardings of HLO text as numpy arrays."""

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from shardopt.core._errors import format_error
from shardopt.hlo._collective import read_groups
from shardopt.hlo._hlo_text import Instruction, attributes

_NUMPY = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": jnp.dtype("bfloat16").type,
}
_NUMPY |= {
    f"{kind}{bits}": np.dtype(f"{name}{bits}")
    for kind, name in (("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}
_NUMPY |= {
    "s4": jnp.dtype("int4").type,
    "u4": jnp.dtype("uint4").type,
    "c64": np.complex64,
    "c128": np.complex128,
}
_NUMPY |= {
    name: jnp.dtype(f"float8_{name[2:]}").type
    for name in ("f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e4m3", "f8e3m4", "f8e8m0fnu")
}
_ARRAY = re.compile(
    r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*)(?::(?:T\((?P<tile>[\d,]+)\))?[^}]*)?\})?$"
)


class Shape(NamedTuple):
    """An array of HLO: its type, its dims, its dims from the fastest to the slowest in memory, and
    its tile.
    """

    dtype: np.dtype
    dims: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...]

    def without_ones(self) -> list[int]:
        """Return the dims from the slowest to the fastest in memory, without those of size 1."""
        return [self.dims[dim] for dim in reversed(self.order) if self.dims[dim] != 1]


@cache
def read_shape(text: str) -> Shape:
    """Parse `f32[8,4]{1,0:T(8,128)}`; raise ValueError for tuples, dynamic dims and unknown types.

    Example:
      >>> read_shape("bf16[8,4]{0,1}").order
      (0, 1)
    """
    match = _ARRAY.match(text.strip())
    if not match or match["dtype"] not in _NUMPY:
        raise ValueError(f"its shape {text} has no array in numpy")
    dims = numbers(match["dims"])
    order = tuple(reversed(range(len(dims)))) if match["order"] is None else numbers(match["order"])
    return Shape(np.dtype(_NUMPY[match["dtype"]]), dims, order, numbers(match["tile"] or ""))


def numbers(text: str) -> tuple[int, ...]:
    """Parse `{1,0}`, `1,0` or the empty text."""
    return tuple(int(part) for part in text.strip("{} ").split(",") if part.strip())


def read_literal(text: str, shape: Shape) -> np.ndarray:
    """Parse the literal of a constant; raise ValueError if the text leaves its numbers out."""
    if "..." in text:
        raise ValueError(
            "its numbers are left out of the text; print the module with `print_large_constants`"
        )
    if shape.dtype.kind == "c":
        raise ValueError("complex literals are not read")
    words = (
        re.sub(r"/\*.*?\*/", " ", text)
        .replace("{", " ")
        .replace("}", " ")
        .replace(",", " ")
        .split()
    )
    integers = shape.dtype.kind in "iub" or "int" in shape.dtype.name
    words = [{"true": "1", "false": "0"}.get(word, word) for word in words]
    # a payload of a NaN, `nan(0x400000)`, has no meaning here
    values = [int(word) if integers else float(word.partition("(")[0]) for word in words]
    wide = np.array(
        values, np.float64 if not integers else np.uint64 if shape.dtype.kind == "u" else np.int64
    )
    return wide.astype(shape.dtype).reshape(shape.dims)


def to_memory(value: np.ndarray, shape: Shape) -> np.ndarray:
    """Return values [devices, ...] in the order of memory, [devices, numbers].

    Tiles are padded with zeros.
    """
    value = value.transpose(0, *(dim + 1 for dim in reversed(shape.order)))
    if not shape.tile or not shape.dims:
        return value.reshape(len(value), -1)
    outer, inner, padding = _tiling(shape)
    value = value.reshape(len(value), *(1,) * (len(shape.tile) - len(shape.dims)), *value.shape[1:])
    value = np.pad(value, [(0, 0), *((0, pad) for pad in padding)])
    value = value.reshape(
        len(value), *(size for pair in zip(outer, inner, strict=True) for size in pair)
    )
    dims = len(outer)
    return value.transpose(0, *range(1, 2 * dims, 2), *range(2, 2 * dims + 1, 2)).reshape(
        len(value), -1
    )


def from_memory(flat: np.ndarray, shape: Shape) -> np.ndarray:
    """Return values [devices, ...] from the order of memory."""
    physical = [shape.dims[dim] for dim in reversed(shape.order)]
    if shape.tile and shape.dims:
        outer, inner, padding = _tiling(shape)
        dims = len(outer)
        value = flat.reshape(len(flat), *outer, *inner)
        value = value.transpose(
            0, *(axis for dim in range(1, dims + 1) for axis in (dim, dim + dims))
        )
        value = value.reshape(len(flat), *(a * b for a, b in zip(outer, inner, strict=True)))
        value = value[
            (
                slice(None),
                *(slice(0, size - pad) for size, pad in zip(value.shape[1:], padding, strict=True)),
            )
        ]
        flat = value
    value = flat.reshape(len(flat), *physical)
    return value.transpose(
        0, *(1 + tuple(reversed(shape.order)).index(dim) for dim in range(len(shape.dims)))
    )


def _tiling(shape: Shape) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of tiles, the tile and the padding of each dim, from the slowest dim in
    memory.
    """
    physical = [shape.dims[dim] for dim in reversed(shape.order)]
    physical = [1] * (len(shape.tile) - len(physical)) + physical
    inner = [1] * (len(physical) - len(shape.tile)) + list(shape.tile)
    outer = [-(-size // tile) for size, tile in zip(physical, inner, strict=True)]
    return outer, inner, [a * b - size for a, b, size in zip(outer, inner, physical, strict=True)]


def tile_of_device(sharding: str, rank: int, devices: int) -> np.ndarray:
    """Return the tile that each device holds, as indexes [devices, rank], and the tiles along each
    dim in the last row.

    Example:
      >>> tile_of_device("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 2, 4).tolist()
      [[0, 0], [0, 0], [1, 0], [1, 0], [2, 1]]
    """
    text = sharding.strip()
    text = text[1:-1].strip() if text.startswith("{") else text
    match = re.match(r"devices=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)(.*)", text)
    if not match:
        if text.split(" ")[0] not in ("replicated", "manual", "") or (
            text and text.startswith("maximal")
        ):
            raise ValueError(f"cannot read the sharding {sharding!r}.")
        return np.array([[0] * rank] * devices + [[1] * rank], int).reshape(devices + 1, rank)
    tiles = numbers(match[1])
    # the tiles of the last dims may be copies
    order = match[2] if match[2].startswith("<") else "{" + match[2] + "}"
    ids = read_groups(f"[{match[1]}]{order}", 0) if order.startswith("<") else (numbers(order),)
    flat = [device for row in ids for device in row]
    places = np.zeros((devices + 1, rank), int)
    for position, device in enumerate(flat):
        places[device] = np.unravel_index(position, tiles)[:rank]
    places[-1] = tiles[:rank]
    return places


def written_shardings(parameters: Sequence[Instruction], devices: int) -> list[str]:
    """Return the shardings that a text states of its parameters.

    Raise ValueError if it does not.
    """
    shardings = [
        attributes(line).get("sharding", "{replicated}" if devices == 1 else "")
        for line in parameters
    ]
    if all(shardings):
        return shardings
    problem = "the text does not contain the shardings of all parameters."
    raise ValueError(
        format_error("prove", problem, fix="pass inputs=, one sharding per parameter.")
    )


def cut(value: np.ndarray, sharding: str, devices: int) -> np.ndarray:
    """Return the shards of a whole array, [devices, ...]."""
    places = tile_of_device(sharding, value.ndim, devices)
    sizes = [size // tiles for size, tiles in zip(value.shape, places[-1], strict=True)]
    windows = [
        tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True))
        for place in places[:-1]
    ]
    return np.stack([value[window] for window in windows])


def join(shards: np.ndarray, sharding: str) -> np.ndarray:
    """Return the whole array of shards [devices, ...].

    Raise ValueError if copies of a shard differ.
    """
    devices = len(shards)
    places = tile_of_device(sharding, shards.ndim - 1, devices)
    local = shards.shape[1:]
    whole = np.zeros(
        [size * tiles for size, tiles in zip(local, places[-1], strict=True)], shards.dtype
    )
    written: dict[tuple[int, ...], int] = {}
    for device, place in enumerate(places[:-1]):
        window = tuple(
            slice(i * size, (i + 1) * size) for i, size in zip(place, local, strict=True)
        )
        first = written.setdefault(tuple(place.tolist()), device)
        if first != device and not same(shards[first], shards[device]):
            raise ValueError(
                f"devices {first} and {device} should hold copies, and hold different numbers."
            )
        whole[window] = shards[device]
    if len(written) != math.prod(places[-1]):
        raise ValueError("no device holds some of the shards.")
    return whole


def error_between(actual: np.ndarray, expected: np.ndarray, smallest: float = 1e-30) -> float:
    """Return the largest difference, relative to the largest expected number.

    Infinite where one is not finite.

    Numbers below `smallest` count as `smallest`.
    """
    if actual.shape != expected.shape:
        return math.inf
    if actual.dtype.kind in "biu" or actual.size == 0:
        return 0.0 if np.array_equal(actual, expected) else math.inf
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return math.inf
    difference, scale = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    return (
        float(difference.max(initial=0) / max(scale.max(initial=0), smallest))
        if difference.any()
        else 0.0
    )


def same(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> bool:
    """Return whether two arrays agree."""
    return error_between(actual, expected) <= tolerance
