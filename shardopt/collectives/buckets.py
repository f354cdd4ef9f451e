"""Several small leaves in one collective, where a collective costs more than the copies that joining them takes.

Between processes on CPU each collective is a round trip over sockets that takes a millisecond or so, and XLA:CPU joins
none of them; XLA:GPU does it by itself (its combiner passes), and on a TPU there is nothing to save. PyTorch's FSDP joins
those of a module for the same reason.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.mesh import device_kind

MeshAxes = str | tuple[str, ...]
"""A mesh axis, or several taken together."""

SMALL_BUCKET_BYTES = 2**21
"""Whole bytes that travel together, about what a socket takes in a millisecond; so much is held once more meanwhile."""
BUCKET_BYTES = 25 * 2**20
"""The same of leaves that are all there anyway: what PyTorch's DistributedDataParallel joins by default."""


def all_gather_buckets(
    xs: Sequence[jax.Array],
    dims: Sequence[int],
    axis: MeshAxes,
    gather: Callable[[jax.Array, MeshAxes, int], jax.Array],
    *,
    bucket_bytes: int,
) -> list[jax.Array]:
    """Return every x made whole on its dim: `gather(x, axis, dim)`, one for each group of `bucket_bytes` whole bytes."""
    n = jax.lax.axis_size(axis)

    def several(some: list[jax.Array], dims: list[int]) -> list[jax.Array]:
        rows = gather(_flat([x[None] for x in some]), axis, 0)  # [n, all elements]
        parts = jnp.split(rows, _ends([x.size for x in some]), axis=1)
        return [_unrolled(part.reshape(n, *x.shape), dim) for part, x, dim in zip(parts, some, dims, strict=True)]

    return _by_group(xs, dims, bucket_bytes // n, lambda x, dim: gather(x, axis, dim), several)


def reduce_scatter_buckets(
    xs: Sequence[jax.Array],
    dims: Sequence[int],
    axis: MeshAxes,
    scatter: Callable[[jax.Array, MeshAxes, int], jax.Array],
    *,
    bucket_bytes: int,
) -> list[jax.Array]:
    """Return every x summed, and this device's shard of it: `scatter(x, axis, dim)`, one for each such group."""
    n = jax.lax.axis_size(axis)

    def several(some: list[jax.Array], dims: list[int]) -> list[jax.Array]:
        rows = [shards_of(x, dim, n) for x, dim in zip(some, dims, strict=True)]
        row = scatter(_flat(rows), axis, 0)  # [1, all elements of a shard]
        parts = jnp.split(row, _ends([one[0].size for one in rows]), axis=1)
        return [part.reshape(one.shape[1:]) for part, one in zip(parts, rows, strict=True)]

    return _by_group(xs, dims, bucket_bytes, lambda x, dim: scatter(x, axis, dim), several)


def all_reduce_buckets(xs: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Return every x summed over mesh axes, one sum for each group of small leaves.

    Within one process each goes alone: XLA:CPU makes one collective of them by itself, and of leaves joined here one
    function of all that computes them, which takes half as long again to compile a step.
    """

    def several(some: list[jax.Array], _: Sequence[int]) -> list[jax.Array]:
        row = jax.lax.psum(_flat([x[None] for x in some])[0], axes)
        parts = jnp.split(row, _ends([x.size for x in some]))
        return [part.reshape(x.shape) for part, x in zip(parts, some, strict=True)]

    limit = BUCKET_BYTES if jax.process_count() > 1 else 0
    return _by_group(xs, [0] * len(xs), limit, lambda x, _: jax.lax.psum(x, axes), several)


def _by_group(
    xs: Sequence[jax.Array],
    dims: Sequence[int],
    limit: int,
    alone: Callable[[jax.Array, int], jax.Array],
    several: Callable[[list[jax.Array], list[int]], list[jax.Array]],
) -> list[jax.Array]:
    """Move leaves in buckets of one dtype and at most `limit` bytes; elsewhere than on CPU each alone."""
    results = [alone(x, dim) if not x.size else x for x, dim in zip(xs, dims, strict=True)]
    nbytes, dtypes = [x.size * x.dtype.itemsize for x in xs], [x.dtype for x in xs]
    for bucket in plan_buckets(nbytes, dtypes, limit if device_kind() == "cpu" else 0):
        some, where = [xs[i] for i in bucket.members], [dims[i] for i in bucket.members]
        moved = several(some, where) if len(some) > 1 else [alone(some[0], where[0])]
        for i, x in zip(bucket.members, moved, strict=True):
            results[i] = x
    return results


class Bucket(NamedTuple):
    """Leaves that travel in one collective.

    Attributes:
      key: what they have in common, such as their dtype.
      members: their positions.
      sizes: of each.
    """

    key: Any
    members: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of all of them."""
        return sum(self.sizes)


def plan_buckets(sizes: Sequence[int], keys: Sequence[Hashable], limit: int) -> list[Bucket]:
    """Put leaves with equal keys into buckets of at most `limit`, in order.

    A leaf above the limit is in a bucket of its own, and one of size 0 in none. Sizes and limit have one unit.

    Example:
      >>> plan_buckets([3, 0, 5, 2], ["a", "a", "a", "a"], limit=8)
      [Bucket(key='a', members=(0, 2), sizes=(3, 5)), Bucket(key='a', members=(3,), sizes=(2,))]
    """
    buckets: list[list[int]] = []
    last: dict[Hashable, list[int]] = {}  # of each key
    for i, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        if not size:
            continue
        if key not in last or sum(sizes[j] for j in last[key]) + size > limit:
            buckets.append([])
            last[key] = buckets[-1]
        last[key].append(i)
    return [Bucket(keys[some[0]], tuple(some), tuple(sizes[i] for i in some)) for some in buckets]


def _flat(rows: Sequence[jax.Array]) -> jax.Array:
    """Join [n, ...] each into [n, all elements]."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in rows], axis=1)


def _ends(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]


def shards_of(x: jax.Array, dim: int, n: int) -> jax.Array:
    """Return the n shards of a dim as rows, [n, shape of a shard]."""
    cut = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0)


def _unrolled(rows: jax.Array, dim: int) -> jax.Array:
    """Return rows [n, shape of a shard] as one array: the inverse of `shards_of`."""
    cut = jnp.moveaxis(rows, 0, dim)
    return cut.reshape(*cut.shape[:dim], -1, *cut.shape[dim + 2 :])
