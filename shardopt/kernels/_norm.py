"""Kernels for TPU of the root mean square norm: its statistics, and the whole gradient of its input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardopt.kernels._devices import kernels_run_on, num_shards, vmem
from shardopt.kernels._pallas import LANES, ROWS, by_strips, call_kernel, largest_block, pl
from shardopt.mesh import device_kind_or_default


def rsqrt_of_mean_square(
    x: Float[Array, "*batch D"], epsilon: float | Float[Array, ""]
) -> Float[Array, "*batch 1"]:
    """Return 1 / sqrt(mean of squares + epsilon) of every vector. Kernels call it, too."""
    return lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def inverse_rms(x: Float[Array, "B T D"], epsilon: float) -> Float[Array, "B T"]:
    """Return 1 / sqrt(mean of squares + epsilon) of every vector, in one pass."""
    B, T, D = x.shape
    block = _block(x)
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
    norm_grad: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T D"], Float[Array, " D"]]:
    """Return the gradients of x and scale, in one pass.

    Args:
      x: the input of `rms_norm`.
      scale: its learned factor.
      epsilon: its third argument.
      grad: the gradient of x by all other terms.
      norm_grad: the gradient of the norm.
    """
    B, T, D = x.shape
    block = _block(x)
    arrays = [x, norm_grad, grad]
    tokens = pl.BlockSpec((None, block, D), lambda b, i: (b, i, 0))
    # Each program of the grid has its own sum for `scale`, in float32. They are added up below.
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


def _gradient_of_norm(
    epsilon: float, scale: Any, x: Any, norm_grad: Any, grad: Any, dx: Any, scale_grad: Any
) -> None:
    scale_grad[...] = jnp.zeros_like(scale_grad)

    def compute(rows: Any) -> None:
        wide = x[rows].astype(jnp.float32)
        inverse = rsqrt_of_mean_square(wide, epsilon)
        unit = wide * inverse
        unit_grad = norm_grad[rows].astype(jnp.float32)
        scale_grad[...] += jnp.sum(unit_grad * unit, axis=0, keepdims=True)
        unit_grad = unit_grad * scale[...].astype(jnp.float32)
        # unit = x inverse  and  d inverse / dx = -inverse^3 x / D  give
        # dx = inverse (d unit - unit mean(d unit . unit)),  exact for every epsilon
        radial = unit * jnp.mean(unit_grad * unit, axis=1, keepdims=True)
        dx[rows] = (grad[rows].astype(jnp.float32) + inverse * (unit_grad - radial)).astype(
            dx.dtype
        )

    by_strips(x.shape[0], ROWS, compute)


def takes_norm(x: Array, has_sharded_positions: bool) -> bool:
    """Return whether the kernel takes a norm: on a TPU with whole rows of x, in multiples of 128,
    that fit into VMEM.
    """
    if x.ndim != 3 or not kernels_run_on(
        device_kind_or_default(), x.shape[1] if has_sharded_positions else 1
    ):
        return False
    is_whole = not (x.shape[1] // num_shards() % LANES or x.shape[2] % LANES)
    return is_whole and x.dtype.itemsize <= 4 and _bytes_per_row(x) * ROWS <= vmem()


def _block(x: Array) -> int:
    return largest_block(x.shape[1], 512, _bytes_per_row(x))


def _bytes_per_row(x: Array) -> int:
    """Return the bytes of VMEM for a token: two buffers of each array, and some in float32 while it
    is computed.
    """
    return x.shape[2] * (2 * x.dtype.itemsize * 4 + 8)
