"""Root mean square norm, with two kernels for TPU.

One kernel computes the statistics of a norm. The other computes the whole gradient of an input that
other layers read too.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.mesh import device_kind_or_default
from shardopt.nn._kernel_tiles import (
    LANES,
    ROWS,
    by_strips,
    call_kernel,
    kernels_run_on,
    largest_block,
    num_shards,
    on_tensor_shards,
    vmem,
)


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
    return _scaled(wide, rsqrt_of_mean_square(wide, epsilon), scale, x.dtype)


@jax.checkpoint
def rms_norm_plus_one(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], epsilon: float = 1e-6
) -> Float[Array, "*batch D"]:
    """Return `rms_norm` with the factor 1 + weight, rounded to the dtype of x after this factor
    alone (Gemma).
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _scaled_plus_one(wide, rsqrt_of_mean_square(wide, epsilon), weight, x.dtype)


def rsqrt_of_mean_square(
    x: Float[Array, "*batch D"], epsilon: float | Float[Array, ""]
) -> Float[Array, "*batch 1"]:
    """Return 1 / sqrt(mean of squares + epsilon) of every vector. Kernels call it, too."""
    return lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def _scaled(wide: Array, inverse: Array, scale: Array, dtype: DTypeLike) -> Array:
    return (wide * inverse).astype(dtype) * jnp.broadcast_to(scale, wide.shape)


def _scaled_plus_one(wide: Array, inverse: Array, weight: Array, dtype: DTypeLike) -> Array:
    return (wide * inverse * jnp.broadcast_to(_plus_one(weight), wide.shape)).astype(dtype)


def _plus_one(weight: Array) -> Array:
    return 1 + weight.astype(jnp.promote_types(weight.dtype, jnp.float32))


def norm_of_stream(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    epsilon: float,
    uses: int = 1,
    *,
    name: str = "norm",
    has_sharded_positions: bool = False,
    plus_one: bool = False,
) -> tuple[Float[Array, "B T D"], list[Float[Array, "B T D"]]]:
    """Return x, and `rms_norm(x, scale, epsilon)`, or `rms_norm_plus_one`, once for each of its
    uses.

    On TPU a kernel reads the gradients of all of them, and adds them up while it computes the
    gradient of x. XLA takes two passes for a norm, and one for each sum between kernels. Another
    kernel computes the inverses of the root mean squares, four bytes a token. They are not computed
    again if remat saves `name`. With `has_sharded_positions`, x is sharded over tensor, and T is
    the number of all positions.
    """
    if not _takes(x, uses, has_sharded_positions):
        return x, [(rms_norm_plus_one if plus_one else rms_norm)(x, scale, epsilon)] * uses

    def norms(x, scale):
        return _norm_of_stream(x, scale, epsilon, uses, name, plus_one)

    x, normed = on_tensor_shards(norms, (1, -1), (1, (1,) * uses))(x, scale)
    return x, list(normed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _norm_of_stream(
    x: Array, scale: Array, epsilon: float, uses: int, name: str, plus_one: bool
) -> tuple[Array, tuple[Array, ...]]:
    return _with_residuals(x, scale, epsilon, uses, name, plus_one)[0]


def _with_residuals(
    x: Array, scale: Array, epsilon: float, uses: int, name: str, plus_one: bool
) -> Any:
    # otherwise XLA copies the input of a block for each kernel that reads it
    x = lax.optimization_barrier(x)
    inverse = checkpoint_name(inverse_rms(x, epsilon), name)
    scaled = _scaled_plus_one if plus_one else _scaled
    normed = scaled(x.astype(jnp.float32), inverse[..., None], scale, x.dtype)
    # A vmap over scale alone would otherwise return one x for all, and add its gradient once for
    # each. XLA drops this zero.
    zero = jnp.sum(scale[:0]).astype(x.dtype)
    return (x + zero, (normed,) * uses), (x, scale)


def _gradients(
    epsilon: float, uses: int, name: str, plus_one: bool, residuals: tuple[Array, Array], grads: Any
) -> tuple[Array, Array]:
    (x, scale), (grad, norm_grads) = residuals, grads
    dx, scale_grad = gradient_of_norm(
        x, _plus_one(scale) if plus_one else scale, epsilon, grad, norm_grads
    )
    return dx, scale_grad.astype(scale.dtype)


_norm_of_stream.defvjp(_with_residuals, _gradients)


def inverse_rms(x: Float[Array, "B T D"], epsilon: float) -> Float[Array, "B T"]:
    """Return 1 / sqrt(mean of squares + epsilon) of every vector, in one pass."""
    from jax.experimental import pallas as pl  # imported late, since the import takes long

    B, T, D = x.shape
    block = _block(x, 1)
    (inverse,) = call_kernel(
        functools.partial(_inverse_rms, epsilon),
        (B, T // block),
        [x],
        [pl.BlockSpec((None, block, D), lambda b, i: (b, i, 0))],
        [pl.BlockSpec((None, block, 1), lambda b, i: (b, i, 0))],
        [jax.ShapeDtypeStruct((B, T, 1), jnp.float32)],
        name="inverse_rms",
    )
    return inverse[..., 0]


def _inverse_rms(epsilon: float, x: Any, out: Any) -> None:
    def compute(rows: Any) -> None:
        out[rows] = rsqrt_of_mean_square(x[rows].astype(jnp.float32), epsilon)

    by_strips(x.shape[0], ROWS, compute)


def gradient_of_norm(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    epsilon: float,
    grad: Float[Array, "B T D"],
    norm_grads: Sequence[Float[Array, "B T D"]],
) -> tuple[Float[Array, "B T D"], Float[Array, " D"]]:
    """Return the gradients of x and scale, in one pass.

    Args:
      x: the input of `rms_norm`.
      scale: its learned factor.
      epsilon: its third argument.
      grad: the gradient of x by all other terms.
      norm_grads: gradients of the norm; the kernel adds them up.
    """
    from jax.experimental import pallas as pl  # imported late, since the import takes long

    B, T, D = x.shape
    block = _block(x, len(norm_grads))
    arrays = [x, *norm_grads, grad]
    tokens = pl.BlockSpec((None, block, D), lambda b, i: (b, i, 0))
    dx, scale_grads = call_kernel(
        functools.partial(_gradient_of_norm, epsilon),
        (B, T // block),
        [scale[None], *arrays],
        [pl.BlockSpec((1, D), lambda b, i: (0, 0))] + [tokens] * len(arrays),
        [tokens, pl.BlockSpec((None, None, 1, D), lambda b, i: (b, i, 0, 0))],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((B, T // block, 1, D), jnp.float32),
        ],
        name="gradient_of_norm",
    )
    return dx, jnp.sum(scale_grads, axis=(0, 1, 2)).astype(scale.dtype)


def _gradient_of_norm(epsilon: float, scale: Any, x: Any, *refs: Any) -> None:
    *norm_grads, grad, dx, scale_grad = refs
    scale_grad[...] = jnp.zeros_like(scale_grad)

    def compute(rows: Any) -> None:
        wide = x[rows].astype(jnp.float32)
        inverse = rsqrt_of_mean_square(wide, epsilon)
        unit = wide * inverse
        norm_grad = functools.reduce(jnp.add, [ref[rows].astype(jnp.float32) for ref in norm_grads])
        scale_grad[...] += jnp.sum(norm_grad * unit, axis=0, keepdims=True)
        norm_grad = norm_grad * scale[...].astype(jnp.float32)
        radial = unit * jnp.mean(norm_grad * unit, axis=1, keepdims=True)
        dx[rows] = (grad[rows].astype(jnp.float32) + inverse * (norm_grad - radial)).astype(
            dx.dtype
        )

    by_strips(x.shape[0], ROWS, compute)


def _takes(x: Array, uses: int, has_sharded_positions: bool) -> bool:
    """Return whether the kernel takes a norm: on a TPU with whole rows of x, in multiples of 128,
    that fit into VMEM.
    """
    if x.ndim != 3 or not kernels_run_on(
        device_kind_or_default(), x.shape[1] if has_sharded_positions else 1
    ):
        return False
    is_whole = not (x.shape[1] // num_shards() % LANES or x.shape[2] % LANES)
    return is_whole and x.dtype.itemsize <= 4 and _bytes_per_row(x, uses) * ROWS <= vmem()


def _block(x: Array, uses: int) -> int:
    return largest_block(x.shape[1], 512, ROWS, _bytes_per_row(x, uses))


def _bytes_per_row(x: Array, uses: int) -> int:
    """Return the bytes of VMEM for a token: two buffers of each array, and some in float32 while it
    is computed.
    """
    return x.shape[2] * (2 * x.dtype.itemsize * (uses + 3) + 8)
