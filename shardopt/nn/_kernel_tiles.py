"""Shared parts of Pallas kernels: products and masks of a tile, and the memory that they may use."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from shardopt.mesh import device_kind_or_default
from shardopt.nn._flash import HIDDEN, Rule

LANES = 128
"""The kernels need tiles of a multiple of so many positions, and pad heads to a multiple of it."""


def product(a: Array, b: Array, dim_a: int, dim_b: int, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the product of two matrices over a dim of each, summed in a dtype."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=dtype)


def hide(scores: Array, query_lead: Any, dim: int, same_segment: Array | None, rule: Rule) -> Array:
    """Return the scores of a tile, or of several heads' tiles, with `HIDDEN` where a query does not see a key.

    Args:
      scores: [..., block, block].
      query_lead: position of the first query minus position of the first key.
      dim: 0 if rows of a tile are queries, 1 if they are keys.
      same_segment: [block, block], or None.
      rule: what a query sees by position.
    """
    shape = scores.shape[-2:]
    gap = query_lead + lax.broadcasted_iota(jnp.int32, shape, dim) - lax.broadcasted_iota(jnp.int32, shape, 1 - dim)
    masks = [] if same_segment is None else [same_segment]
    if rule.causal:
        masks.append(gap >= 0)
    if rule.window is not None:
        masks.append(gap < rule.window)
    return jnp.where(functools.reduce(jnp.logical_and, masks), scores, HIDDEN) if masks else scores


def padded(width: int) -> int:
    """Return the width that a head has in memory."""
    return -(-width // LANES) * LANES


def divisors(heads: int) -> list[int]:
    """Return how many heads of queries may share a step of a kernel, if so many heads share keys.

    A step with several heads has longer products, and its masks and bookkeeping are shared.
    """
    return [count for count in range(1, 5) if heads % count == 0]


def vmem(kind: str | None = None) -> int:
    """Return the bytes of VMEM that a kernel may use: a core has 16 MiB up to TPU v4, 128 on v6e, and 64 or more on others."""
    mebibytes = {"TPU v2": 16, "TPU v3": 16, "TPU v4": 16, "TPU v6 lite": 96}.get(kind or device_kind_or_default(), 48)
    return mebibytes * 2**20
