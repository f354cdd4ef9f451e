"""Flops of a step by formulas: of all inner products, and of attention in splash attention's kernels."""

from shardopt.kernels._flash import TILE
from shardopt.planning import ParallelLayout, Transformer
from shardopt.planning._workload import Workload

FORWARD = (1, 1)
BACKWARD = (3, 2)
"""Products of a kernel of splash attention per tile of scores: (with the width of keys, with the
width of values).
"""


def splash_flops(
    key_products: int,
    value_products: int,
    *,
    heads: int,
    length: int,
    keys: int,
    values: int,
    block: int = TILE,
) -> float:
    """Return the flops of a kernel for one row.

    A row has n blocks of positions. The kernel computes n (n + 1) / 2 of the n^2 tiles of scores.

    Args:
      key_products: number of products with the width of keys: scores, and gradients of queries and
        keys.
      value_products: number of products with the width of values.
      heads: query heads.
      length: T, positions.
      keys: width of a head of queries and keys.
      values: width of a head of values.
      block: positions of a block.

    Example:
      >>> splash_flops(*FORWARD, heads=1, length=512, keys=192, values=128) == 2 * 512**2 * (192 + 128)
      True
    """
    tiles = max(length // block, 1)
    return (
        2.0
        * (key_products * keys + value_products * values)
        * heads
        * length**2
        * (tiles + 1)
        / (2 * tiles)
    )


def step_flops(
    workload: Workload,
    layout: ParallelLayout,
    *,
    batch_size: int,
    on_tpu: Transformer | None = None,
) -> float:
    """Return the flops of inner products of one device in a step, on average over the stages of a
    pipeline.

    With the sizes `on_tpu`, the flops of attention are the flops of its kernels: whole tiles of the
    causal mask, scores again in the backward kernel, and rotary positions. Over context they make no
    difference.
    """
    recompute = workload.recompute(layout.remat)
    block = 3 * workload.block_flops + (0 if recompute is None else recompute.flops)
    if on_tpu is not None and layout.context == 1:
        assert workload.attention is not None
        forward, backward = kernel_flops_of(on_tpu)
        passes = 1 if recompute is None or layout.saves("attention") else 2
        block += passes * forward + backward - (passes + 2) * workload.attention.flops
    row = workload.num_blocks * block + 3 * workload.ends_flops
    return batch_size * row / layout.num_chips


def kernel_flops_of(shape: Transformer) -> tuple[float, float]:
    """Return the flops of attention in a block and a row on TPU, (forward, backward)."""
    T = shape.length
    H = shape.num_heads
    G = shape.kv_heads
    K = shape.width
    rope, key_width = (K, K) if shape.latent is None else (shape.latent.rope, K + shape.latent.rope)
    rotated_heads = 0 if shape.positions else H + (G if shape.latent is None else 1)
    # on TPU, rotary positions swap halves of a head by an inner product
    rotation_flops = 2.0 * T * rope * rope * rotated_heads
    forward, backward = (
        splash_flops(*products, heads=H, length=T, keys=key_width, values=K) + rotation_flops
        for products in (FORWARD, BACKWARD)
    )
    return forward, backward
