"""Shapes, literals and shardings of HLO text as numpy arrays."""

import math
import re
from collections.abc import Sequence

import numpy as np

from shardopt.core import calling, value_error
from shardopt.hlo._collective import read_groups
from shardopt.hlo._hlo_text import Instruction, attributes, numbers
from shardopt.hlo.proof._lines import Shape


def read_literal(text: str, shape: Shape) -> np.ndarray:
    """Parse the literal of a constant; raise ValueError if the text leaves its numbers out."""
    if "..." in text:
        raise ValueError(
            "its numbers are left out of the text; print the module with `print_large_constants`"
        )
    if shape.dtype.kind == "c":
        raise ValueError("complex literals are not read")
    words = words_of_literal(text)
    if shape.dtype.kind in "iub" or "int" in shape.dtype.name:
        wide = whole_numbers(words)
    else:
        # a payload of a NaN, `nan(0x400000)`, has no meaning here
        wide = np.array([float(word.partition("(")[0]) for word in words], np.float64)
    return wide.astype(shape.dtype).reshape(shape.dims)


def whole_numbers(words: Sequence[str]) -> np.ndarray:
    """Return whole numbers of a literal; numbers that no type holds wrap around."""
    return np.array([int(word) % 2**64 for word in words], np.uint64)


def words_of_literal(text: str) -> list[str]:
    """Return the numbers of a literal, as text."""
    words = re.sub(r"/\*.*?\*/|[{},]", " ", text).split()
    return [{"true": "1", "false": "0"}.get(word, word) for word in words]


def to_memory(value: np.ndarray, shape: Shape) -> np.ndarray:
    """Return values [devices, ...] in the order of memory, [devices, numbers].

    Tiles are padded with zeros.
    """
    value = value.transpose(0, *(dim + 1 for dim in reversed(shape.order)))
    if not shape.tile or not shape.dims:
        return value.reshape(len(value), -1)
    physical = [1] * (len(shape.tile) - len(shape.dims)) + list(value.shape[1:])
    inner = [1] * (len(physical) - len(shape.tile)) + list(shape.tile)
    outer = [-(-size // tile) for size, tile in zip(physical, inner, strict=True)]
    cut = np.zeros((len(value), *(a * b for a, b in zip(outer, inner, strict=True))), value.dtype)
    cut[(slice(None), *map(slice, physical))] = value.reshape(len(value), *physical)
    pairs = [size for pair in zip(outer, inner, strict=True) for size in pair]
    axes = [*range(1, len(pairs), 2), *range(2, len(pairs) + 1, 2)]
    return cut.reshape(len(value), *pairs).transpose(0, *axes).reshape(len(value), -1)


def from_memory(flat: np.ndarray, shape: Shape) -> np.ndarray:
    """Return values [devices, ...] from the order of memory."""
    count = math.prod(shape.dims)
    numbers_from_1 = np.arange(1, count + 1).reshape(1, *shape.dims)
    (order,) = to_memory(numbers_from_1, shape)  # 0 is padding
    value = np.empty((len(flat), count), flat.dtype)
    value[:, order[order > 0] - 1] = flat[:, order > 0]
    return value.reshape(len(flat), *shape.dims)


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
        if text.split(" ")[0] not in ("replicated", "manual", ""):
            raise ValueError(f"cannot read the sharding {sharding!r}.")
        return np.array([[0] * rank] * devices + [[1] * rank], int).reshape(devices + 1, rank)
    tiles = numbers(match[1])
    # the tiles of the last dims may be copies
    order = match[2] if match[2].startswith("<") else "{" + match[2] + "}"
    ids = read_groups(f"[{match[1]}]{order}", 0) if order.startswith("<") else (numbers(order),)
    flat = [device for row in ids for device in row]
    if len(flat) != devices:
        raise ValueError(f"the sharding {sharding!r} is for {len(flat)} devices, not {devices}.")
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
    with calling("prove"):
        raise value_error(problem, fix="pass inputs=, one sharding per parameter.")


def cut(value: np.ndarray, sharding: str, devices: int) -> np.ndarray:
    """Return the shards of a whole array, [devices, ...]."""
    tiles = tile_of_device(sharding, value.ndim, devices)
    windows = windows_of(tiles[:-1], value.shape // tiles[-1])
    return np.stack([value[window] for window in windows])


def windows_of(tiles: np.ndarray, local: Sequence[int] | np.ndarray) -> list[tuple[slice, ...]]:
    """Return the place of each tile in a whole array; tiles have the shape `local`."""
    return [
        tuple(slice(i * size, (i + 1) * size) for i, size in zip(tile, local, strict=True))
        for tile in tiles
    ]


def join(shards: np.ndarray, sharding: str) -> np.ndarray:
    """Return the whole array of shards [devices, ...].

    Raise ValueError if copies of a shard differ.
    """
    devices = len(shards)
    tiles = tile_of_device(sharding, shards.ndim - 1, devices)
    local = shards.shape[1:]
    array = np.zeros(local * tiles[-1], shards.dtype)
    written: dict[tuple[int, ...], int] = {}
    for device, window in enumerate(windows_of(tiles[:-1], local)):
        first = written.setdefault(tuple(tiles[device].tolist()), device)
        if first != device and not _are_copies(shards[first], shards[device]):
            raise ValueError(
                f"devices {first} and {device} should hold copies, and hold different numbers."
            )
        array[window] = shards[device]
    if len(written) != math.prod(tiles[-1]):
        raise ValueError("no device holds some of the shards.")
    return array


def _are_copies(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are the same bits, but for the sign of zero."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def error_between(actual: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Return the largest difference, relative to `scale`; by default to the largest expected
    number.

    Infinite where one is not finite.
    """
    if actual.shape != expected.shape:
        return math.inf
    if actual.dtype.kind in "biu" or actual.size == 0:
        return 0.0 if np.array_equal(actual, expected) else math.inf
    a = actual.astype(np.float64)
    b = expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return math.inf
    difference = np.abs(a[finite] - b[finite])
    if not difference.any():
        return 0.0
    if scale is None:
        scale = float(np.abs(b[finite]).max(initial=1e-30))
    return float(difference.max() / scale)
