"""Flops of splash attention's kernels, which compute whole tiles of a causal mask, and scores again backwards."""

from shardopt.nn._flash import TILE

KERNELS = {"fwd": (1, 1), "_dq": (2, 1), "fused": (3, 2), "_dkv": (2, 2)}
"""Part of a kernel's name to the number of products per tile: (with the width of keys, with the width of values)."""
FORWARD = KERNELS["fwd"]
BACKWARD = KERNELS["fused"]
"""The kernel of `shardopt.nn._splash_backward`; each of jax's two kernels computes scores and their gradients again."""


def splash_flops(key_products: int, value_products: int, *, heads: int, length: int, keys: int, values: int) -> float:
    """Return the flops of a kernel for one row.

    A row has n tiles of 512 positions. The kernel computes n (n + 1) / 2 of the n^2 tiles of scores.

    Args:
      key_products: number of products with the width of keys: scores, and gradients of queries and keys.
      value_products: number of products with the width of values.
      heads: query heads.
      length: T, positions.
      keys: width of a head of queries and keys.
      values: width of a head of values.

    Example:
      >>> splash_flops(*FORWARD, heads=1, length=512, keys=192, values=128) == 2 * 512**2 * (192 + 128)
      True
    """
    tiles = max(length // TILE, 1)
    return 2.0 * (key_products * keys + value_products * values) * heads * length**2 * (tiles + 1) / (2 * tiles)
