"""Leaves of one kind travel together: flat buffers of a bounded size, planned from sizes alone."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.reducers.axis import AxisName, varying

# What crosses the wire: compact arrays that travel together, one collective a dtype.


def all_to_all_packed(parts: Sequence[Any], axis_name: AxisName) -> list[Any]:
    """Send row i of each part to device i.

    Args:
      parts: arrays [N, k].
      axis_name: the axis, of size N.

    Returns:
      As many arrays [N, k]: row j came from device j.
    """
    return _together(parts, lambda buffer: _all_to_all(buffer, axis_name))


def all_gather_packed(parts: Sequence[Any], axis_name: AxisName) -> list[Any]:
    """Send rows to everybody.

    Args:
      parts: arrays [1, k].
      axis_name: the axis, of size N.

    Returns:
      As many arrays [N, k]: row j came from device j.
    """
    return _together(parts, lambda buffer: _all_gather(buffer, axis_name))


def all_reduce_packed(flat: Any, axis_name: AxisName, axis_size: int) -> Any:
    """Sum a flat array over the axis, padded so that each device has an equal chunk of the ring."""
    padding = -flat.size % axis_size
    padded = jnp.pad(flat, (0, padding)) if padding else flat
    return jax.lax.psum(padded, axis_name)[: flat.size]


def _together(parts: Sequence[Any], move: Callable[[Any], Any]) -> list[Any]:
    """Concatenate parts of one dtype, move them at once, and take them apart again."""
    bits = [_as_bits(part) for part in parts]
    results: list[Any] = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in bits):
        members = [i for i, part in enumerate(bits) if part.dtype == dtype]
        buffer = bits[members[0]] if len(members) == 1 else jnp.concatenate([bits[i] for i in members], axis=1)
        moved, start = move(buffer), 0
        for i in members:
            stop = start + parts[i].shape[1]
            results[i] = _from_bits(moved[:, start:stop], parts[i].dtype)
            start = stop
    return results


def _as_bits(x: Any) -> Any:
    """Half-precision floats travel as the bits they are: XLA:CPU would widen them to fp32 on the wire."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2:
        return jax.lax.bitcast_convert_type(x, jnp.uint16)
    return x


def _from_bits(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _all_to_all(x: Any, axis_name: AxisName) -> Any:
    def one_by_one(names):
        sizes = [jax.lax.axis_size(name) for name in names]
        grid = x.reshape(*sizes, *x.shape[1:])
        for dim, name in enumerate(names):
            grid = jax.lax.all_to_all(grid, name, dim, dim, tiled=True)
        return grid.reshape(x.shape)

    return _over(axis_name, lambda names: jax.lax.all_to_all(x, names, 0, 0, tiled=True), one_by_one)


def _all_gather(x: Any, axis_name: AxisName) -> Any:
    # where types track it, the result is known to be the same on all devices
    to = "invarying" if varying(x) else "varying"

    def over(x, names):
        return jax.lax.all_gather(x, names, axis=0, tiled=True, to=to)

    return _over(axis_name, lambda names: over(x, names), lambda names: functools.reduce(over, reversed(names), x))


def _over(axis_name: AxisName, together: Callable[[Any], Any], one_by_one: Callable[[Any], Any]) -> Any:
    """Run a collective over several axes taken as one.

    jax.vmap has no rule for several axes. There they are taken one after the other, which costs no wire.
    """
    if isinstance(axis_name, str) or len(axis_name) == 1:
        return together(axis_name)
    try:
        return together(tuple(axis_name))
    except AssertionError:
        return one_by_one(tuple(axis_name))


BUCKET_ELEMENTS = 2**23
"""Where a bucket is closed: 32 MiB in fp32. A leaf above it travels alone, without being copied."""


class Bucket(NamedTuple):
    """Leaves that travel together.

    Attributes:
      key: what they have in common.
      members: their positions.
      sizes: how many elements each has.
    """

    key: Any
    members: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The elements of all of them."""
        return sum(self.sizes)


def plan_buckets(sizes: Sequence[int], keys: Sequence[Any]) -> list[Bucket]:
    """Put leaves with equal keys into buckets, in order; leaves without elements go nowhere.

    Example:
      >>> plan_buckets([3, 0, 5], ["a", "a", "a"])
      [Bucket(key='a', members=(0, 2), sizes=(3, 5))]
    """
    buckets: list[Bucket] = []
    for key in dict.fromkeys(keys):
        held: list[int] = []
        for i in (i for i, own in enumerate(keys) if own == key and sizes[i]):
            if held and sum(sizes[j] for j in held) + sizes[i] > BUCKET_ELEMENTS:
                buckets.append(Bucket(key, tuple(held), tuple(sizes[j] for j in held)))
                held = []
            held.append(i)
        if held:
            buckets.append(Bucket(key, tuple(held), tuple(sizes[j] for j in held)))
    return buckets


def in_buckets(
    values: Sequence[Any], keys: Sequence[Any], move: Callable[[Any, Any], tuple[Any, Any]]
) -> tuple[list[Any], list[Any]]:
    """Apply `move(flat, key) -> (mean, left)`, both flat, to each bucket; return the means and lefts of all values."""
    means, lefts = list(values), [jnp.zeros_like(value) for value in values]
    for bucket in plan_buckets([value.size for value in values], keys):
        pieces = [values[i].reshape(-1) for i in bucket.members]
        mean, left = move(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), bucket.key)
        start = 0
        for i, size in zip(bucket.members, bucket.sizes, strict=True):
            means[i] = mean[start : start + size].reshape(values[i].shape)
            lefts[i] = left[start : start + size].reshape(values[i].shape)
            start += size
    return means, lefts
