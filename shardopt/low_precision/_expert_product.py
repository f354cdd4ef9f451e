"""Products of rows sorted by expert in 8 bits, with gradients.

Suffixes: M rows, E experts, K summed dims, N channels.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardopt.core._errors import format_error
from shardopt.core._rounding import Precision
from shardopt.core._types import wide_dtype
from shardopt.kernels._grouped_product import (
    grouped_product,
    implementation_here,
    outer_of_groups,
    product_of_groups,
)
from shardopt.low_precision._einsum import Rounded, round_array
from shardopt.low_precision._first_order import first_order
from shardopt.low_precision._numbers import as_bits, eight_bits, from_bits, largest_over
from shardopt.low_precision._weight import RoundedWeight, check_intact
from shardopt.mesh import device_kind_or_default


class Sharded(NamedTuple):
    """The mesh axes that shard the dims of a weight, whose scales are maxima over them.

    Attributes:
      summed: of the summed dim.
      channels: of the channels.
    """

    summed: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()


LOCAL = Sharded()


class _Product(NamedTuple):
    """The static part of a product; see `expert_products`."""

    precision: Precision
    sharded: Sharded


def expert_products(
    rows: Float[Array, "M K"],
    weights: Sequence[Float[Array, "E K N"] | RoundedWeight],
    sizes: Int[Array, " E"],
    precision: Precision | None,
    sharded: Sharded,
) -> list[Float[Array, "M N"]]:
    """Return the product of each row and its expert's part of a weight, for each of some weights.

    Args:
      rows: sorted by expert, see `grouped_product`. Rows of no expert give 0.
      weights: in the dtype of the rows. Weights that `BlockModel.rounded` names are rounded
        already.
      sizes: rows of each expert.
      precision: of `quantized_einsum`. A row has a scale, and so has a channel of an expert. The
        gradient of a weight is not rounded.
      sharded: the mesh axes that shard the dims of a weight.
    """
    weights = [
        _opened(weight, precision) if isinstance(weight, RoundedWeight) else weight
        for weight in weights
    ]
    if precision is None:
        return [grouped_product(rows, cast(Array, weight), sizes) for weight in weights]
    product = _Product(precision, sharded)
    return [
        _multiply_rounded_rows(product, rows, *_unpacked(product, weight), sizes)
        for weight in weights
    ]


def _opened(weight: RoundedWeight, precision: Precision | None) -> RoundedWeight:
    """Return a rounded weight for its product to read.

    Raises:
      TypeError: if its numbers or scales were cast.
      ValueError: if it was not rounded for experts, in this precision, for a product over one dim.
    """
    check_intact("mixture_of_experts", weight)
    rounding = weight.rounding
    if (rounding.precision, rounding.experts, rounding.summed) != (precision, True, 1):
        problem = f"a weight was rounded by {rounding}, and is used with precision {precision!r}."
        fix = (
            f"describe it as so.nn.Rounding({precision!r}, experts=True) in BlockModel.rounded, or"
            " take it out."
        )
        if precision is None:
            fix = f"give precision={rounding.precision!r}, or take it out of BlockModel.rounded."
        raise ValueError(format_error("mixture_of_experts", problem, fix=fix))
    return weight.opened()


def _unpacked(product: _Product, weight: Array | RoundedWeight) -> tuple[Array, Array, Array]:
    """Return an array that has the gradient of a weight, its numbers, and the scales [E, N] of its
    channels.
    """
    if isinstance(weight, RoundedWeight):
        numbers, scale, zeros = weight.unpacked()
        return zeros, numbers, scale
    maximum = functools.partial(largest_over, axes=product.sharded.summed)
    rounded = round_array(
        jax.lax.stop_gradient(weight), "ekn", "en", eight_bits(product.precision).numbers, maximum
    )
    return weight, rounded.numbers, rounded.scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_rounded_rows(
    product: _Product, x: Array, zeros: Array, numbers: Array, scale: Array, sizes: Array
) -> Array:
    return _forward(product, x, zeros, numbers, scale, sizes)[0]


@first_order
def _forward(
    product: _Product, x: Array, zeros: Array, numbers: Array, scale: Array, sizes: Array
) -> Any:
    maximum = functools.partial(largest_over, axes=product.sharded.summed)
    rounded = round_array(x, "mk", "m", eight_bits(product.precision).numbers, maximum)
    y = _multiply(rounded, numbers, sizes) * scale[_expert_of_each_row(len(x), sizes)]
    residuals = x, jnp.zeros(0, zeros.dtype), as_bits(numbers), scale, sizes
    return y.astype(jnp.result_type(x.dtype, zeros.dtype)), residuals


@first_order
def _backward(product: _Product, residuals: Any, grad: Array) -> tuple[Array | None, ...]:
    x, like_weight, bits, scale, sizes = residuals
    scaled = grad.astype(wide_dtype(grad.dtype)) * scale[_expert_of_each_row(len(x), sizes)]
    maximum = functools.partial(largest_over, axes=product.sharded.channels)
    rounded = round_array(scaled, "mn", "m", eight_bits(product.precision).gradients, maximum)
    dx = _multiply(rounded, from_bits(bits, product.precision), sizes, transposed=True)
    dw = outer_of_groups(implementation_here(), x.astype(grad.dtype), grad, sizes)
    return dx.astype(x.dtype), dw.astype(like_weight.dtype), None, None, None


_multiply_rounded_rows.defvjp(_forward, _backward)


def _multiply(rows: Rounded, numbers: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Return the product of rounded rows and the experts' numbers, without the scales of channels.

    0 for rows of no expert.

    Numbers of 8 bits are exact in bfloat16. They are summed in the wide dtype of scales.
    """
    wide = rows.scale.dtype
    dtype = wide if device_kind_or_default() == "cpu" else jnp.bfloat16
    factors = rows.numbers.astype(dtype), numbers.astype(dtype)
    sums = product_of_groups(
        implementation_here(), *factors, sizes, transposed=transposed, dtype=wide
    )
    has_expert = jnp.arange(len(sums)) < jnp.sum(sizes)
    return sums * jnp.where(has_expert, rows.scale, 0)[:, None]


def _expert_of_each_row(num_rows: int, sizes: Int[Array, " E"]) -> Int[Array, " M"]:
    """Return the expert of each row; the last expert for rows of no expert."""
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(num_rows), side="right")
    return jnp.minimum(expert, sizes.shape[0] - 1)
