"""Numbers of 8 bits: their dtypes, how they are rounded, and how they are stored."""

from collections.abc import Callable
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int8

from shardopt.core import format_error, widened
from shardopt.core._rounding import Precision


class Dtypes(NamedTuple):
    """The dtypes of 8 bits of a precision.

    Attributes:
      numbers: of rounded activations and weights.
      gradients: of rounded gradients.
    """

    numbers: DTypeLike
    gradients: DTypeLike


def eight_bits(precision: Precision) -> Dtypes:
    """Return the dtypes of a precision."""
    return (
        Dtypes(jnp.int8, jnp.int8)
        if precision == "int8"
        else Dtypes(jnp.float8_e4m3fn, jnp.float8_e5m2)
    )


def largest_number(dtype: DTypeLike) -> float:
    """Return the largest number of 8 bits that is used; -128 is not."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def largest_magnitude(x: Array, dims: int | tuple[int, ...]) -> Array:
    """Return the largest absolute number over dims, which stay with size 1.

    NaN if one is NaN or infinite.

    XLA:CPU drops NaN in the maximum of a large array, and int8 has none: NaN would become a number.
    """
    nan_or_zero = jnp.sum(x * 0, axis=dims, keepdims=True)
    return jnp.max(jnp.abs(x), axis=dims, keepdims=True) + nan_or_zero


def narrow(x: Array, dtype: DTypeLike) -> Array:
    """Return numbers up to the largest one, rounded to 8 bits."""
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def as_bits(numbers: Array) -> Int8[Array, "..."]:
    """Return numbers in 8 bits as int8.

    A backward pass keeps numbers in this form. `jax.checkpoint` rounds the floats that it keeps,
    and makes NaN of numbers of float8_e4m3fn above 240. Functions that cast all floats of a pytree
    leave int8 alone, too.
    """
    return numbers if numbers.dtype == jnp.int8 else jax.lax.bitcast_convert_type(numbers, jnp.int8)


def from_bits(bits: Int8[Array, "..."], precision: Precision) -> Array:
    """Return the rounded activations or weights that `as_bits` made."""
    return (
        bits
        if precision == "int8"
        else jax.lax.bitcast_convert_type(bits, eight_bits(precision).numbers)
    )


def inverse(scale: Array) -> Array:
    """Return 1 / scale, or 0 for a scale of 0: one division for many numbers."""
    return jnp.where(scale == 0, 0, 1 / scale)


def _maximum_over(largest: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Return the maximum over devices for a scale; NaN becomes infinity.

    XLA:CPU drops NaN in a maximum over devices. A scale of infinity makes all numbers NaN as well.
    """
    return jax.lax.pmax(jnp.where(jnp.isnan(largest), jnp.inf, largest), axes)


def check_precision(caller: str, precision: str | None) -> None:
    """Refuse an unknown precision.

    Raises:
      ValueError: if it is not None, "int8" or "fp8".
    """
    if precision is not None and precision not in get_args(Precision):
        problem = f"unknown precision {precision!r}."
        raise ValueError(
            format_error(caller, problem, fix="use 'int8', 'fp8', or None for that of the dtype.")
        )


def largest_over(a: Array, dims: tuple[int, ...], axes: str | tuple[str, ...]) -> Array:
    """Return the largest absolute number over dims, which stay with size 1, and over the devices
    along axes, if any.
    """
    largest = largest_magnitude(a, dims)
    return _maximum_over(largest, axes) if axes else largest


def round_over(
    a: Array,
    dims: tuple[int, ...],
    dtype: DTypeLike,
    maximum: Callable[[Array, tuple[int, ...]], Array] = largest_magnitude,
) -> tuple[Array, Array]:
    """Return a / scale, rounded, and the scale. NaN and infinity become NaN.

    Args:
      a: an array.
      dims: the dims whose numbers have one scale; they stay with size 1.
      dtype: of 8 bits.
      maximum: returns the largest absolute number over dims, `largest_over` where devices share them.
    """
    wide = widened(a)
    scale = maximum(wide, dims) / largest_number(dtype)
    return narrow(wide * inverse(scale), dtype), scale
