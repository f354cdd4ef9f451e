"""Products in 8 bits, with gradients.

Each token and each weight has its own scale, which one device can compute alone. So many devices quantise as one does.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.core._errors import format_error
from shardopt.core._types import wide_dtype
from shardopt.mesh import device_kind_or_default
from shardopt.nn._low_rank import LowRank

Precision = Literal["int8", "fp8"]


def quantized_einsum(
    subscripts: str, x: Float[Array, "..."], weight: Float[Array, "..."] | LowRank, *, precision: Precision | None
) -> Float[Array, "..."]:
    """Return `jnp.einsum(subscripts, x, weight)` of activations and a weight, multiplied in 8 bits, with gradients.

    Args:
      subscripts: of two operands, such as "btd,dhk->bthk". Dims of both operands are summed; all others are in the result.
      x: activations.
      weight: in the dtype of the product without quantisation. A weight with an adapter (`shardopt.adapters`) adds the
        product of x and the adapter, which is not quantised.
      precision: "int8" (TPU v5e, v5p, v6e, GPU) or "fp8" (TPU 7x; GPU from Hopper). On CPU the rounded numbers are multiplied in
        float32. None: `jnp.einsum`.

    Returns:
      The product, in the dtype of x and weight.

    Raises:
      ValueError: if `precision` is unknown, or subscripts do not have this form.

    Example:
      >>> import jax.numpy as jnp
      >>> x, weight = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(0, 1, 8).reshape(4, 2)
      >>> error = quantized_einsum("td,df->tf", x, weight, precision="int8") - x @ weight
      >>> bool(0 < abs(error).max() < 0.01)
      True

    With q(a) = round(a / s) and s = max |a| / m, where m is the largest number of the 8 bits:

        y  = s_x s_w (q(x) q(w)), summed in int32 or float32, returned in the dtype of x and weight
        dx = s_g s_w (q(g) q(w)), for the gradient g, whose rows are scaled over the outputs
        dw = x^T g without quantisation, in the dtype of x and weight

    Each row of x (each token) has a scale over the summed dims, and the whole weight has one scale. "int8" rounds to the nearest
    of -127 to 127. "fp8" is e4m3fn, with 3 bits of fraction, up to 448; g uses e5m2, with 2 bits, up to 57344. Gradients ignore
    the rounding (straight through). The product over tokens, dw, stays in the higher precision, since its scales would need
    tokens of other devices and micro-batches. So two of three products are in 8 bits.

    **Equivalence**: the result of a token depends only on this token and the weight. So strategies, mesh sizes and micro-batches
    equal one device with the same `precision`, up to summation order. If a different order moves a number across a rounding
    boundary, the number changes by one step of the 8 bits (in float64: practically never).

    **Placement**: weights are not cast, so master weights stay in float32.

    **Communication**: none over data and context. If a weight is sharded over tensor, its maximum is sent. If summed dims are
    sharded over tensor, maxima of tokens (4 bytes each) and partial sums in 32 bits are sent too.

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models", 2023, algorithm 1
      (SwitchBack: rows of x and g, the whole of w; the product over tokens keeps its precision). Micikevicius et al., "FP8
      Formats for Deep Learning", 2022 (e4m3 forwards, e5m2 backwards).
    """
    if isinstance(weight, LowRank):
        product = quantized_einsum(subscripts, x, weight.base, precision=precision)
        return product + weight.einsum(x, parse_subscripts(subscripts)).astype(product.dtype)
    if precision is None:
        return jnp.einsum(subscripts, x, weight)
    check_precision("quantized_einsum", precision)
    first, second, out = parse_subscripts(subscripts)
    return _quantized(first, second, out, precision, x, weight)


def check_precision(caller: str, precision: str | None) -> None:
    """Refuse an unknown precision.

    Raises:
      ValueError: if it is not None, "int8" or "fp8".
    """
    if precision is not None and precision not in get_args(Precision):
        problem = f"unknown precision {precision!r}."
        raise ValueError(format_error(caller, problem, fix="use 'int8', 'fp8', or None for that of the dtype."))


def parse_subscripts(subscripts: str) -> tuple[str, str, str]:
    """Return the letters of activations, weight and result.

    Raises:
      ValueError: if the subscripts are not a sum over the dims that two operands share.
    """
    operands, arrow, out = subscripts.replace(" ", "").partition("->")
    x, comma, weight = operands.partition(",")
    shared = set(x) & set(weight)
    is_valid = arrow and comma and shared and set(out) == set(x) ^ set(weight)
    if (
        not is_valid
        or any(len(set(letters)) < len(letters) for letters in (x, weight, out))
        or not (x + weight + out).isalpha()
    ):
        problem = f"subscripts {subscripts!r} are not a sum over the dims that two operands share."
        fix = "write them like 'btd,dhk->bthk'; for others use jnp.einsum."
        raise ValueError(format_error("quantized_einsum", problem, fix=fix))
    return x, weight, out


def _quantized_product(first: str, second: str, out: str, precision: Precision, x: Array, weight: Array) -> Array:
    dtype = jnp.int8 if precision == "int8" else jnp.float8_e4m3fn
    return _product(first, second, out, x, weight, dtype, dtype)


_quantized = jax.custom_vjp(_quantized_product, nondiff_argnums=(0, 1, 2, 3))


def _forward(
    first: str, second: str, out: str, precision: Precision, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _quantized_product(first, second, out, precision, x, weight), (x, weight)


def _backward(
    first: str, second: str, out: str, precision: Precision, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, weight = residuals
    dtypes = (jnp.int8, jnp.int8) if precision == "int8" else (jnp.float8_e5m2, jnp.float8_e4m3fn)
    dx = _product(out, second, first, grad, weight, *dtypes).astype(x.dtype)
    return dx, jnp.einsum(f"{first},{out}->{second}", x, grad).astype(weight.dtype)


_quantized.defvjp(_forward, _backward)


def _product(
    first: str, second: str, out: str, x: Array, weight: Array, x_dtype: DTypeLike, weight_dtype: DTypeLike
) -> Array:
    """Quantise the rows of x, and the weight with one scale; multiply, and scale back."""
    wide = jnp.result_type(wide_dtype(x.dtype), wide_dtype(weight.dtype))
    qx, x_scale = _quantize(x, [i for i, letter in enumerate(first) if letter in second], x_dtype)
    qw, weight_scale = _quantize(weight, range(weight.ndim), weight_dtype)
    if device_kind_or_default() == "cpu":  # CPU has no 8-bit products: multiply the same numbers in a wider dtype
        qx, qw, sums = qx.astype(wide), qw.astype(wide), wide
    else:
        sums = jnp.int32 if x_dtype == jnp.int8 else jnp.float32
    y = jnp.einsum(f"{first},{second}->{out}", qx, qw, preferred_element_type=sums).astype(wide)
    y = y * _align_scale(x_scale * weight_scale, first, second, out)
    return y.astype(jnp.result_type(x.dtype, weight.dtype))


def _quantize(a: Array, dims: Sequence[int], dtype: DTypeLike) -> tuple[Array, Array]:
    """Return a / scale, rounded, and the scale without the reduced dims. NaN and infinity become NaN."""
    wide = a.astype(wide_dtype(a.dtype))
    largest = jnp.max(jnp.abs(wide), axis=tuple(dims), keepdims=True)
    scale = largest / (jnp.iinfo(dtype).max if dtype == jnp.int8 else float(jnp.finfo(dtype).max))
    scaled = jnp.where(scale == 0, 0, wide / scale)
    rounded = jnp.round(scaled) if dtype == jnp.int8 else scaled
    return rounded.astype(dtype), jnp.squeeze(scale, tuple(dims))


def _align_scale(scale: Array, letters: str, other_letters: str, out: str) -> Array:
    """Return a scale with the dims of the result in their order, and ones for the other dims."""
    scale_letters = [letter for letter in letters if letter not in other_letters]
    order = [letter for letter in out if letter in scale_letters]
    scale = jnp.transpose(scale, [scale_letters.index(letter) for letter in order])
    return jnp.expand_dims(scale, [i for i, letter in enumerate(out) if letter not in scale_letters])
