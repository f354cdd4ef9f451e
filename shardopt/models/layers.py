"""The parts a transformer block is made of, as pure functions that keep heads and hidden units unmixed.

Suffixes: B sequences, T positions, S cached positions, D width, H heads, K width of a head, F hidden units.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt import nn
from shardopt.mesh import device_kind_or_default
from shardopt.nn.attention import masked_attention
from shardopt.nn.low_precision import Precision

Tree = TypeVar("Tree")


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, of one block (or stacked: one more dim in front).

    Attributes:
      key: [B, S, H, K], rotated already.
      value: [B, S, H, K].
    """

    key: Array
    value: Array


def cast(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Return weights in the dtype that a model computes in; None keeps each in its own."""
    return tree if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


@jax.checkpoint
def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], epsilon: float | Float[Array, ""] = 1e-6
) -> Float[Array, "*batch D"]:
    """Scale every vector to root mean square one, then by a learned factor a component.

    Statistics are taken in float32 at least. Only x is kept for the backward pass.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def rotate(x: Float[Array, "B T H K"], positions: Int[Array, "*B T"], base: float) -> Float[Array, "B T H K"]:
    """Turn component pair i of the vector at position t by the angle t * base^(-2i/K); positions are [T] or [B, T].

    The product of a rotated query and a rotated key then depends on the distance of their positions only.

    References:
      Su, Lu, Pan, Murtadha, Wen and Liu, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
      2021, equation 34; the pairs here are components i and i + K/2.
    """
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = base ** (-jnp.arange(half, dtype=wide) / half)
    angles = positions.astype(wide)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    angles = angles.reshape(-1, positions.shape[-1], 1, half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if device_kind_or_default().startswith("TPU"):
        return _rotated_by_product(x, cos, sin)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


def _turned(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T 1 K/2"], sin: Float[Array, "#B T 1 K/2"]
) -> Float[Array, "B T H K"]:
    """Return x rotated, its halves swapped by a product with a permutation.

    Half a vector fills the lanes of a TPU no less than a whole one, so halves cost twice the memory, and copies; with a
    product XLA rotates in one pass over x. Each sum has one term, so nothing is rounded.
    """
    both = lambda first, second: jnp.concatenate([first, second], axis=-1)  # noqa: E731
    K = x.shape[-1]
    swap = jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=-1)
    swapped = jnp.einsum("bthk,kj->bthj", x, swap, precision="highest", preferred_element_type=cos.dtype)
    return (x * both(cos, cos) + swapped * both(-sin, sin)).astype(x.dtype)


_rotated_by_product = jax.custom_vjp(_turned)
# back by the same in one pass, rounded once; derived, it would be two terms, each rounded
_rotated_by_product.defvjp(
    lambda x, cos, sin: (_turned(x, cos, sin), (cos, sin)),
    lambda angle, dy: (_turned(dy, angle[0], -angle[1]), None, None),
)


def places(length: int, positions: Int[Array, "B T"] | None, order: Int[Array, "B T"] | None) -> Int[Array, "*B T"]:
    """Return where position embeddings are taken: at the positions, else the order, else `nn.positions` of the length."""
    given = order if positions is None else positions
    return nn.positions(length) if given is None else given


def attention(
    weights: dict[str, Array],
    x: Float[Array, "B T D"],
    *,
    rope_base: float,
    cache: KVCache | None = None,
    start: Int[Array, ""] | int = 0,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    order: Int[Array, "B T"] | None = None,
    precision: Precision | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Return causal self-attention with rotary positions, and the cache with what these T positions add to it.

    Heads are a dim of their own in both weights, so a tensor axis that takes it splits the projections, the
    softmax and the sum over heads with no reshape in between.

    Args:
      weights: "qkv" [D, 3, H, K] and "out" [H, K, D].
      x: T positions, the first of which is `start`.
      rope_base: slowest wavelength of the rotary positions, over 2 pi.
      cache: keys and values of earlier positions, to attend to as well; None when there are none.
      start: position of `x[:, 0]`, 0 without a cache.
      segment_ids: the document of each token, which attends to no other; None is one a row. Not with a cache.
      positions: by what each token is rotated, as `places` has it; with a cache by `start` and what follows.
      order: where each token stands in its row, by which it attends; None is natural order. Not with a cache.
      precision: of the products with weights, as in `so.nn.quantized_einsum`.
    """
    # The parts side by side, as the product leaves them: a dim of parts in front would cost a transposition each way.
    query, key, value = _parts(nn.quantized_einsum("btd,dchk->btchk", x, weights["qkv"], precision=precision))
    if cache is not None:
        at = start + jnp.arange(x.shape[1])
        query, key = rotate(query, at, rope_base), rotate(key, at, rope_base)
        cache = KVCache(_write(cache.key, key, start), _write(cache.value, value, start))
        mixed = masked_attention(query, *cache, _visible(at, cache.key.shape[1])[None])
    else:
        at = places(x.shape[1], positions, order)
        qkv = checkpoint_name((rotate(query, at, rope_base), rotate(key, at, rope_base), value), "qkv")
        mixed = nn.attention(*qkv, segment_ids=segment_ids, positions=order)
    out = nn.quantized_einsum("bthk,hkd->btd", mixed, weights["out"], precision=precision)
    return checkpoint_name(out, "attention_out"), cache


def grouped_attention(
    weights: dict[str, Array],
    x: Float[Array, "B T D"],
    *,
    rope_base: float | None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    order: Int[Array, "B T"] | None = None,
    precision: Precision | None = None,
) -> Float[Array, "B T D"]:
    """Return causal self-attention in which several heads of queries share those of keys and values.

    Args:
      weights: "q" [D, H, K], "kv" [D, G, 2 K] and "out" [H, K, D].
      x: T positions.
      rope_base: slowest wavelength of the rotary positions, over 2 pi; None rotates nothing.
      segment_ids: as in `attention`, like what follows.
      positions: see there.
      order: see there.
      precision: see there.
    """
    query = nn.quantized_einsum("btd,dhk->bthk", x, weights["q"], precision=precision)
    key, value = jnp.split(nn.quantized_einsum("btd,dgk->btgk", x, weights["kv"], precision=precision), 2, axis=-1)
    if rope_base is not None:
        at = places(x.shape[1], positions, order)
        query, key = rotate(query, at, rope_base), rotate(key, at, rope_base)
    qkv = checkpoint_name((query, key, value), "qkv")
    mixed = nn.attention(*qkv, segment_ids=segment_ids, positions=order)
    out = nn.quantized_einsum("bthk,hkd->btd", mixed, weights["out"], precision=precision)
    return checkpoint_name(out, "attention_out")


def swiglu(
    weights: dict[str, Array], x: Float[Array, "B T D"], *, precision: Precision | None = None
) -> Float[Array, "B T D"]:
    """Return silu(x @ gate) * (x @ up) @ down; `weights` holds "up" [D, 2, F] (gate first) and "down" [F, D].

    Products are of the precision that `so.nn.quantized_einsum` has.

    References:
      Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """
    hidden = nn.quantized_einsum("btd,dcf->btcf", x, weights["up"], precision=precision)
    gate, up = _parts(checkpoint_name(hidden, "mlp_hidden"))
    return _gated_down(precision, gate, up, weights["down"])


def _parts(x: Array) -> list[Array]:
    """Cut [B, T, C, ...] into C parts [B, T, ...]. Of a split the gradient is one concatenation, of indices a sum of paddings."""
    return [jnp.squeeze(part, 2) for part in jnp.split(x, x.shape[2], axis=2)]


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _gated_down(precision: Precision | None, gate: Array, up: Array, down: Array) -> Array:
    """Return silu(gate) * up @ down; only the two are kept for the backward pass, not what goes into the product."""
    return nn.quantized_einsum("btf,fd->btd", jax.nn.silu(gate) * up, down, precision=precision)


def _visible(positions: Array, length: int) -> Array:
    return jnp.arange(length)[None, :] <= positions[:, None]


def _write(old: Array, new: Array, start: Array | int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
