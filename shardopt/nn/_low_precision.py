"""Products in 8 bits, with gradients.

Scales are of one token, one channel of a weight, or one row of tokens, so many devices quantise as
one does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.collectives._rounded_gather import maximum_over
from shardopt.core._errors import format_error, plural
from shardopt.core._rounded_weight import (
    Precision,
    RoundedWeight,
    as_bits,
    eight_bits,
    from_bits,
    inverse,
    largest_magnitude,
    largest_number,
    narrow,
)
from shardopt.core._types import wide_dtype
from shardopt.mesh import device_kind_or_default, is_analysed
from shardopt.nn._first_order import first_order
from shardopt.nn._kernel_tiles import LANES, kernels_run_on
from shardopt.nn._low_rank import LowRank, Weight
from shardopt.nn._order import manual_context_axes
from shardopt.nn._rounded_mlp import Mlp, rounded_mlp
from shardopt.nn._rounded_product import (
    MatrixWeight,
    RoundedTokens,
    Sizes,
    norm_and_round,
    round_rows,
    rounded_matrix,
    rounded_product,
    takes,
)
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


def quantized_einsum(
    subscripts: str,
    x: Float[Array, "..."] | Normed,
    weight: Float[Array, "..."] | LowRank | RoundedWeight,
    *,
    precision: Precision | None,
    added: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Return `jnp.einsum(subscripts, x, weight)` of activations and a weight, multiplied in 8 bits,
    with gradients.

    Args:
      subscripts: of two operands, such as "btd,dhk->bthk". Dims of both operands are summed; all
        others are in the result.
      x: activations, or a `Normed` with them.
      weight: in the dtype of the product without quantisation. A weight with an adapter
        (`shardopt.adapters`) adds the product of x and the adapter, which is not quantised. A
        weight that `BlockModel.rounded` names is rounded already.
      precision: "int8" (TPU v5e, v5p, v6e, GPU) or "fp8" (TPU 7x; GPU from Hopper). On CPU the
        rounded numbers are multiplied in float32. None: `jnp.einsum`.
      added: an array of the product's shape that is added to it. In the dtype of the product,
        kernels add it in the same pass.

    Returns:
      The product, in the dtype of x and weight, plus `added`.

    Raises:
      ValueError: if `precision` is unknown, subscripts do not have this form, operands do not fit
        them or are not floating, or `added` has another shape; if `BlockModel.rounded` describes
        another product of the weight.

    Example:
      >>> import jax.numpy as jnp
      >>> x, weight = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(0, 1, 8).reshape(4, 2)
      >>> error = quantized_einsum("td,df->tf", x, weight, precision="int8") - x @ weight
      >>> bool(0 < abs(error).max() < 0.01)
      True

    With q(a) = round(a / s) and s = max |a| / m, where m is the largest number of the 8 bits:

        y  = s_x s_w (q(x) q(w))      s_x of each token, s_w of each channel: each index of the weight that the result has
        dx = s_g (q(g s_w) q(w))      s_g of each token
        dw = s_h (q(x)^T q(g s_x))    s_h of each row and channel

    g is the gradient of y. One copy of a weight and one of x serve both passes, because their
    scales are multiplied into g before it is rounded. "int8" rounds to the nearest of -127 to 127.
    "fp8" is e4m3fn, with 3 bits of fraction, up to 448; g uses e5m2, with 2 bits, up to 57344.
    Gradients ignore the rounding (straight through).

    **Rows**: of the dims of tokens, the last one counts positions, and the others count rows. With
    a single dim of tokens, dw is x^T g without rounding, since devices may share this dim.

    **Kernels**: on TPU, Pallas kernels compute all three products in 8 bits, of "fp8" on TPU 7x
    alone. They need whole rows and weights on a device (neither tensor nor context axes, no
    `view="global"`), at least one dim of rows, x as "rows, positions, summed dims", sizes in
    multiples of 128, rows and columns that fit into VMEM, and a result whose channels follow its
    tokens. Otherwise, and on GPU, XLA multiplies y and dx in 8 bits. It multiplies the same rounded
    numbers of dw in the dtype of the gradients. `docs/notes/low_precision.md` compares a step of
    Llama 3 8B with its step in bfloat16.

    **Equivalence**: scales are of a token, a row or a channel, and no row is shared but over
    context, where devices take the maximum of all. So strategies, mesh sizes and micro-batches
    equal one device with the same `precision`, up to summation order. If a different order moves a
    number across a rounding boundary, the number changes by one step of the 8 bits (in float64:
    practically never).

    **Placement**: weights are not cast, so master weights stay in float32.

    **Communication**: none over data, where fsdp gathers weights. It gathers them in 8 bits if
    `BlockModel.rounded` names them; then each device rounds its own shards, and a channel of
    several devices takes the maximum of all. Over context, the maxima of g s_x are sent, 4 bytes a
    row and channel. If summed dims are sharded over tensor, maxima of tokens and channels and
    partial sums in 32 bits are sent. If channels are, maxima of tokens' gradients.

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
      2023, algorithm 1 (SwitchBack, which has one scale for w; there the product over tokens keeps
      its precision). Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (e4m3 forwards,
      e5m2 backwards).
    """
    if isinstance(weight, LowRank):
        product = quantized_einsum(subscripts, x, weight.base, precision=precision, added=added)
        return product + weight.einsum(plain(x), parse_subscripts(subscripts)).astype(product.dtype)
    if isinstance(weight, RoundedWeight):
        weight = _opened(subscripts, weight, precision)
    _check_operands(subscripts, x, weight, any_dtype=precision is None)
    if added is not None:
        _check_added(subscripts, added, x.shape, weight.shape)
    if precision is None:
        return _plus(jnp.einsum(subscripts, plain(x), weight), added)
    check_precision("quantized_einsum", precision)
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
    return _plus(cast(Array, y), added)


def _plus(y: Array, added: Array | None) -> Array:
    return y if added is None else added + y


def _check_operands(
    subscripts: str, x: Array | Normed, weight: Array | RoundedWeight, *, any_dtype: bool
) -> None:
    """Refuse operands with more or fewer dims than the subscripts, and without `any_dtype` those
    that are not floating.
    """
    for operand, letters in zip((x, weight), parse_subscripts(subscripts)[:2], strict=True):
        if len(operand.shape) != len(letters) or not (
            any_dtype or jnp.issubdtype(operand.dtype, jnp.floating)
        ):
            problem = f"an operand of {subscripts!r} is {operand.dtype}{list(operand.shape)}."
            fix = f"give it a floating dtype, and the {plural(len(letters), 'dim')} of {letters!r}."
            raise ValueError(format_error("quantized_einsum", problem, fix=fix))


def _check_added(
    subscripts: str, added: Array, x: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    """Refuse an array that has another shape than the product."""
    *operands, out = parse_subscripts(subscripts)
    sizes = dict(zip("".join(operands), x + weight, strict=True))
    shape = tuple(sizes[letter] for letter in out)
    if jnp.shape(added) != shape:
        problem = f"`added` has shape {jnp.shape(added)}, and the product {shape}."
        raise ValueError(
            format_error("quantized_einsum", problem, fix="give an array of the product's shape.")
        )


def _opened(subscripts: str, weight: RoundedWeight, precision: str | None) -> RoundedWeight:
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


def check_intact(caller: str, weight: RoundedWeight) -> None:
    """Refuse a rounded weight whose arrays were cast, or that the block did not cast as its
    rounding says.

    Raises:
      TypeError: if numbers or scales have another dtype than that of their rounding, or the block
        has not cast the weight to it.
    """
    if not weight.is_cast:
        dtype = weight.form.rounding.dtype
        problem = (
            f"a weight that BlockModel.rounded names was rounded in {dtype}, and the block did not"
            " cast it to that."
        )
        raise TypeError(
            format_error(
                caller, problem, fix="leave out the dtype of its Rounding, or cast the weight."
            )
        )
    if not weight.is_intact:
        problem = (
            "the arrays within a weight that BlockModel.rounded names were cast, and it is rounded"
            " to 8 bits."
        )
        fix = (
            "cast the weight itself: give jax.tree.map is_leaf=lambda leaf: hasattr(leaf,"
            ' "astype").'
        )
        raise TypeError(format_error(caller, problem, fix=fix))


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


def largest_over(a: Array, dims: tuple[int, ...], axes: tuple[str, ...]) -> Array:
    """Return the largest absolute number over dims, which stay with size 1, and over the devices
    along axes, if any.
    """
    largest = largest_magnitude(a, dims)
    return maximum_over(largest, axes) if axes else largest


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
    up: Weight,
    down: Weight,
    *,
    activation: Callable[[Array], Array],
    precision: Precision | None,
    added: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"] | None:
    """Return `added + down(activation(gate) * up)` by the kernels for TPU, with gate and up in `up`
    [D, 2, F]; None if they do not take it.

    It equals the two products by `quantized_einsum`, but the activation is computed in float32.
    """
    if precision is None or isinstance(up, LowRank) or isinstance(down, LowRank):
        return None
    up = _opened("btd,dcf->cbtf", up, precision) if isinstance(up, RoundedWeight) else up
    down = _opened("btf,fd->btd", down, precision) if isinstance(down, RoundedWeight) else down
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
    return y if in_kernel is not None else _plus(y, added)


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
    return y if in_kernel is not None else _plus(y, added)


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
