"""Products in 8 bits, scaled by what one device holds, a token or a weight, so that many devices quantise as one does."""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.core.errors import format_error
from shardopt.core.types import wide_dtype
from shardopt.mesh import device_kind_or_default

Precision = Literal["int8", "fp8"]


def quantized_einsum(
    subscripts: str, x: Float[Array, "..."], weight: Float[Array, "..."], *, precision: Precision | None
) -> Float[Array, "..."]:
    """Return `jnp.einsum(subscripts, x, weight)` of activations and a weight, multiplied in 8 bits, with gradients.

    With q(a) = round(a / s) and s = max |a| / m, a scale for each row of x (each token) over the dims that are summed, one for
    the whole weight, and m the largest number of the 8 bits:

        y  = s_x s_w (q(x) q(w)), summed in int32 or float32, returned in the dtype of x and weight
        dx = s_g s_w (q(g) q(w)), of the gradient g, whose rows are scaled over the outputs
        dw = x^T g as it is, in the dtype of x and weight

    "int8" rounds to the nearest of -127 to 127. "fp8" is e4m3fn, 3 bits of fraction, up to 448; of g e5m2, 2 bits, up to
    57344. Gradients pass the rounding as if it were none (straight through). The product over tokens, dw, stays in the
    higher precision: its scales would run over tokens of other devices and micro-batches. So two of three products are in
    8 bits.

    **Equivalence**: a token's numbers depend on this token and the weight only. Strategies, mesh sizes and micro-batches
    equal one device with the same `precision`, up to summation order; where that moves a number across the boundary
    between two roundings, it moves by one step of the 8 bits (in float64: practically never).

    **Placement**: weights come as they are, so masters stay in float32.

    **Communication**: none over data and context. Where a weight is sharded over tensor its maximum travels; where dims that
    are summed are, maxima of tokens too (4 bytes each), and partial sums in 32 bits.

    Args:
      subscripts: of two operands, such as "btd,dhk->bthk". Dims of both are summed; every other dim is in the result.
      x: activations.
      weight: of the dtype that the product had without it.
      precision: "int8" (TPU v5e, v5p, v6e, GPU) or "fp8" (TPU 7x; GPU from Hopper). On CPU the rounded numbers are multiplied in
        float32. None: `jnp.einsum`.

    Returns:
      The product, in the dtype of x and weight.

    Raises:
      ValueError: if `precision` is unknown, or subscripts are not of that form.

    Example:
      >>> import jax.numpy as jnp
      >>> x, weight = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(0, 1, 8).reshape(4, 2)
      >>> error = quantized_einsum("td,df->tf", x, weight, precision="int8") - x @ weight
      >>> bool(0 < abs(error).max() < 0.01)
      True

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models", 2023, algorithm 1
      (SwitchBack: rows of x and g, the whole of w; the product over tokens keeps its precision). Micikevicius et al., "FP8
      Formats for Deep Learning", 2022 (e4m3 forwards, e5m2 backwards).
    """
    if precision is None:
        return jnp.einsum(subscripts, x, weight)
    check_precision("quantized_einsum", precision)
    first, second, out = parse_subscripts(subscripts)
    return _quantized(first, second, out, precision, x, weight)


def check_precision(who: str, precision: str | None) -> None:
    """Refuse what is no precision.

    Raises:
      ValueError: if it is not None, "int8" or "fp8".
    """
    if precision is not None and precision not in get_args(Precision):
        what = f"unknown precision {precision!r}."
        raise ValueError(format_error(who, what, fix="use 'int8', 'fp8', or None for that of the dtype."))


def parse_subscripts(subscripts: str) -> tuple[str, str, str]:
    """Return the letters of activations, weight and result.

    Raises:
      ValueError: if there are not two operands that are summed over what they share.
    """
    operands, arrow, out = subscripts.replace(" ", "").partition("->")
    x, comma, weight = operands.partition(",")
    shared = set(x) & set(weight)
    right = arrow and comma and shared and set(out) == set(x) ^ set(weight)
    if not right or any(len(set(one)) < len(one) for one in (x, weight, out)) or not (x + weight + out).isalpha():
        what = f"subscripts {subscripts!r} are not a sum over the dims that two operands share."
        fix = "write them like 'btd,dhk->bthk'; for others use jnp.einsum."
        raise ValueError(format_error("quantized_einsum", what, fix=fix))
    return x, weight, out


def _multiplied(first: str, second: str, out: str, precision: Precision, x: Array, weight: Array) -> Array:
    dtype = jnp.int8 if precision == "int8" else jnp.float8_e4m3fn
    return _product(first, second, out, x, weight, dtype, dtype)


_quantized = jax.custom_vjp(_multiplied, nondiff_argnums=(0, 1, 2, 3))


def _forward(
    first: str, second: str, out: str, precision: Precision, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _multiplied(first, second, out, precision, x, weight), (x, weight)


def _backward(
    first: str, second: str, out: str, precision: Precision, kept: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, weight = kept
    dtypes = (jnp.int8, jnp.int8) if precision == "int8" else (jnp.float8_e5m2, jnp.float8_e4m3fn)
    dx = _product(out, second, first, grad, weight, *dtypes).astype(x.dtype)
    return dx, jnp.einsum(f"{first},{out}->{second}", x, grad).astype(weight.dtype)


_quantized.defvjp(_forward, _backward)


def _product(
    first: str, second: str, out: str, x: Array, weight: Array, x_dtype: DTypeLike, weight_dtype: DTypeLike
) -> Array:
    """Quantise the rows of x and the weight as a whole, multiply, and scale back."""
    wide = jnp.result_type(wide_dtype(x.dtype), wide_dtype(weight.dtype))
    qx, x_scale = _quantize(x, [i for i, letter in enumerate(first) if letter in second], x_dtype)
    qw, weight_scale = _quantize(weight, range(weight.ndim), weight_dtype)
    if device_kind_or_default() == "cpu":  # which has no such products: the same numbers, wider
        qx, qw, sums = qx.astype(wide), qw.astype(wide), wide
    else:
        sums = jnp.int32 if x_dtype == jnp.int8 else jnp.float32
    y = jnp.einsum(f"{first},{second}->{out}", qx, qw, preferred_element_type=sums).astype(wide)
    y = y * _beside(x_scale * weight_scale, first, second, out)
    return y.astype(jnp.result_type(x.dtype, weight.dtype))


def _quantize(a: Array, dims: Sequence[int], dtype: DTypeLike) -> tuple[Array, Array]:
    """Return a over its scale, rounded, and the scale, without the dims that share one. NaN and infinity become NaN."""
    wide = a.astype(wide_dtype(a.dtype))
    largest = jnp.max(jnp.abs(wide), axis=tuple(dims), keepdims=True)
    scale = largest / (jnp.iinfo(dtype).max if dtype == jnp.int8 else float(jnp.finfo(dtype).max))
    scaled = jnp.where(scale == 0, 0, wide / scale)
    rounded = jnp.round(scaled) if dtype == jnp.int8 else scaled
    return rounded.astype(dtype), jnp.squeeze(scale, tuple(dims))


def _beside(scale: Array, letters: str, other: str, out: str) -> Array:
    """Return a scale as the result has its dims: in that order, ones for the others."""
    own = [letter for letter in letters if letter not in other]
    order = [letter for letter in out if letter in own]
    scale = jnp.transpose(scale, [own.index(letter) for letter in order])
    return jnp.expand_dims(scale, [i for i, letter in enumerate(out) if letter not in own])
