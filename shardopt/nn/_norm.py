"""Root mean square norm, with two kernels for TPU.

One kernel computes the statistics of a norm. The other computes the whole gradient of an input that
other layers read too.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.core import widened
from shardopt.kernels._devices import on_tensor_shards
from shardopt.kernels._norm import gradient_of_norm, inverse_rms, rsqrt_of_mean_square, takes_norm
from shardopt.nn._low_rank import Weights
from shardopt.nn._quantized_einsum import add_bias


@jax.checkpoint
def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], epsilon: float | Float[Array, ""] = 1e-6
) -> Float[Array, "*batch D"]:
    """Scale every vector to root mean square one, then multiply each component by a learned factor.

    Statistics are computed in float32 at least. Only x is stored for the backward pass.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    wide = widened(x)
    return _scaled(wide, rsqrt_of_mean_square(wide, epsilon), scale, x.dtype)


@jax.checkpoint
def rms_norm_plus_one(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], epsilon: float = 1e-6
) -> Float[Array, "*batch D"]:
    """Return `rms_norm` with the factor 1 + weight, rounded to the dtype of x after this factor
    alone (Gemma).
    """
    wide = widened(x)
    return _scaled_plus_one(wide, rsqrt_of_mean_square(wide, epsilon), weight, x.dtype)


def _scaled(wide: Array, inverse: Array, scale: Array, dtype: DTypeLike) -> Array:
    return (wide * inverse).astype(dtype) * jnp.broadcast_to(scale, wide.shape)


def _scaled_plus_one(wide: Array, inverse: Array, weight: Array, dtype: DTypeLike) -> Array:
    return (wide * inverse * jnp.broadcast_to(_plus_one(weight), wide.shape)).astype(dtype)


def _plus_one(weight: Array) -> Array:
    return 1 + widened(weight)


def norm_of_stream(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    epsilon: float,
    *,
    name: str = "norm",
    has_sharded_positions: bool = False,
    plus_one: bool = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return x, and `rms_norm(x, scale, epsilon)`, or `rms_norm_plus_one`.

    On TPU a kernel computes the gradient of the norm, and adds the gradient of x by all other
    terms. XLA takes two passes. Another kernel computes the inverses of the root mean squares, four bytes a token. They are not computed
    again if remat saves `name`. With `has_sharded_positions`, x is sharded over tensor, and T is
    the number of all positions.
    """
    if not takes_norm(x, has_sharded_positions):
        return x, (rms_norm_plus_one if plus_one else rms_norm)(x, scale, epsilon)

    def norm(x, scale):
        return _norm_of_stream(x, scale, epsilon, name, plus_one)

    return on_tensor_shards(norm, (1, -1), (1, 1))(x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _norm_of_stream(
    x: Array, scale: Array, epsilon: float, name: str, plus_one: bool
) -> tuple[Array, Array]:
    return _with_residuals(x, scale, epsilon, name, plus_one)[0]


def _with_residuals(x: Array, scale: Array, epsilon: float, name: str, plus_one: bool) -> Any:
    # otherwise XLA copies the input of a block for each kernel that reads it
    x = lax.optimization_barrier(x)
    inverse = checkpoint_name(inverse_rms(x, epsilon), name)
    scaled = _scaled_plus_one if plus_one else _scaled
    normed = scaled(x.astype(jnp.float32), inverse[..., None], scale, x.dtype)
    # A vmap over scale alone would otherwise return one x for all, and add its gradient once for
    # each. XLA drops this zero.
    zero = jnp.sum(scale[:0]).astype(x.dtype)
    return (x + zero, normed), (x, scale)


def _gradients(
    epsilon: float, name: str, plus_one: bool, residuals: tuple[Array, Array], grads: Any
) -> tuple[Array, Array]:
    (x, scale), (grad, norm_grad) = residuals, grads
    dx, scale_grad = gradient_of_norm(
        x, _plus_one(scale) if plus_one else scale, epsilon, grad, norm_grad
    )
    return dx, scale_grad.astype(scale.dtype)


_norm_of_stream.defvjp(_with_residuals, _gradients)


Norm = Literal["rms", "rms_plus_one", "layer"]


def apply_norm(
    kind: Norm, weights: Weights, name: str, x: Float[Array, "*batch D"], epsilon: float
) -> Float[Array, "*batch D"]:
    """Return x normed by the leaf `name`, by a kind of norm."""
    if kind == "layer":
        return _layer_norm(x, weights[name], weights[f"{name}_bias"], epsilon)
    norm = rms_norm if kind == "rms" else rms_norm_plus_one
    return norm(x, weights[name], epsilon)


@functools.partial(jax.checkpoint, static_argnums=3)
def _layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    wide = widened(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = (centred * rsqrt_of_mean_square(centred, epsilon)).astype(x.dtype)
    return add_bias((normed * jnp.broadcast_to(scale, x.shape)).astype(x.dtype), bias)
