"""What splash attention's kernels compute: whole tiles of a causal mask, and scores again in the backward pass."""

from shardopt.nn.flash import TILE

KERNELS = {"fwd": (1, 1), "_dq": (2, 1), "fused": (3, 2), "_dkv": (2, 2)}
"""By a part of a kernel's name: how many products of the width of keys it has for each tile, and how many of that of values."""
FORWARD = KERNELS["fwd"]
BACKWARD = KERNELS["fused"]
"""Of `shardopt.nn.splash_backward`; jax's own two kernels each compute the scores, and their gradients, for themselves."""


def splash_flops(of_keys: int, of_values: int, *, heads: int, length: int, keys: int, values: int) -> float:
    """Return the flops of so many products of each kind, of one row.

    With n tiles of 512 to a row, n (n + 1) / 2 of n^2 are computed.

    Args:
      of_keys: products with queries and keys, or as wide: scores, and gradients of queries and keys.
      of_values: products with values, or as wide.
      heads: of queries.
      length: T, positions.
      keys: width of a head of queries and keys.
      values: width of a head of values.

    Example:
      >>> splash_flops(*FORWARD, heads=1, length=512, keys=192, values=128) == 2 * 512**2 * (192 + 128)
      True
    """
    tiles = max(length // TILE, 1)
    return 2.0 * (of_keys * keys + of_values * values) * heads * length**2 * (tiles + 1) / (2 * tiles)
