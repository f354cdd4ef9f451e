"""Leaves of one kind travel together: flat buffers of a bounded size, planned from sizes alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

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
