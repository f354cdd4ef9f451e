"""Tiles of scores of the two splash kernels: their masks, widths, and the heads of a step."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from shardopt.kernels._flash import HIDDEN, MaskRule
from shardopt.kernels._pallas import LANES


def hide(
    scores: Array, query_lead: Any, dim: int, same_segment: Array | None, rule: MaskRule
) -> Array:
    """Return the scores of a tile, or of several heads' tiles, with `HIDDEN` where a query does not
    see a key.

    Args:
      scores: [..., block, block].
      query_lead: position of the first query minus position of the first key.
      dim: 0 if rows of a tile are queries, 1 if they are keys.
      same_segment: [block, block], or None.
      rule: the keys that a query sees by position.
    """
    shape = scores.shape[-2:]
    gap = (
        query_lead
        + lax.broadcasted_iota(jnp.int32, shape, dim)
        - lax.broadcasted_iota(jnp.int32, shape, 1 - dim)
    )
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
