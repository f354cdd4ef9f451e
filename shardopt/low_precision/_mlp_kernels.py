"""A gated mlp in 8 bits for TPU, whose activation is computed while its results are rounded.

XLA fuses an elementwise function into a product in bfloat16, but not into a Pallas kernel. Between
two kernels it would write the hidden units, and each of their gradients, to HBM, and read them
again to round them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.kernels._pallas import LANES, ROWS, by_strips, call_kernel, largest_block, pl, pltpu
from shardopt.low_precision._first_order import first_order
from shardopt.low_precision._numbers import (
    as_bits,
    eight_bits,
    from_bits,
    inverse,
    largest_number,
    narrow,
)
from shardopt.low_precision._product_kernels import (
    NO_GRADIENT,
    EightBits,
    MatrixWeight,
    RoundedTokens,
    Sizes,
    forward,
    gradient_of,
    gradient_of_tokens,
    gradient_of_weight,
    like,
    round_columns,
    round_rows,
)

Elementwise = Callable[..., Sequence[Array]]


class Mlp(NamedTuple):
    """The static part of an mlp.

    Attributes:
      activation: returns the activated gate.
      up: of the product of gate and up, two parts.
      down: of the product of the hidden units.
    """

    activation: Callable[[Array], Array]
    up: Sizes
    down: Sizes

    def hidden(self, gate: Array, up: Array) -> list[Array]:
        """Return the hidden units."""
        return [self.activation(gate) * up]

    def gradients(self, gate: Array, up: Array, grad: Array) -> list[Array]:
        """Return the gradients of gate and up."""
        return list(jax.vjp(lambda gate, up: self.hidden(gate, up)[0], gate, up)[1](grad))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_mlp(
    mlp: Mlp,
    x: Float[Array, "B 1 T D"],
    tokens: RoundedTokens,
    up: MatrixWeight,
    down: MatrixWeight,
    added: Float[Array, "B 1 T D"] | None = None,
) -> Float[Array, "B 1 T D"]:
    """Return `added + down(activation(gate(x)) * up(x))` with the products of `rounded_product`.

    The activation is in float32.

    `tokens` is x, rounded; x is not read, and has the gradient. The parts before the activation
    have the name "mlp_hidden", and are not recomputed where remat saves it.
    """
    return _with_residuals(mlp, x, tokens, up, down, added)[0]


@first_order
def _with_residuals(
    mlp: Mlp,
    x: Array,
    tokens: RoundedTokens,
    up: MatrixWeight,
    down: MatrixWeight,
    added: Array | None = None,
) -> Any:
    qx, x_scale = tokens
    dtype = jnp.result_type(x.dtype, up.zeros[0].dtype)
    parts = [
        forward(qx, x_scale, up.numbers, up.scale, mlp.up, part, dtype=dtype) for part in range(2)
    ]
    parts = checkpoint_name(parts, "mlp_hidden")
    ((hidden, hidden_scale),) = round_rows_of(parts, [mlp.hidden], [None], [qx.dtype])
    y = forward(hidden, hidden_scale, down.numbers, down.scale, mlp.down, 0, added, dtype=dtype)
    likes = (
        jnp.zeros(0, x.dtype),
        jnp.zeros(0, up.zeros[0].dtype),
        jnp.zeros(0, down.zeros[0].dtype),
    )
    bits = [as_bits(numbers) for numbers in (qx, up.numbers, down.numbers)]
    return y, (likes, like(added), bits, parts, (x_scale, up.scale, down.scale))


@first_order
def _gradients(mlp: Mlp, residuals: Any, grad: Array) -> Any:
    (like_x, like_up, like_down), like_added, bits, parts, (x_scale, up_scale, down_scale) = (
        residuals
    )
    qx, up, down = (from_bits(each, mlp.up.precision) for each in bits)
    dtype = eight_bits(mlp.up.precision).gradients
    rows, row_scale = round_rows([grad], dtype, down_scale)
    d_hidden = gradient_of_tokens(rows, row_scale, down, mlp.down, 1, dtype=parts[0].dtype)
    both, functions = [*parts, d_hidden], [lambda gate, up, _: mlp.hidden(gate, up), mlp.gradients]
    (hidden, hidden_scale), (rows, row_scale) = round_rows_of(
        both, functions, [None, up_scale], [qx.dtype, dtype]
    )
    d_down = gradient_of_weight(
        hidden, *round_columns(grad, dtype, hidden_scale), mlp.down, dtype=like_down.dtype
    )
    dx = gradient_of_tokens(rows, row_scale, up, mlp.up, 1, dtype=like_x.dtype)
    columns = round_columns_of(both, mlp.gradients, x_scale, dtype)
    d_up = tuple(
        gradient_of_weight(qx, *rounded, mlp.up, dtype=like_up.dtype) for rounded in columns
    )
    return (
        dx,
        NO_GRADIENT,
        gradient_of(d_up),
        gradient_of((d_down,)),
        None if like_added is None else grad,
    )


rounded_mlp.defvjp(_with_residuals, _gradients)

_CHUNK = 512
"""Columns, or positions, that a turn of the kernels' loops computes."""


def round_rows_of(
    inputs: Sequence[Float[Array, "B 1 T W"]],
    functions: Sequence[Elementwise],
    factors: Sequence[Float[Array, "1 S"] | None],
    dtypes: Sequence[DTypeLike],
) -> list[tuple[EightBits[Array, "B T S"], Float[Array, "B T 1"]]]:
    """Return the results of each function of the inputs side by side, rounded, and a scale for each
    token over all of them.

    Args:
      inputs: arrays of one shape.
      functions: each is elementwise and returns its results in a list.
      factors: for each function what its columns are multiplied by before they are rounded.
      dtypes: for each function the dtype of its rounded results.
    """
    B, _, T, W = inputs[0].shape
    widths = [_count(function, len(inputs)) * W for function in functions]
    block = largest_block(T, 256, ROWS, 2 * (2 * len(inputs) * W + sum(widths)))
    used_factors = [factor for factor in factors if factor is not None]

    def by_token(width):
        return pl.BlockSpec((None, block, width), lambda b, i: (b, i, 0))

    results = call_kernel(
        functools.partial(
            _round_rows_of, tuple(functions), tuple(factor is not None for factor in factors)
        ),
        (B, T // block),
        [*inputs, *used_factors],
        [pl.BlockSpec((None, None, block, W), lambda b, i: (b, 0, i, 0)) for _ in inputs]
        + [pl.BlockSpec(factor.shape, lambda b, i: (0, 0)) for factor in used_factors],
        [spec for width in widths for spec in (by_token(width), by_token(1))],
        [
            jax.ShapeDtypeStruct((B, T, size), dtype)
            for width, eight_bit_dtype in zip(widths, dtypes, strict=True)
            for size, dtype in ((width, eight_bit_dtype), (1, jnp.float32))
        ],
        scratch_shapes=[pltpu.VMEM((ROWS, width), jnp.float32) for width in widths],
        name="round_rows_of",
    )
    return list(zip(results[::2], results[1::2], strict=True))


def _round_rows_of(
    functions: Sequence[Elementwise], has_factor: Sequence[bool], *refs: Any
) -> None:
    count, num_factors = len(functions), sum(has_factor)
    inputs, refs = refs[: -num_factors - 3 * count], refs[-num_factors - 3 * count :]
    factors, results, wides = (
        iter(refs[:num_factors]),
        refs[num_factors : num_factors + 2 * count],
        refs[-count:],
    )
    factors = [next(factors) if has else None for has in has_factor]
    block, W = inputs[0].shape
    chunk = math.gcd(W, _CHUNK)

    def round_strip(rows: Any) -> None:
        def compute(j: Any, maxima: tuple[Array, ...]) -> tuple[Array, ...]:
            start = pl.multiple_of(j * chunk, chunk)
            strips = [ref[rows, pl.ds(start, chunk)].astype(jnp.float32) for ref in inputs]
            new_maxima = []
            for function, factor, wide, maximum in zip(
                functions, factors, wides, maxima, strict=True
            ):
                for part, value in enumerate(function(*strips)):
                    columns = pl.ds(pl.multiple_of(part * W + start, chunk), chunk)
                    value = value if factor is None else value * factor[:, columns]
                    wide[:, columns] = value
                    maximum = jnp.maximum(maximum, jnp.max(jnp.abs(value), axis=1, keepdims=True))
                new_maxima.append(maximum)
            return tuple(new_maxima)

        maxima = lax.fori_loop(0, W // chunk, compute, (jnp.zeros((ROWS, 1), jnp.float32),) * count)
        for maximum, wide, numbers, scale in zip(
            maxima, wides, results[::2], results[1::2], strict=True
        ):
            scales = maximum / largest_number(numbers.dtype)
            scale[rows] = scales
            factor = inverse(scales)

            def divide(
                columns: Any, wide: Any = wide, numbers: Any = numbers, factor: Array = factor
            ) -> None:
                numbers[rows, columns] = narrow(wide[:, columns] * factor, numbers.dtype)

            by_strips(wide.shape[1], chunk, divide)

    by_strips(block, ROWS, round_strip)


def round_columns_of(
    inputs: Sequence[Float[Array, "B 1 T W"]],
    function: Elementwise,
    factor: Float[Array, "B T 1"],
    dtype: DTypeLike,
) -> list[tuple[EightBits[Array, "B T W"], Float[Array, "B 1 W"]]]:
    """Return each result of a function of the inputs times a factor of each position, rounded, and
    a scale for each row and column.
    """
    B, _, T, W = inputs[0].shape
    count = _count(function, len(inputs))

    def by_column(rows):
        return pl.BlockSpec((None, rows, LANES), lambda b, j: (b, 0, j))

    results = call_kernel(
        functools.partial(_round_columns_of, function, len(inputs)),
        (B, W // LANES),
        [*inputs, factor],
        [pl.BlockSpec((None, None, T, LANES), lambda b, j: (b, 0, 0, j)) for _ in inputs]
        + [pl.BlockSpec((None, T, 1), lambda b, j: (b, 0, 0))],
        [spec for _ in range(count) for spec in (by_column(T), by_column(1))],
        [
            jax.ShapeDtypeStruct((B, *size), size_dtype)
            for _ in range(count)
            for size, size_dtype in (((T, W), dtype), ((1, W), jnp.float32))
        ],
        scratch_shapes=[pltpu.VMEM((T, LANES), jnp.float32)] * count,
        name="round_columns_of",
    )
    return list(zip(results[::2], results[1::2], strict=True))


def _round_columns_of(function: Elementwise, num_inputs: int, *refs: Any) -> None:
    inputs, factor, refs = refs[:num_inputs], refs[num_inputs], refs[num_inputs + 1 :]
    count = len(refs) // 3
    results, wides = refs[: 2 * count], refs[2 * count :]
    T, columns = inputs[0].shape
    chunk = math.gcd(T, _CHUNK)

    def compute(i: Any, maxima: tuple[Array, ...]) -> tuple[Array, ...]:
        rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        values = [
            value * factor[rows]
            for value in function(*[ref[rows].astype(jnp.float32) for ref in inputs])
        ]
        for value, wide in zip(values, wides, strict=True):
            wide[rows] = value
        return tuple(
            jnp.maximum(maximum, jnp.max(jnp.abs(value), axis=0, keepdims=True))
            for value, maximum in zip(values, maxima, strict=True)
        )

    maxima = lax.fori_loop(0, T // chunk, compute, (jnp.zeros((1, columns), jnp.float32),) * count)
    largest = largest_number(results[0].dtype)
    factors = [inverse(maximum / largest) for maximum in maxima]
    for maximum, scale in zip(maxima, results[1::2], strict=True):
        scale[...] = maximum / largest

    def divide(rows: Any) -> None:
        for wide, numbers, scale_inverse in zip(wides, results[::2], factors, strict=True):
            numbers[rows] = narrow(wide[rows] * scale_inverse, numbers.dtype)

    by_strips(T, chunk, divide)


def _count(function: Elementwise, num_inputs: int) -> int:
    """Return how many results a function of so many arrays has."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return len(jax.eval_shape(function, *[number] * num_inputs))
