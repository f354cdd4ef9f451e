"""Products in 8 bits, with gradients.

Scales are of one token, one channel of a weight, or one row of tokens, so many devices quantise as
one does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.core._errors import format_error, plural
from shardopt.core._rounding import Precision
from shardopt.core._types import wide_dtype
from shardopt.kernels._devices import kernels_run_on
from shardopt.kernels._pallas import LANES
from shardopt.low_precision._first_order import first_order
from shardopt.low_precision._mlp_kernels import Mlp, rounded_mlp
from shardopt.low_precision._numbers import (
    as_bits,
    eight_bits,
    from_bits,
    inverse,
    largest_magnitude,
    largest_number,
    largest_over,
    narrow,
)
from shardopt.low_precision._product_kernels import (
    MatrixWeight,
    RoundedTokens,
    Sizes,
    norm_and_round,
    round_rows,
    rounded_matrix,
    rounded_product,
    takes,
)
from shardopt.low_precision._weight import RoundedWeight, check_intact
from shardopt.mesh import device_kind_or_default, is_analysed, manual_context_axes
from shardopt.trace._marks import ROW_MAXIMUM, marked


class Normed(NamedTuple):
    """Activations and the arguments of the norm that returned them, from which one kernel norms and
    rounds.

    Attributes:
      normed: the activations, `rms_norm(x, scale, epsilon)`. They have the gradient. XLA does not
        compute them for kernels.
      x: the first argument of the norm.
      scale: its second argument.
      epsilon: its third argument.
    """

    normed: Float[Array, "B T D"]
    x: Float[Array, "B T D"]
    scale: Float[Array, " D"]
    epsilon: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the activations."""
        return self.normed.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the activations."""
        return self.normed.dtype

    def rounded(self, precision: Precision) -> RoundedTokens:
        """Return the activations, rounded by a kernel."""
        x, scale = jax.lax.stop_gradient((self.x, self.scale))
        return norm_and_round(x, scale, self.epsilon, eight_bits(precision).numbers)


def plain(x: Float[Array, "..."] | Normed) -> Float[Array, "..."]:
    """Return activations as an array."""
    return x.normed if isinstance(x, Normed) else x


def product_in_8_bits(
    subscripts: str,
    x: Array | Normed,
    weight: Array | RoundedWeight,
    precision: Precision,
    added: Array | None,
) -> Array:
    """Return the product of `so.nn.quantized_einsum` by the kernels for TPU, or else by XLA."""
    product = Product(*parse_subscripts(subscripts), precision)
    y = _by_kernels(product, x, weight, added)
    if y is not None:
        return y
    x = plain(x)
    y = (
        _by_xla_rounded(product, x, weight)
        if isinstance(weight, RoundedWeight)
        else _by_xla(product, x, weight)
    )
    return plus(cast(Array, y), added)


def plus(y: Array, added: Array | None) -> Array:
    return y if added is None else added + y


def opened(subscripts: str, weight: RoundedWeight, precision: str | None) -> RoundedWeight:
    """Return a rounded weight for its product to read.

    Raises:
      TypeError: if its numbers or scales were cast.
      ValueError: if the product has another precision, or sums over other dims.
    """
    rounding = weight.form.rounding
    check_intact("quantized_einsum", weight)
    x, letters, _ = parse_subscripts(subscripts)
    is_product = precision == rounding.precision and set(letters[: rounding.summed]) == set(
        x
    ) & set(letters)
    if rounding.experts or not is_product:
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

    def sizes(self, x: tuple[int, ...], weight: tuple[int, ...]) -> dict[str, int]:
        """Return the size of each letter, from the shapes of activations and weight."""
        return dict(zip(self.x + self.weight, x + weight, strict=True))

    @property
    def rounds_weight_gradient(self) -> bool:
        """Whether the product over tokens is rounded: a single dim of tokens may be one that
        devices share.
        """
        return len(self.tokens) > 1


def _without(letters: str, removed: str) -> str:
    return "".join(letter for letter in letters if letter not in removed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_xla(product: Product, x: Array, weight: Array) -> Array:
    return _forward(product, x, weight)[0]


@first_order
def _forward(product: Product, x: Array, weight: Array) -> tuple[Array, tuple[Any, ...]]:
    rounded = round_array(
        weight, product.weight, product.channels, eight_bits(product.precision).numbers
    )
    return _multiply_rounded(product, x, weight.dtype, rounded)


def _multiply_rounded(
    product: Product, x: Array, dtype: DTypeLike, weight: Rounded
) -> tuple[Array, tuple[Any, ...]]:
    """Return the product with a rounded weight, and the residuals of its gradients."""
    rounded_x = round_array(x, product.x, product.tokens, eight_bits(product.precision).numbers)
    y = _multiply(rounded_x, product.x, weight, product.weight, product.out)
    y = _scaled(_scaled(y, product.out, rounded_x), product.out, weight)
    kept_x = jnp.zeros(0, x.dtype) if product.rounds_weight_gradient else x
    bits = as_bits(rounded_x.numbers), as_bits(weight.numbers)
    residuals = kept_x, jnp.zeros(0, dtype), bits, (rounded_x.scale, weight.scale)
    return y.astype(jnp.result_type(x.dtype, dtype)), residuals


@first_order
def _backward(product: Product, residuals: tuple[Any, ...], grad: Array) -> tuple[Array, Array]:
    x, like_weight, bits, (x_scale, weight_scale) = residuals
    qx, qw = (from_bits(each, product.precision) for each in bits)
    dtype = eight_bits(product.precision).gradients
    wide = grad.astype(wide_dtype(grad.dtype))
    rounded_x, rounded_weight = (
        Rounded(qx, x_scale, product.tokens),
        Rounded(qw, weight_scale, product.channels),
    )
    rounded = round_array(
        _scaled(wide, product.out, rounded_weight), product.out, product.tokens, dtype
    )
    dx = _scaled(
        _multiply(rounded, product.out, rounded_weight, product.weight, product.x),
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
    return dx.astype(x.dtype), dw.astype(like_weight.dtype)


_by_xla.defvjp(_forward, _backward)


def _by_xla_rounded(product: Product, x: Array, weight: RoundedWeight) -> Array:
    """Return the product with a weight that is rounded already."""
    numbers, scale, zeros = weight.unpacked()

    @jax.custom_vjp
    def multiply(x: Array, zeros: Array, numbers: Array, scale: Array) -> Array:
        return forward(x, zeros, numbers, scale)[0]

    def forward(
        x: Array, zeros: Array, numbers: Array, scale: Array
    ) -> tuple[Array, tuple[Any, ...]]:
        return _multiply_rounded(product, x, zeros.dtype, Rounded(numbers, scale, product.channels))

    def backward(residuals, grad):
        return (*_backward(product, residuals, grad), None, None)

    multiply.defvjp(first_order(forward, 0), backward)
    return multiply(x, zeros, numbers, scale)


def _multiply(a: Rounded, a_letters: str, b: Rounded, b_letters: str, out: str) -> Array:
    """Return the product of the numbers in 8 bits, without scales, in a wide dtype."""
    wide, numbers, sums = a.scale.dtype, (a.numbers, b.numbers), jnp.float32
    # CPU has no 8-bit products: multiply the same numbers in a wider dtype
    if device_kind_or_default() == "cpu":
        numbers, sums = (a.numbers.astype(wide), b.numbers.astype(wide)), wide
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
    """Return a / scale, rounded, with a scale for each index of the `kept` dims.

    NaN and infinity become NaN.
    """
    dims = tuple(i for i, letter in enumerate(letters) if letter not in kept)
    wide = a.astype(wide_dtype(a.dtype))
    largest = maximum(wide, dims)
    scale = largest / largest_number(dtype)
    kept_letters = "".join(letter for letter in letters if letter in kept)
    return Rounded(narrow(wide * inverse(scale), dtype), jnp.squeeze(scale, dims), kept_letters)


def _scaled(a: Array, letters: str, rounded: Rounded) -> Array:
    """Return an array times the scales of another one, by the letters of its dims."""
    order = [letter for letter in letters if letter in rounded.letters]
    scale = jnp.transpose(rounded.scale, [rounded.letters.index(letter) for letter in order])
    return a * jnp.expand_dims(
        scale, [i for i, letter in enumerate(letters) if letter not in rounded.letters]
    )


def gated_mlp(
    x: Float[Array, "B T D"] | Normed,
    up: Array | RoundedWeight,
    down: Array | RoundedWeight,
    *,
    activation: Callable[[Array], Array],
    precision: Precision,
    added: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"] | None:
    """Return `added + down(activation(gate) * up)` by the kernels for TPU, with gate and up in `up`
    [D, 2, F]; None if they do not take it.

    It equals the two products by `quantized_einsum`, but the activation is computed in float32.
    """
    up = opened("btd,dcf->cbtf", up, precision) if isinstance(up, RoundedWeight) else up
    down = opened("btf,fd->btd", down, precision) if isinstance(down, RoundedWeight) else down
    up_operand = _kernel_weight(Product("btd", "dcf", "cbtf", precision), x.shape, up)
    down_operand = _kernel_weight(
        Product("btf", "fd", "btd", precision), (*x.shape[:2], up.shape[2]), down
    )
    if up.shape[1] != 2 or up_operand is None or down_operand is None:
        return None
    (up_sizes, up_weight), (down_sizes, down_weight) = up_operand, down_operand
    mlp = Mlp(activation, up_sizes, down_sizes)
    by_heads = plain(x)[:, None]
    in_kernel = added[:, None] if _has_dtype_of_product(added, x, up) else None
    tokens = _rounded_tokens(precision, x, by_heads)
    y = cast(Array, rounded_mlp(mlp, by_heads, tokens, up_weight, down_weight, in_kernel))[:, 0]
    return y if in_kernel is not None else plus(y, added)


def _has_dtype_of_product(
    added: Array | None, x: Array | Normed, weight: Array | RoundedWeight
) -> TypeGuard[Array]:
    """Return whether there is an array to add in the dtype of the product, as kernels add it."""
    return added is not None and added.dtype == jnp.result_type(x.dtype, weight.dtype)


def _rounded_tokens(
    precision: Precision, x: Array | Normed, by_heads: Float[Array, "B H T W"]
) -> RoundedTokens:
    if isinstance(x, Normed):
        return x.rounded(precision)
    return round_rows([jax.lax.stop_gradient(by_heads)], eight_bits(precision).numbers)


def _by_kernels(
    product: Product, x: Array | Normed, weight: Array | RoundedWeight, added: Array | None
) -> Array | None:
    """Return the product plus `added` by the kernels for TPU; None if they do not take it."""
    operand = _kernel_weight(product, x.shape, weight)
    if operand is None:
        return None
    kernel_sizes, kernel_weight = operand
    sizes, (parts, channels) = product.sizes(x.shape, weight.shape), _parts(product)
    heads = _heads(product.summed, sizes)
    width = math.prod(sizes[letter] for letter in product.summed) // heads
    by_heads = plain(x).reshape(-1, sizes[product.tokens[-1]], heads, width).swapaxes(1, 2)
    tokens = _rounded_tokens(product.precision, x, by_heads)
    in_kernel = None
    if _has_dtype_of_product(added, x, weight) and kernel_sizes.heads == 1 and not parts:
        in_kernel = added.reshape(-1, 1, sizes[product.tokens[-1]], kernel_weight.scale.shape[1])
    y = cast(
        tuple[Array, ...], rounded_product(kernel_sizes, by_heads, tokens, kernel_weight, in_kernel)
    )
    y = [
        part.swapaxes(1, 2).reshape([sizes[letter] for letter in product.tokens + channels])
        for part in y
    ]
    y = jnp.stack(y).reshape([sizes[letter] for letter in product.out]) if parts else y[0]
    return y if in_kernel is not None else plus(y, added)


def _kernel_weight(
    product: Product, x_shape: tuple[int, ...], weight: Array | RoundedWeight
) -> tuple[Sizes, MatrixWeight] | None:
    """Return the sizes and the weight of a product by the kernels for TPU.

    None if they do not take it.

    They run on a TPU where each device multiplies its own whole rows and weights, in multiples of
    128.
    """
    parts, channels = _parts(product)
    fits = (
        parts + product.tokens + channels == product.out
        and product.tokens + product.summed == product.x
    )
    if not kernels_multiply(product.precision):
        return None
    if not (fits and product.rounds_weight_gradient) or manual_context_axes():
        return None
    sizes = product.sizes(x_shape, weight.shape)
    C, T, K, N = (
        math.prod(sizes[letter] for letter in letters)
        for letters in (parts, product.tokens[-1], product.summed, channels)
    )
    if not takes(C, T, K, N):
        return None
    order = product.summed + parts + channels
    if not isinstance(weight, RoundedWeight):
        matrix = jnp.transpose(weight, [product.weight.index(letter) for letter in order]).reshape(
            K, C * N
        )
        rounded = rounded_matrix(
            jax.lax.stop_gradient(matrix), eight_bits(product.precision).numbers
        )
        operand = MatrixWeight(tuple(jnp.split(matrix, C, axis=1)), *rounded)
        return Sizes(C, _heads(channels, sizes), False, product.precision), operand
    if product.weight != order or weight.form.rounding.parts != C:
        return None
    operand = MatrixWeight(weight.zeros, weight.matrix, weight.channel_scale)
    return Sizes(C, _heads(channels, sizes), weight.form.by_channel, product.precision), operand


def kernels_multiply(precision: Precision) -> bool:
    """Return whether kernels for TPU multiply in a precision here: fp8 on TPU 7x, whose matrix unit
    has it.
    """
    kind = device_kind_or_default()
    return kernels_run_on(kind) and (precision == "int8" or kind == "TPU7x")


def _heads(letters: str, sizes: dict[str, int]) -> int:
    """Return how many heads the last of these dims has, if their widths fill registers; else 1."""
    return (
        math.prod(sizes[letter] for letter in letters[:-1])
        if sizes[letters[-1]] % LANES == 0
        else 1
    )


def _parts(product: Product) -> tuple[str, str]:
    """Return the channels before the tokens of the result, and those after them."""
    before = product.out.partition(product.tokens)[0]
    parts = "".join(letter for letter in before if letter in product.channels)
    return parts, _without(_without(product.out, product.tokens), parts)
