"""Send several small leaves in one collective, where a collective costs more time than the copies
that join the leaves.

Between processes on CPU each collective is a round trip over sockets of about a millisecond, and
XLA:CPU joins none of them. XLA:GPU joins collectives itself (its combiner passes), and on a TPU
joining gains nothing. PyTorch's FSDP joins the leaves of a module for the same reason.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core import Arrays, replaced
from shardopt.mesh import device_kind

MeshAxes = str | tuple[str, ...]
"""A mesh axis, or several axes that act as one."""

SMALL_BUCKET_BYTES = 2**21
"""The unsharded bytes of a bucket: about as many as a socket sends in a millisecond. A bucket needs
that memory once more.
"""
BUCKET_BYTES = 25 * 2**20
"""The bytes of a bucket of unsharded leaves: the default of PyTorch's DistributedDataParallel."""


def all_gather_buckets(
    xs: Sequence[jax.Array],
    dims: Sequence[int],
    axis: MeshAxes,
    gather: Callable[[jax.Array, MeshAxes, int], jax.Array],
    *,
    bucket_bytes: int,
) -> Arrays:
    """Return every x all-gathered on its dim, with one call of `gather(x, axis, dim)` for each
    bucket.

    A bucket has at most `bucket_bytes` unsharded bytes.
    """
    # device 0: a0 b0      rows     a0 b0      a = a0 a1
    # device 1: a1 b1  ->  [n, all] a1 b1  ->  b = b0 b1
    # One gather of rows holds all leaves; their columns are cut apart again.
    num_shards = jax.lax.axis_size(axis)

    def gather_bucket(bucket: Arrays, dims: list[int]) -> Arrays:
        rows = gather(_flatten_rows([x[None] for x in bucket]), axis, 0)  # [n, all elements]
        parts = jnp.split(rows, split_points([x.size for x in bucket]), axis=1)
        return [
            _join_shards(part.reshape(num_shards, *x.shape), dim)
            for part, x, dim in zip(parts, bucket, dims, strict=True)
        ]

    # The limit counts gathered bytes, and xs are shards.
    return _move_in_buckets(
        xs, dims, bucket_bytes // num_shards, lambda x, dim: gather(x, axis, dim), gather_bucket
    )


def reduce_scatter_buckets(
    xs: Sequence[jax.Array],
    dims: Sequence[int],
    axis: MeshAxes,
    scatter: Callable[[jax.Array, MeshAxes, int], jax.Array],
    *,
    bucket_bytes: int,
) -> Arrays:
    """Return this device's shard of the sum of every x, with one call of `scatter(x, axis, dim)`
    for each bucket.
    """
    num_shards = jax.lax.axis_size(axis)

    def scatter_bucket(bucket: Arrays, dims: list[int]) -> Arrays:
        all_shard_rows = [
            shards_of(x, dim, num_shards) for x, dim in zip(bucket, dims, strict=True)
        ]
        sums = scatter(_flatten_rows(all_shard_rows), axis, 0)  # [1, all elements of a shard]
        parts = jnp.split(
            sums, split_points([shard_rows[0].size for shard_rows in all_shard_rows]), axis=1
        )
        return [
            # [1, elements] -> the shape of this device's shard
            part.reshape(shard_rows.shape[1:])
            for part, shard_rows in zip(parts, all_shard_rows, strict=True)
        ]

    # A complex leaf became two parts, which share its dim.
    parts, join = real_parts(xs)
    part_dims = [dim for x, dim in zip(xs, dims, strict=True) for _ in real_parts([x])[0]]
    return join(
        _move_in_buckets(
            parts, part_dims, bucket_bytes, lambda x, dim: scatter(x, axis, dim), scatter_bucket
        )
    )


def all_reduce_buckets(xs: Sequence[jax.Array], axes: tuple[str, ...]) -> Arrays:
    """Return every x summed over mesh axes, with one all-reduce for each bucket of small leaves.

    Within one process each leaf has its own all-reduce, and XLA:CPU joins them itself. If they were
    joined before, XLA:CPU would compile everything that computes them as one function, and a step
    would take 1.5 times as long to compile.
    """

    def reduce_bucket(bucket: Arrays, _: Sequence[int]) -> Arrays:
        sums = jax.lax.psum(_flatten_rows([x[None] for x in bucket])[0], axes)
        parts = jnp.split(sums, split_points([x.size for x in bucket]))
        return [part.reshape(x.shape) for part, x in zip(parts, bucket, strict=True)]

    limit = BUCKET_BYTES if jax.process_count() > 1 else 0  # 0: each leaf is a bucket
    parts, join = real_parts(xs)
    return join(
        _move_in_buckets(
            parts, [0] * len(parts), limit, lambda x, _: jax.lax.psum(x, axes), reduce_bucket
        )
    )


def real_parts(xs: Sequence[jax.Array]) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """Return arrays with each complex one as its real and its imaginary part, and the inverse.

    XLA:CPU aborts on a sum over devices of complex zeros, such as the gradient of a parameter that
    the loss does not read (jaxlib 0.10.2).
    """
    is_complex = [jnp.issubdtype(x.dtype, jnp.complexfloating) for x in xs]
    parts = []
    for x, has_parts in zip(xs, is_complex, strict=True):
        parts += [x.real, x.imag] if has_parts else [x]

    def join(parts: Arrays) -> Arrays:
        remaining = iter(parts)
        return [
            jax.lax.complex(next(remaining), next(remaining)) if has_parts else next(remaining)
            for has_parts in is_complex
        ]

    return parts, join


def _move_in_buckets(
    xs: Sequence[jax.Array],
    dims: Sequence[int],
    limit: int,
    move_leaf: Callable[[jax.Array, int], jax.Array],
    move_bucket: Callable[[Arrays, list[int]], Arrays],
) -> Arrays:
    """Move leaves in buckets of one dtype and at most `limit` bytes.

    Except on CPU, move each leaf separately.
    """
    # a leaf without elements is in no bucket, but its shape changes too
    # `plan_buckets` gives every other leaf a bucket, so each result below is overwritten.
    results = [move_leaf(x, dim) if not x.size else x for x, dim in zip(xs, dims, strict=True)]
    nbytes = [x.size * x.dtype.itemsize for x in xs]
    dtypes = [x.dtype for x in xs]
    for bucket in plan_buckets(nbytes, dtypes, limit if device_kind() == "cpu" else 0):
        bucket_leaves = [xs[i] for i in bucket.members]
        bucket_dims = [dims[i] for i in bucket.members]
        if len(bucket_leaves) > 1:
            moved = move_bucket(bucket_leaves, bucket_dims)
        else:
            moved = [move_leaf(bucket_leaves[0], bucket_dims[0])]
        results = replaced(results, bucket.members, moved)
    return results


class Bucket(NamedTuple):
    """Leaves that share one collective.

    Attributes:
      key: a property that the leaves share, such as their dtype.
      members: the indices of the leaves.
      sizes: the size of each leaf.
    """

    key: Any
    members: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The sum of the sizes."""
        return sum(self.sizes)


def plan_buckets(sizes: Sequence[int], keys: Sequence[Hashable], limit: int) -> list[Bucket]:
    """Put leaves with equal keys into buckets of at most `limit`, in order.

    A leaf above the limit gets its own bucket, and a leaf of size 0 gets none. Sizes and limit have
    the same unit.

    Example:
      >>> plan_buckets([3, 0, 5, 2], ["a", "a", "a", "a"], limit=8)
      [Bucket(key='a', members=(0, 2), sizes=(3, 5)), Bucket(key='a', members=(3,), sizes=(2,))]
    """
    buckets: list[list[int]] = []
    last_bucket: dict[Hashable, list[int]] = {}  # key -> its last bucket
    for i, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        if not size:
            continue
        # Only the last bucket of a key is open, so the leaves of a bucket are neighbours in the
        # tree.
        if key not in last_bucket or sum(sizes[j] for j in last_bucket[key]) + size > limit:
            buckets.append([])
            last_bucket[key] = buckets[-1]
        last_bucket[key].append(i)
    return [
        Bucket(keys[members[0]], tuple(members), tuple(sizes[i] for i in members))
        for members in buckets
    ]


def _flatten_rows(rows: Sequence[jax.Array]) -> jax.Array:
    """Join arrays [n, ...] into one array [n, all elements]."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in rows], axis=1)


def split_points(sizes: Sequence[int]) -> list[int]:
    """Return where parts of these sizes begin, but the first."""
    return list(itertools.accumulate(sizes))[:-1]


def shards_of(x: jax.Array, dim: int, n: int) -> jax.Array:
    """Return the n shards of x along a dim as rows, [n, shape of a shard]."""
    split = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    # Shards of an inner dim are not contiguous in memory. As rows they are, as a collective needs.
    return jnp.moveaxis(split, dim, 0)


def _join_shards(rows: jax.Array, dim: int) -> jax.Array:
    """Return rows [n, shape of a shard] joined along a dim: the inverse of `shards_of`."""
    split = jnp.moveaxis(rows, 0, dim)
    return split.reshape(*split.shape[:dim], -1, *split.shape[dim + 2 :])
