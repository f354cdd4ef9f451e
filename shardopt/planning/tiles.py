"""How a TPU stores arrays: in tiles, which thin shards do not fill."""

import functools
import itertools
import math
from typing import Any

import jax

from shardopt.core.types import PyTree

_LANES, _SUBLANES, _FLAT = 128, 8, 1024


@functools.lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of an array in a TPU's memory, its tiles filled up.

    XLA:TPU stores two dims in tiles of 8 x 128 numbers (1, 2 or 4 x 128 where the first has no more), chooses the two that
    waste least, and flat arrays in tiles of up to 1024. Read off its layouts, and equal to them byte for byte in every
    compile of `benchmarks/pod.py`.

    Args:
      shape: of the part that a chip holds.
      itemsize: bytes of a number.

    Example:
      >>> stored_bytes((50257, 12), 4) == 50304 * 16 * 4
      True
    """
    if len(shape) < 2:
        tile = max(_LANES, min(_FLAT, _power(math.prod(shape))))
        return _up(math.prod(shape), tile) * itemsize
    count, ways = math.prod(shape), itertools.permutations(shape, 2)
    if count == 0:
        return 0
    return (
        min(
            count // (rows * lanes) * _up(rows, min(_SUBLANES, _power(rows))) * _up(lanes, _LANES)
            for rows, lanes in ways
        )
        * itemsize
    )


def stored_device_bytes(leaves: PyTree, specs: PyTree, sizes: dict[str, int]) -> int:
    """Return the bytes that a chip stores of leaves split by `PartitionSpec`s on a mesh of these sizes."""
    pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
    return sum(stored_bytes(_local(leaf.shape, spec, sizes), leaf.dtype.itemsize) for leaf, spec in pairs)


def _local(shape: tuple[int, ...], spec: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    cuts = [math.prod(sizes[axis] for axis in _axes(entry)) for entry in spec]
    return tuple(dim // cut for dim, cut in itertools.zip_longest(shape, cuts, fillvalue=1))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, jax.sharding.PartitionSpec)


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()
