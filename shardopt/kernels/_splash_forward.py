"""Splash attention by a Pallas kernel for TPU that visits visible tiles alone, for several heads of
queries at a time.

jax's kernel has a step of its grid for each tile of the mask, also for hidden tiles, and masks
every tile. It writes the logarithms as float32 [H, T, 128]. This kernel has a step for a block of
queries of some heads, which use the same keys. It loops over the visible tiles, masks those on an
edge, and writes [H, 1, T]. No step depends on another one, so that two cores of a device share
them. On other devices it runs interpreted, for tests.

Suffixes: B sequences, H heads of queries, G heads of keys and values, T positions, K width of a
head, V of its values.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.kernels._devices import vmem
from shardopt.kernels._flash import TILE, MaskRule, capped
from shardopt.kernels._pallas import LANES, call_kernel, pl, pltpu, product
from shardopt.kernels._splash_tiles import divisors, hide, padded


def heads_of_step(
    query: tuple[int, ...], key: tuple[int, ...], value_width: int, dtype: DTypeLike, memory: int
) -> int:
    """Return how many heads of queries share a step.

    0 if not even the keys and values of a row fit into VMEM.

    Two cores need two steps. With heads of 128 in half precision, 32,768 positions fit on v5p, and
    8,192 on v4.

    Args:
      query: the shape of queries, [B, H, T, K].
      key: the shape of keys, [B, G, T, K].
      value_width: V.
      dtype: of all of them.
      memory: bytes of VMEM.
    """
    B, H, T, K = query
    block = math.gcd(T, TILE)
    width = padded(K) + padded(value_width)
    itemsize = np.dtype(dtype).itemsize
    row = 2 * T * width * itemsize
    head = 8 * block**2 + block * (2 * width * itemsize + 4 * padded(value_width))
    counts = [count for count in divisors(H // key[1]) if row + count * head <= 5 * memory // 6]
    return max((count for count in counts if count == 1 or count < B * H), default=0)


def attend(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G T K"],
    value: Float[Array, "B G T V"],
    query_segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B T"] | None,
    rule: MaskRule,
) -> tuple[Float[Array, "B H T V"], Float[Array, "B H T"]]:
    """Return the mixed values for scores query key^T, and the logarithm of the sum of their
    exponentials.

    T is a multiple of 128, and a step has a head. A query that sees no key has a logarithm near
    `HIDDEN`, and some mean of values.
    """
    (B, H, T, K), (G, V) = query.shape, value.shape[1::2]
    block = math.gcd(T, TILE)
    R = H // G
    heads = heads_of_step(query.shape, key.shape, V, value.dtype, vmem())

    def query_spec(width):
        return pl.BlockSpec((None, heads, block, width), lambda b, h, i: (b, h, i, 0))

    def key_spec(width):
        return pl.BlockSpec((None, None, T, width), lambda b, h, _: (b, h * heads // R, 0, 0))

    inputs = [query, key, value]
    in_specs = [query_spec(K), key_spec(K), key_spec(V)]
    if query_segments is not None and key_segments is not None:
        inputs += [
            jnp.broadcast_to(query_segments[:, :, None], (B, T, LANES)),
            key_segments[:, None],
        ]
        in_specs += [
            pl.BlockSpec((None, block, LANES), lambda b, h, i: (b, i, 0)),
            pl.BlockSpec((None, 1, T), lambda b, h, i: (b, 0, 0)),
        ]
    out_shape = [
        jax.ShapeDtypeStruct((B, H, T, V), query.dtype),
        jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32),
    ]
    rows = heads * block
    blocks = T // block
    tiles = sum(_last(i, blocks, rule) - _first(i, block, rule, max) for i in range(blocks))
    mixed, logsumexp = call_kernel(
        functools.partial(_mix, rule=rule, block=block),
        (B, H // heads, blocks),
        inputs,
        in_specs,
        [query_spec(V), pl.BlockSpec((None, heads, 1, block), lambda b, h, i: (b, h, 0, i))],
        out_shape,
        name="splash_forward",
        flops=2 * block**2 * tiles * B * H * (K + V),
        transcendentals=block**2 * tiles * B * H,
        scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32) for width in (LANES, LANES, V)],
    )
    return mixed, logsumexp[:, :, 0]


def _first(i: Any, block: int, rule: MaskRule, maximum: Any) -> Any:
    """Return the number of the first block of keys that some query of block i sees."""
    return 0 if rule.window is None else maximum(i * block - rule.window + 1, 0) // block


def _last(i: Any, blocks: int, rule: MaskRule) -> Any:
    """Return the end of these blocks."""
    return i + 1 if rule.causal else blocks


def _mix(
    query_ref: Any, key_ref: Any, value_ref: Any, *refs: Any, rule: MaskRule, block: int
) -> None:
    """Write the mixed values of the queries of a block, with a softmax over blocks of keys.

    Rows are the queries of all heads.
    """
    *segments, out, logsumexp, top, total, mixed = refs
    # One product for the queries of several heads: they use the same keys.
    heads = query_ref.shape[0]
    V = value_ref.shape[1]
    i = pl.program_id(2)

    def absorb(j: Any, *, masked: bool, first: bool = False) -> None:
        keys = pl.ds(pl.multiple_of(j * block, block), block)
        scores = product(query_ref[...].reshape(heads * block, -1), key_ref[keys], 1, 1)
        scores = capped(scores, rule.softcap)
        if masked:
            same_segment = (
                _wide(segments[0][...], block) == segments[1][:, keys] if segments else None
            )
            tiles = scores.reshape(heads, block, block)
            scores = hide(tiles, (i - j) * block, 0, same_segment, rule).reshape(scores.shape)
        # numbers of a row stand in each of its lanes, except that `total` has a sum for each lane,
        # which are added at the end
        largest = jnp.max(functools.reduce(jnp.maximum, _columns(scores)), axis=1, keepdims=True)
        new_top = jnp.broadcast_to(largest, top.shape) if first else jnp.maximum(top[...], largest)
        weights = jnp.exp(scores - _wide(new_top, block))
        value = value_ref[keys]
        new_total = functools.reduce(jnp.add, _columns(weights))
        new_mixed = product(weights.astype(value.dtype), value, 1, 0)
        if not first:
            rescale = jnp.exp(top[...] - new_top)
            new_total = new_total + total[...] * rescale
            new_mixed = new_mixed + mixed[...] * _wide(rescale, V)
        top[...], total[...], mixed[...] = new_top, new_total, new_mixed

    def visit(j: Array, _: None) -> None:
        if segments or rule.window is None:
            absorb(j, masked=bool(segments))
            return
        on_edge = (i - j + 1) * block > rule.window
        pl.when(on_edge)(lambda: absorb(j, masked=True))
        pl.when(jnp.logical_not(on_edge))(lambda: absorb(j, masked=False))

    if rule.causal:  # begin on the diagonal, the only block of keys in which `causal` hides some
        absorb(i, masked=True, first=True)
        lax.fori_loop(_first(i, block, rule, jnp.maximum), i, visit, None)
    else:
        absorb(0, masked=bool(segments), first=True)
        lax.fori_loop(1, pl.num_programs(2), visit, None)
    sums = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), total.shape)
    out[...] = (mixed[...] * _wide(1 / sums, V)).astype(out.dtype).reshape(out.shape)
    logarithms = top[...] + jnp.log(sums)
    for head in range(heads):
        logsumexp[head] = jnp.transpose(logarithms[head * block : (head + 1) * block])[:1]


def _columns(x: Array) -> list[Array]:
    """Cut a tile into parts as wide as the lanes."""
    return [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]


def _wide(x: Array, width: int) -> Array:
    """Return a number of each row, which stands in all lanes, with another width."""
    return jnp.tile(x, (1, padded(width) // LANES))[:, :width]
