"""Rows of an array that the partitioner may shard: where they are cut, so that each dim keeps its
sharding.

A reshape of [A, B] to one flat row loses how A and B are sharded: the partitioner gathers the array.
A split of one dim, [A] to [A / k, k], keeps it, if each shard has whole groups of k.
"""

import math
from typing import NamedTuple

import jax

from shardopt.reducers._codec import Codec


class Grid(NamedTuple):
    """How an array becomes rows [N, ..., length]: a row for each device, and back.

    Attributes:
      shape: the shape of the array.
      device_dim: the dim that is dealt out to N devices, number after number.
      row_dim: the dim that is cut into rows.
      num_devices: N.
      length: the length of a row.
    """

    shape: tuple[int, ...]
    device_dim: int
    row_dim: int
    num_devices: int
    length: int

    def rows(self, array: jax.Array) -> jax.Array:
        """Return the rows of an array."""
        split_shape, order = self._split()
        return array.reshape(split_shape).transpose(order)

    def array(self, rows: jax.Array) -> jax.Array:
        """Return the array of rows."""
        _, order = self._split()
        return rows.transpose([order.index(dim) for dim in range(len(order))]).reshape(self.shape)

    def _split(self) -> tuple[list[int], list[int]]:
        """Return the shape with its dims split, and the order of dims for rows."""
        split_shape: list[int] = []
        middle_dims: list[int] = []
        first = last = 0
        # Each dim becomes [the rest, length if it holds the rows, N if it is dealt out]. N is the
        # innermost: so each shard of the partitioner has numbers for every device.
        for dim, size in enumerate(self.shape):
            inner: list[int] = []
            if dim == self.row_dim:
                inner.append(self.length)
            if dim == self.device_dim:
                inner.append(self.num_devices)
            middle_dims.append(len(split_shape))
            split_shape += [size // math.prod(inner), *inner]
            if dim == self.row_dim:
                last = middle_dims[-1] + 1
            if dim == self.device_dim:
                first = len(split_shape) - 1
        return split_shape, [first, *middle_dims, last]


def num_partitions() -> int:
    """Return over how many devices the partitioner may shard the arrays of a device: the product of
    the axes that are not manual, inside of `shard_map` over the others.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return 1
    return math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes)


def grid_of(array: jax.Array, codec: Codec, num_devices: int, num_shards: int) -> Grid | None:
    """Return the grid whose rows are encoded in the fewest bytes.

    None if no grid saves bytes, such as for a small array, or one without a dim that all devices
    and shards divide.

    Args:
      array: the array.
      codec: how a row is encoded.
      num_devices: N.
      num_shards: over how many devices the partitioner may shard a dim.
    """
    best = None
    fewest = float(array.dtype.itemsize)
    for device_dim, size in enumerate(array.shape):
        # gcd: whether the partitioner shards this dim is not known here, so its shards must fit
        # either way.
        if not size or size % (num_devices * math.gcd(size, num_shards)):
            continue
        for row_dim, row_size in enumerate(array.shape):
            dealt = row_size // num_devices if row_dim == device_dim else row_size
            length = _row_length(dealt // math.gcd(dealt, num_shards), codec)
            bytes_per_number = codec.nbytes(length, array.dtype) / length
            if bytes_per_number < fewest:
                fewest = bytes_per_number
                best = Grid(array.shape, device_dim, row_dim, num_devices, length)
    return best


def _row_length(longest: int, codec: Codec) -> int:
    """Return the largest divisor that the codec encodes without padding; 1 if there is none."""
    small = [n for n in range(1, math.isqrt(longest) + 1) if longest % n == 0]
    divisors = [*small, *[longest // n for n in small]]
    return max((n for n in divisors if codec.padded_length(n) == n), default=1)
