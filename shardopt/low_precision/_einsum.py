"""Products in 8 bits, with gradients.

Scales are of one token, one channel of a weight, or one row of tokens, so many devices quantise as
one does.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Never, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from shardopt.core import format_error, plural, widened
from shardopt.core._rounding import Precision
from shardopt.low_precision._numbers import (
    as_bits,
    eight_bits,
    from_bits,
    largest_magnitude,
    largest_over,
    round_over,
)
from shardopt.low_precision._weight import RoundedWeight, check_intact
from shardopt.mesh import device_kind_or_default, is_analysed, manual_context_axes
from shardopt.trace._marks import ROW_MAXIMUM, marked


def product_in_8_bits(
    subscripts: str, x: Array, weight: Array | RoundedWeight, precision: Precision
) -> Array:
    """Return the product of `so.nn.quantized_einsum`."""
    product = Product(*parse_subscripts(subscripts), precision)
    if isinstance(weight, RoundedWeight):
        return cast(Array, _multiply(product, x, *weight.unpacked()))
    return cast(Array, _round_and_multiply(product, x, weight))


def opened(subscripts: str, weight: RoundedWeight, precision: str | None) -> RoundedWeight:
    """Return a rounded weight for its product to read.

    Raises:
      TypeError: if its numbers or scales were cast.
      ValueError: if the product has another precision, or sums over other dims.
    """
    rounding = weight.rounding
    check_intact(weight)
    x, letters, _ = parse_subscripts(subscripts)
    is_product = precision == rounding.precision and set(letters[: rounding.summed]) == set(
        x
    ) & set(letters)
    if not is_product:
        problem = (
            f"the weight was rounded to {rounding.precision} for a product that sums over its first"
            f" {plural(rounding.summed, 'dim')}, and is used in {subscripts!r} with precision"
            f" {precision!r}."
        )
        fix = "describe this product in BlockModel.rounded, or take the weight out of it."
        raise ValueError(format_error("quantized_einsum", problem, fix=fix))
    return weight.opened()


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


class Rounded(NamedTuple):
    """Numbers in 8 bits, and their scales.

    Attributes:
      numbers: an array in 8 bits.
      scale: the factors of the numbers, with the dims of `letters`.
      letters: the subscripts of the dims whose indices have scales of their own.
    """

    numbers: Array
    scale: Array
    letters: str


class Product(NamedTuple):
    """The subscripts of a product, and its precision.

    Attributes:
      x: letters of activations.
      weight: letters of the weight.
      out: letters of the result.
      precision: "int8" or "fp8".
    """

    x: str
    weight: str
    out: str
    precision: Precision

    @property
    def tokens(self) -> str:
        """The letters that count tokens; the last one counts positions, and the others rows."""
        return _without(self.x, self.weight)

    @property
    def channels(self) -> str:
        """The letters of the weight that stay in the result."""
        return _without(self.weight, self.x)

    @property
    def summed(self) -> str:
        """The letters that are summed, in the order of x."""
        return _without(self.x, self.tokens)

    @property
    def rounds_weight_gradient(self) -> bool:
        """Whether the product over tokens is rounded: a single dim of tokens may be one that
        devices share.
        """
        return len(self.tokens) > 1


def _without(letters: str, removed: str) -> str:
    return "".join(letter for letter in letters if letter not in removed)


Results = TypeVar("Results")


def _first_order(function: Callable[..., Results]) -> Callable[..., Results]:
    """Return a forward or backward function of a `custom_vjp` that cannot be differentiated.

    jax does it for a gradient of a gradient. It would differentiate roundings and scales, and
    return wrong numbers or zeros.

    Args:
      function: a function whose arguments after the first are pytrees of arrays.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Results:
        if not is_analysed():
            # nothing reads the result, so that it changes no program
            _not_differentiated(*args[1:])
        return function(*args)

    return run


@jax.custom_jvp
def _not_differentiated(*arrays: Any) -> Any:
    return arrays


@_not_differentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Never:
    problem = "the gradient of a product in 8 bits was differentiated, and it has no gradient."
    fix = "use precision=None where a loss or a block takes a gradient itself."
    raise TypeError(format_error("quantized_einsum", problem, fix=fix))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(product: Product, x: Array, numbers: Array, scale: Array, weight: Array) -> Array:
    """Return the product with a rounded weight. `weight` is not read, and has the gradient."""
    return _forward(product, x, numbers, scale, weight)[0]


@_first_order
def _forward(
    product: Product, x: Array, numbers: Array, scale: Array, weight: Array
) -> tuple[Array, tuple[Any, ...]]:
    rounded_weight = Rounded(numbers, scale, product.channels)
    rounded_x = round_array(x, product.x, product.tokens, eight_bits(product.precision).numbers)
    y = _product(rounded_x, product.x, rounded_weight, product.weight, product.out)
    y = _scaled(_scaled(y, product.out, rounded_x), product.out, rounded_weight)
    kept_x = jnp.zeros(0, x.dtype) if product.rounds_weight_gradient else x
    bits = as_bits(rounded_x.numbers), as_bits(numbers)
    residuals = kept_x, jnp.zeros(0, weight.dtype), bits, (rounded_x.scale, scale)
    return y.astype(jnp.result_type(x.dtype, weight.dtype)), residuals


@_first_order
def _backward(
    product: Product, residuals: tuple[Any, ...], grad: Array
) -> tuple[Array | None, ...]:
    x, like_weight, bits, (x_scale, weight_scale) = residuals
    qx, qw = (from_bits(each, product.precision) for each in bits)
    dtype = eight_bits(product.precision).gradients
    wide = widened(grad)
    rounded_x = Rounded(qx, x_scale, product.tokens)
    rounded_weight = Rounded(qw, weight_scale, product.channels)
    rounded = round_array(
        _scaled(wide, product.out, rounded_weight), product.out, product.tokens, dtype
    )
    dx = _scaled(
        _product(rounded, product.out, rounded_weight, product.weight, product.x),
        product.x,
        rounded,
    )
    factors = x, grad
    if product.rounds_weight_gradient:
        kept = product.tokens[:-1] + product.channels
        scaled_grad = _scaled(wide, product.out, rounded_x)
        rounded = round_array(scaled_grad, product.out, kept, dtype, maximum=_row_maximum)
        factors = qx, _scaled(rounded.numbers.astype(wide.dtype), product.out, rounded)
    factors = (factor.astype(grad.dtype) for factor in factors)
    dw = jnp.einsum(f"{product.x},{product.out}->{product.weight}", *factors)
    return dx.astype(x.dtype), None, None, dw.astype(like_weight.dtype)


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_and_multiply(product: Product, x: Array, weight: Array) -> Array:
    """Return the product with a weight that is rounded here."""
    return _round_forward(product, x, weight)[0]


@_first_order
def _round_forward(product: Product, x: Array, weight: Array) -> tuple[Array, tuple[Any, ...]]:
    dtype = eight_bits(product.precision).numbers
    rounded = round_array(weight, product.weight, product.channels, dtype)
    return _forward(product, x, rounded.numbers, rounded.scale, weight)


def _round_backward(
    product: Product, residuals: tuple[Any, ...], grad: Array
) -> tuple[Array | None, ...]:
    dx, *_, dw = _backward(product, residuals, grad)
    return dx, dw


_round_and_multiply.defvjp(_round_forward, _round_backward)


def _product(a: Rounded, a_letters: str, b: Rounded, b_letters: str, out: str) -> Array:
    """Return the product of the numbers in 8 bits, without scales, in a wide dtype."""
    wide = a.scale.dtype
    numbers = (a.numbers, b.numbers)
    sums = jnp.float32
    # CPU has no 8-bit products: multiply the same numbers in a wider dtype
    if device_kind_or_default() == "cpu":
        numbers = (a.numbers.astype(wide), b.numbers.astype(wide))
        sums = wide
    elif a.numbers.dtype == jnp.int8:
        sums = jnp.int32
    return jnp.einsum(
        f"{a_letters},{b_letters}->{out}", *numbers, preferred_element_type=sums
    ).astype(wide)


def _row_maximum(a: Array, dims: tuple[int, ...]) -> Array:
    """Return the maximum over positions, of all devices along context."""
    if is_analysed():
        return marked(ROW_MAXIMUM, functools.partial(largest_magnitude, dims=dims))(a)
    return largest_over(a, dims, tuple(manual_context_axes()))


def round_array(
    a: Array,
    letters: str,
    kept: str,
    dtype: DTypeLike,
    maximum: Callable[[Array, tuple[int, ...]], Array] = largest_magnitude,
) -> Rounded:
    """Return an array as `round_over` does, with a scale for each index of the `kept` dims."""
    dims = tuple(i for i, letter in enumerate(letters) if letter not in kept)
    numbers, scale = round_over(a, dims, dtype, maximum)
    kept_letters = "".join(letter for letter in letters if letter in kept)
    return Rounded(numbers, jnp.squeeze(scale, dims), kept_letters)


def _scaled(a: Array, letters: str, rounded: Rounded) -> Array:
    """Return an array times the scales of another one, by the letters of its dims."""
    order = [letter for letter in letters if letter in rounded.letters]
    scale = jnp.transpose(rounded.scale, [rounded.letters.index(letter) for letter in order])
    return a * jnp.expand_dims(
        scale, [i for i, letter in enumerate(letters) if letter not in rounded.letters]
    )
