"""Several small leaves in one collective, where a collective costs more than the copies that joining them takes.

Between processes on CPU each collective is a round trip over sockets that takes a millisecond or so, and XLA:CPU joins
none of them; XLA:GPU does it by itself (its combiner passes), and on a TPU there is nothing to save. PyTorch's FSDP joins
those of a module for the same reason.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.mesh import device_kind

SMALL_BUCKET_BYTES = 2**21
"""Whole bytes that travel together, about what a socket takes in a millisecond; so much is held once more meanwhile."""
BUCKET_BYTES = 25 * 2**20
"""The same of leaves that are all there anyway: what PyTorch's DistributedDataParallel joins by default."""


def all_gather_buckets(
    xs: Sequence[Any], dims: Sequence[int], axis: str, gather: Callable[..., Any], *, joined: int
) -> list[Any]:
    """Return every x made whole on its dim: `gather(x, axis, dim)`, one for each group of `joined` whole bytes."""
    n = jax.lax.axis_size(axis)

    def several(some: list[Any], dims: list[int]) -> list[Any]:
        rows = gather(_flat([x[None] for x in some]), axis, 0)  # [n, all elements]
        parts = jnp.split(rows, _ends([x.size for x in some]), axis=1)
        return [_unrolled(part.reshape(n, *x.shape), dim) for part, x, dim in zip(parts, some, dims, strict=True)]

    return _by_group(xs, dims, joined // n, lambda x, dim: gather(x, axis, dim), several)


def reduce_scatter_buckets(
    xs: Sequence[Any], dims: Sequence[int], axis: str, scatter: Callable[..., Any], *, joined: int
) -> list[Any]:
    """Return every x summed, and this device's shard of it: `scatter(x, axis, dim)`, one for each such group."""
    n = jax.lax.axis_size(axis)

    def several(some: list[Any], dims: list[int]) -> list[Any]:
        rows = [_rolled(x, dim, n) for x, dim in zip(some, dims, strict=True)]
        row = scatter(_flat(rows), axis, 0)  # [1, all elements of a shard]
        parts = jnp.split(row, _ends([one[0].size for one in rows]), axis=1)
        return [part.reshape(one.shape[1:]) for part, one in zip(parts, rows, strict=True)]

    return _by_group(xs, dims, joined, lambda x, dim: scatter(x, axis, dim), several)


def all_reduce_buckets(xs: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """Return every x summed over mesh axes, one sum for each group of small leaves."""

    def several(some: list[Any], _: Any) -> list[Any]:
        row = jax.lax.psum(_flat([x[None] for x in some])[0], axes)
        parts = jnp.split(row, _ends([x.size for x in some]))
        return [part.reshape(x.shape) for part, x in zip(parts, some, strict=True)]

    return _by_group(xs, [0] * len(xs), BUCKET_BYTES, lambda x, _: jax.lax.psum(x, axes), several)


def _by_group(
    xs: Sequence[Any], dims: Sequence[int], most: int, alone: Callable[..., Any], several: Callable[..., list[Any]]
) -> list[Any]:
    """Move leaves in groups of one dtype and at most `most` bytes; elsewhere than on CPU each alone."""
    on_cpu = device_kind() == "cpu"
    groups: list[list[int]] = []
    open_groups: dict[Any, tuple[list[int], int]] = {}  # of each dtype the last one, and its bytes
    for i, x in enumerate(xs):
        group, size = open_groups.get(x.dtype, ([], 0))
        size += x.size * x.dtype.itemsize
        if not group or not on_cpu or size > most:
            groups.append(group := [])
            size = x.size * x.dtype.itemsize
        group.append(i)
        open_groups[x.dtype] = group, size
    results = list(xs)
    for group in groups:
        some, where = [xs[i] for i in group], [dims[i] for i in group]
        moved = several(some, where) if len(group) > 1 else [alone(some[0], where[0])]
        for i, x in zip(group, moved, strict=True):
            results[i] = x
    return results


def _flat(rows: Sequence[Any]) -> Any:
    """Join [n, ...] each into [n, all elements]."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in rows], axis=1)


def _ends(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]


def _rolled(x: Any, dim: int, n: int) -> Any:
    """Return the n shards of a dim as rows, [n, shape of a shard]."""
    cut = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0)


def _unrolled(rows: Any, dim: int) -> Any:
    """Return rows [n, shape of a shard] as one array: the inverse of `_rolled`."""
    cut = jnp.moveaxis(rows, 0, dim)
    return cut.reshape(*cut.shape[:dim], -1, *cut.shape[dim + 2 :])
