"""Rotary positions: queries and keys are rotated by the angles of their positions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from shardopt.core import wide_dtype
from shardopt.kernels._devices import on_tensor_shards
from shardopt.kernels._flash import factor_of_scores
from shardopt.kernels._rotary import rotate_halves, takes_rotation
from shardopt.mesh import device_kind_or_default


def rotate_by(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "*B T"],
    frequencies: Float[Array, " K/2"],
    factor: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T H K"]:
    """Rotate component pair i of the vector at position t by the angle t * frequencies[i], and
    scale it by `factor`.

    Positions are [T] or [B, T]. The product of a rotated query and a rotated key depends only on
    the distance of their positions.

    References:
      Su, Lu, Pan, Murtadha, Wen and Liu, "RoFormer: Enhanced Transformer with Rotary Position
      Embedding", 2021, equation 34; the pairs here are components i and i + K/2.
    """
    half = x.shape[-1] // 2
    wide = wide_dtype(x.dtype)
    angles = positions.astype(wide)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    angles = angles.reshape(-1, positions.shape[-1], 1, half)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if not isinstance(factor, float) or factor != 1.0:
        cos = cos * factor
        sin = sin * factor
    if takes_rotation(x):
        return on_tensor_shards(rotate_halves, (2, -1, -1), 2)(x, cos, sin)
    if device_kind_or_default().startswith("TPU"):
        return _rotated_by_product(x, cos, sin)
    first = x[..., :half].astype(wide)
    second = x[..., half:].astype(wide)
    return jnp.concatenate(
        [first * cos - second * sin, first * sin + second * cos], axis=-1
    ).astype(x.dtype)


def _rotated_by_swap(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T 1 K/2"], sin: Float[Array, "#B T 1 K/2"]
) -> Float[Array, "B T H K"]:
    """Return x rotated by XLA; a product with a permutation swaps its halves.

    Half a vector fills as many lanes of a TPU as a whole vector, so halves would cost twice the
    memory, and copies. With a product, XLA rotates in two passes over x. Each sum has one term, so
    nothing is rounded.
    """

    def join(first, second):
        return jnp.concatenate([first, second], axis=-1)

    K = x.shape[-1]
    swap = jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=-1)
    swapped = jnp.einsum(
        "bthk,kj->bthj", x, swap, precision="highest", preferred_element_type=cos.dtype
    )
    return (x * join(cos, cos) + swapped * join(-sin, sin)).astype(x.dtype)


_rotated_by_product = jax.custom_vjp(_rotated_by_swap)


# the gradient is the opposite rotation, rounded once; jax would derive two terms, each rounded
_rotated_by_product.defvjp(
    lambda x, cos, sin: (_rotated_by_swap(x, cos, sin), (cos, sin)),
    lambda cos_sin, dy: (_rotated_by_swap(dy, cos_sin[0], -cos_sin[1]), None, None),
)


def rotated_heads(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G V"],
    rotate: Callable[..., Array],
    *,
    norm: Callable[[Array, Array], tuple[Array, Array]] | None,
    whole: bool,
    scale: float | None,
) -> tuple[Array, Array, Array, float | None]:
    """Return queries and keys normed and rotated, the values, and the factor of scores that is left
    to attention.

    Heads have the name "qkv" where it costs least to keep them. This is before a norm, whose
    gradient would need the products again, and before a kernel that rotates. Else it is after the
    rotation.

    Args:
      query: [B, T, H, K].
      key: [B, T, G, K].
      value: [B, T, G, V].
      rotate: rotates heads by their positions, and multiplies them by a second argument.
      norm: norms queries and keys before the rotation; None does not.
      whole: whether all components of a head rotate, and pairs are its halves. A kernel then
        rotates in one pass, which multiplies queries by the factor of scores as well.
      scale: the factor of scores, as in `so.nn.attention`.
    """

    def keep(*heads: Array) -> tuple[Array, ...]:
        return checkpoint_name(heads, "qkv")

    in_one_pass = whole and takes_rotation(query) and takes_rotation(key)
    if norm is not None or in_one_pass:
        query, key, value = keep(query, key, value)
    if norm is not None:
        query, key = norm(query, key)
    if in_one_pass:
        factor = factor_of_scores(scale, query.shape[-1])
        return rotate(query, factor), rotate(key), value, 1.0
    query = rotate(query)
    key = rotate(key)
    if norm is None:
        query, key, value = keep(query, key, value)
    return query, key, value, scale
