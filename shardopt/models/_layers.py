"""The parts of a transformer block as pure functions that never merge the dims of heads and hidden units.

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
from shardopt.nn._attention import masked_attention
from shardopt.nn._low_precision import Precision
from shardopt.nn._low_rank import Weight

Tree = TypeVar("Tree")


class KVCache(NamedTuple):
    """Keys and values of the positions so far, of one block (or stacked, with one more dim in front).

    Attributes:
      key: [B, S, H, K], already rotated.
      value: [B, S, H, K].
    """

    key: Array
    value: Array


def cast(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Return weights in the dtype of a model's products; None keeps the dtype of each weight. Keys stay as they are."""

    def cast_leaf(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return tree if dtype is None else jax.tree.map(cast_leaf, tree)


@jax.checkpoint
def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], epsilon: float | Float[Array, ""] = 1e-6
) -> Float[Array, "*batch D"]:
    """Scale every vector to root mean square one, then multiply each component by a learned factor.

    Statistics are computed in float32 at least. Only x is stored for the backward pass.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def rotate(x: Float[Array, "B T H K"], positions: Int[Array, "*B T"], base: float) -> Float[Array, "B T H K"]:
    """Rotate component pair i of the vector at position t by the angle t * base^(-2i/K); positions are [T] or [B, T].

    The product of a rotated query and a rotated key then depends only on the distance of their positions.

    References:
      Su, Lu, Pan, Murtadha, Wen and Liu, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
      2021, equation 34; the pairs here are components i and i + K/2.
    """
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return rotate_by(x, positions, base ** (-jnp.arange(half, dtype=wide) / half))


def rotate_by(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "*B T"],
    frequencies: Float[Array, " K/2"],
    factor: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T H K"]:
    """Rotate component pair i of the vector at position t by the angle t * frequencies[i], and scale it by `factor`."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions.astype(wide)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    angles = angles.reshape(-1, positions.shape[-1], 1, half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(factor, float) or factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if device_kind_or_default().startswith("TPU"):
        return _rotated_by_product(x, cos, sin)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


def _rotated_by_swap(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T 1 K/2"], sin: Float[Array, "#B T 1 K/2"]
) -> Float[Array, "B T H K"]:
    """Return x rotated; a product with a permutation swaps its halves.

    Half a vector fills as many lanes of a TPU as a whole vector, so halves would cost twice the memory, and copies. With a
    product, XLA rotates in one pass over x. Each sum has one term, so nothing is rounded.
    """
    join = lambda first, second: jnp.concatenate([first, second], axis=-1)  # noqa: E731
    K = x.shape[-1]
    swap = jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=-1)
    swapped = jnp.einsum("bthk,kj->bthj", x, swap, precision="highest", preferred_element_type=cos.dtype)
    return (x * join(cos, cos) + swapped * join(-sin, sin)).astype(x.dtype)


_rotated_by_product = jax.custom_vjp(_rotated_by_swap)
# the gradient is the opposite rotation, rounded once; jax would derive two terms, each rounded
_rotated_by_product.defvjp(
    lambda x, cos, sin: (_rotated_by_swap(x, cos, sin), (cos, sin)),
    lambda cos_sin, dy: (_rotated_by_swap(dy, cos_sin[0], -cos_sin[1]), None, None),
)


def places(length: int, positions: Int[Array, "B T"] | None, order: Int[Array, "B T"] | None) -> Int[Array, "*B T"]:
    """Return the positions for position embeddings: `positions`, else `order`, else `nn.positions(length)`."""
    explicit_positions = order if positions is None else positions
    return nn.positions(length) if explicit_positions is None else explicit_positions


def attention(
    weights: dict[str, Weight],
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
    """Return causal self-attention with rotary positions, and the cache extended by these T positions.

    Both weights have a dim of heads. A tensor axis that shards this dim splits the projections, the softmax and the sum over
    heads, with no reshape in between.

    Args:
      weights: "qkv" [D, 3, H, K] and "out" [H, K, D].
      x: T positions, beginning with position `start`.
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi.
      cache: keys and values of earlier positions, which queries also attend to; None for no earlier positions.
      start: position of `x[:, 0]`, 0 without a cache.
      segment_ids: the document of each token; tokens attend only to their own document. None is one document per row. Not with
        a cache.
      positions: the rotary position of each token, as in `places`; with a cache the positions are `start`, `start` + 1, ...
      order: the position of each token in its row, for the causal mask; None is natural order. Not with a cache.
      precision: precision of the products with weights, as in `so.nn.quantized_einsum`.
    """
    # The dim of parts stays where the product puts it: moving it to the front would cost a transposition each way.
    query, key, value = _split_parts(nn.quantized_einsum("btd,dchk->btchk", x, weights["qkv"], precision=precision))
    if cache is not None:
        token_positions = start + jnp.arange(x.shape[1])
        query, key = rotate(query, token_positions, rope_base), rotate(key, token_positions, rope_base)
        cache = KVCache(_write_cache(cache.key, key, start), _write_cache(cache.value, value, start))
        mixed = masked_attention(query, *cache, _visible(token_positions, cache.key.shape[1])[None])
    else:
        token_positions = places(x.shape[1], positions, order)
        qkv = checkpoint_name(
            (rotate(query, token_positions, rope_base), rotate(key, token_positions, rope_base), value), "qkv"
        )
        mixed = nn.attention(*qkv, segment_ids=segment_ids, positions=order)
    out = nn.quantized_einsum("bthk,hkd->btd", mixed, weights["out"], precision=precision)
    return checkpoint_name(out, "attention_out"), cache


def grouped_attention(
    weights: dict[str, Weight],
    x: Float[Array, "B T D"],
    *,
    rope_base: float | None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    order: Int[Array, "B T"] | None = None,
    precision: Precision | None = None,
) -> Float[Array, "B T D"]:
    """Return causal self-attention in which several query heads share each head of keys and values.

    Args:
      weights: "q" [D, H, K], "kv" [D, G, 2 K] and "out" [H, K, D].
      x: T positions.
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi; None rotates nothing.
      segment_ids: as in `attention`.
      positions: as in `attention`.
      order: as in `attention`.
      precision: as in `attention`.
    """
    query = nn.quantized_einsum("btd,dhk->bthk", x, weights["q"], precision=precision)
    key, value = jnp.split(nn.quantized_einsum("btd,dgk->btgk", x, weights["kv"], precision=precision), 2, axis=-1)
    if rope_base is not None:
        token_positions = places(x.shape[1], positions, order)
        query, key = rotate(query, token_positions, rope_base), rotate(key, token_positions, rope_base)
    qkv = checkpoint_name((query, key, value), "qkv")
    mixed = nn.attention(*qkv, segment_ids=segment_ids, positions=order)
    out = nn.quantized_einsum("bthk,hkd->btd", mixed, weights["out"], precision=precision)
    return checkpoint_name(out, "attention_out")


def swiglu(
    weights: dict[str, Weight], x: Float[Array, "B T D"], *, precision: Precision | None = None
) -> Float[Array, "B T D"]:
    """Return silu(x @ gate) * (x @ up) @ down; `weights` holds "up" [D, 2, F] (gate first) and "down" [F, D].

    `precision` is the precision of the products, as in `so.nn.quantized_einsum`.

    References:
      Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """
    hidden = nn.quantized_einsum("btd,dcf->btcf", x, weights["up"], precision=precision)
    gate, up = _split_parts(checkpoint_name(hidden, "mlp_hidden"))
    return _gated_down(precision, gate, up, weights["down"])


def _split_parts(x: Array) -> list[Array]:
    """Cut [B, T, C, ...] into C parts [B, T, ...].

    The gradient of a split is one concatenation. The gradient of indexing would be a sum of paddings.
    """
    return [jnp.squeeze(part, 2) for part in jnp.split(x, x.shape[2], axis=2)]


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _gated_down(precision: Precision | None, gate: Array, up: Array, down: Weight) -> Array:
    """Return silu(gate) * up @ down; the backward pass stores gate and up, and recomputes the input of the product."""
    return nn.quantized_einsum("btf,fd->btd", jax.nn.silu(gate) * up, down, precision=precision)


def _visible(positions: Array, length: int) -> Array:
    return jnp.arange(length)[None, :] <= positions[:, None]


def _write_cache(old: Array, new: Array, start: Array | int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
