"""Pallas kernels for TPU that round matrices to 8 bits and multiply them, each in one pass over its
operands.

XLA reads an array twice to round it, for its maxima and for its numbers, and writes sums in 32
bits. Here a block of whole rows or columns is rounded while it is in VMEM, and sums are scaled
before they leave it. No operand is transposed in HBM. On other devices the kernels run interpreted,
for tests.

Activations are "B H T W": the T positions of a row, and H heads of W components, as attention has
them in memory. Without heads H is 1. A weight is a matrix of its K summed dims and C parts of N
channels, see `low_precision._weight.Form`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from shardopt.core._rounding import Precision
from shardopt.kernels._devices import vmem
from shardopt.kernels._norm import rsqrt_of_mean_square
from shardopt.kernels._pallas import (
    LANES,
    ROWS,
    by_strips,
    call_kernel,
    largest_block,
    pl,
    pltpu,
    product,
)
from shardopt.low_precision._first_order import first_order
from shardopt.low_precision._numbers import (
    as_bits,
    eight_bits,
    from_bits,
    inverse,
    largest_number,
    narrow,
)

EightBits = Shaped
"""The annotation of arrays in int8, float8_e4m3fn or float8_e5m2."""
STRIP = 256
_BYTES = 22
"""The bytes of VMEM for a number that is rounded: two buffers of it, and float32."""


class Sizes(NamedTuple):
    """The static part of a product.

    Attributes:
      parts: C.
      heads: the heads of the result.
      by_channel: whether the rows of the weight are channels, and else summed.
      precision: of rounded numbers.
    """

    parts: int
    heads: int
    by_channel: bool
    precision: Precision


class MatrixWeight(NamedTuple):
    """A rounded weight of a product.

    Attributes:
      zeros: its parts, which are not read. They have its gradient.
      numbers: the matrix.
      scale: the factors of its channels.
    """

    zeros: tuple[Float[Array, "R S/C"], ...]
    numbers: EightBits[Array, "R S"]
    scale: Float[Array, "1 CN"]


class RoundedTokens(NamedTuple):
    """Activations rounded by token, side by side with their heads.

    Or rows sorted by expert, [M, K].

    Attributes:
      numbers: the matrix.
      scale: the factors of its tokens.
    """

    numbers: EightBits[Array, "... T HW"]
    scale: Float[Array, "... T 1"]


NO_GRADIENT: Any = RoundedTokens(None, None)  # pyright: ignore[reportArgumentType]
"""The gradient of `RoundedTokens`, as `custom_vjp` takes it."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_product(
    sizes: Sizes,
    x: Float[Array, "B H T W"],
    tokens: RoundedTokens,
    weight: MatrixWeight,
    added: Float[Array, "B 1 T N"] | None = None,
) -> tuple[Float[Array, "B H T W"], ...]:
    """Return the product over K of rounded activations and each part of a rounded weight.

    Gradients are rounded, too.

    A token has a scale, and so has a channel of the weight. The scales of a gradient are of a token
    for the gradient of x, and of a row and a channel for the gradient of the weight. T, K, N and W
    are multiples of 128.

    Args:
      sizes: parts, heads of the result, and the form of the weight.
      x: activations, which are not read. They have the gradient.
      tokens: x, rounded by `round_rows` or `norm_and_round`.
      weight: the rounded weight.
      added: an array that is added to the product, in its dtype; only to one part without heads.
    """
    return _with_residuals(sizes, x, tokens, weight, added)[0]


@first_order
def _with_residuals(
    sizes: Sizes, x: Array, tokens: RoundedTokens, weight: MatrixWeight, added: Array | None = None
) -> Any:
    zeros, numbers, scale = weight
    qx, x_scale = tokens
    dtype = jnp.result_type(x.dtype, zeros[0].dtype)
    y = tuple(
        forward(qx, x_scale, numbers, scale, sizes, part, added, dtype=dtype)
        for part in range(sizes.parts)
    )
    like_x, like_weight = jnp.zeros((0, x.shape[1]), x.dtype), jnp.zeros(0, zeros[0].dtype)
    return y, (like_x, like_weight, like(added), as_bits(qx), x_scale, as_bits(numbers), scale)


@first_order
def _gradients(sizes: Sizes, residuals: Any, grads: tuple[Array, ...]) -> Any:
    like_x, like_weight, like_added, qx, x_scale, numbers, scale = residuals
    qx, numbers = (from_bits(bits, sizes.precision) for bits in (qx, numbers))
    dtype = eight_bits(sizes.precision).gradients
    by_token, token_scale = round_rows(grads, dtype, scale)
    heads = like_x.shape[1]
    dx = gradient_of_tokens(by_token, token_scale, numbers, sizes, heads, dtype=like_x.dtype)
    by_channel = [round_columns(grad, dtype, x_scale) for grad in grads]
    dw = tuple(
        gradient_of_weight(qx, *rounded, sizes, dtype=like_weight.dtype) for rounded in by_channel
    )
    return dx, NO_GRADIENT, gradient_of(dw), None if like_added is None else grads[0]


rounded_product.defvjp(_with_residuals, _gradients)


def like(added: Array | None) -> Array | None:
    """Return an empty array for an array, and None for None: the residual that tells whether one
    was added.
    """
    return None if added is None else jnp.zeros(0, added.dtype)


def gradient_of(parts: tuple[Array, ...]) -> MatrixWeight:
    """Return the gradient of a weight, as `custom_vjp` takes it: numbers and scales have none."""
    no_gradients: Any = None, None
    return MatrixWeight(parts, *no_gradients)


def rounded_matrix(
    weight: Float[Array, "K S"], dtype: DTypeLike
) -> tuple[EightBits[Array, "K S"], Float[Array, "1 S"]]:
    """Return a weight rounded to a dtype, and the factors of its channels."""
    numbers, scale = round_columns(weight[None, None], dtype)
    return numbers[0], scale[0]


def sums_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of sums of products of 8 bits."""
    return jnp.dtype(jnp.int32 if dtype == jnp.int8 else jnp.float32)


class Tile(NamedTuple):
    """Sizes of a block of a product: rows and columns of the result."""

    rows: int
    columns: int


def round_rows(
    parts: Sequence[Float[Array, "B H T W"]],
    dtype: DTypeLike,
    factor: Float[Array, "1 S"] | None = None,
) -> RoundedTokens:
    """Return parts side by side, times a factor of each column, rounded, and a scale for each token
    over all of them.
    """
    B, H, T, W = parts[0].shape
    S = len(parts) * H * W
    block = largest_block(T, 512, ROWS, _BYTES * S)
    in_specs = [pl.BlockSpec((None, H, block, W), lambda b, i: (b, 0, i, 0)) for _ in parts]
    in_specs += [pl.BlockSpec((1, S), lambda b, i: (0, 0))] * (factor is not None)
    rounded = call_kernel(
        functools.partial(_round_rows, len(parts)),
        (B, T // block),
        [*parts, *([] if factor is None else [factor])],
        in_specs,
        [pl.BlockSpec((None, block, width), lambda b, i: (b, i, 0)) for width in (S, 1)],
        [jax.ShapeDtypeStruct((B, T, S), dtype), jax.ShapeDtypeStruct((B, T, 1), jnp.float32)],
        name="round_rows",
    )
    return RoundedTokens(*rounded)


def _round_rows(num_parts: int, *refs: Any) -> None:
    *parts, numbers, scale = refs
    parts, factor = parts[:num_parts], parts[num_parts:]
    H, block, W = parts[0].shape

    def round_strip(rows: Any) -> None:
        heads = [part[h, rows].astype(jnp.float32) for part in parts for h in range(H)]
        if factor:
            heads = [head * factor[0][:, i * W : (i + 1) * W] for i, head in enumerate(heads)]
        maxima = [jnp.max(jnp.abs(head), axis=1, keepdims=True) for head in heads]
        scales = functools.reduce(jnp.maximum, maxima) / largest_number(numbers.dtype)
        scale[rows] = scales
        for i, head in enumerate(heads):
            numbers[rows, i * W : (i + 1) * W] = narrow(head * inverse(scales), numbers.dtype)

    by_strips(block, ROWS, round_strip)


def norm_and_round(
    x: Float[Array, "B T D"], scale: Float[Array, " D"], epsilon: float, dtype: DTypeLike
) -> RoundedTokens:
    """Return `rms_norm(x, scale, epsilon)` rounded, in one pass over x."""
    B, T, D = x.shape
    block = largest_block(T, 512, ROWS, _BYTES * D)
    rounded = call_kernel(
        functools.partial(_norm_and_round, epsilon),
        (B, T // block),
        [x, scale[None]],
        [
            pl.BlockSpec((None, block, D), lambda b, i: (b, i, 0)),
            pl.BlockSpec((1, D), lambda b, i: (0, 0)),
        ],
        [pl.BlockSpec((None, block, width), lambda b, i: (b, i, 0)) for width in (D, 1)],
        [jax.ShapeDtypeStruct((B, T, D), dtype), jax.ShapeDtypeStruct((B, T, 1), jnp.float32)],
        name="norm_and_round",
    )
    return RoundedTokens(*rounded)


def _norm_and_round(epsilon: float, x: Any, factor: Any, numbers: Any, scale: Any) -> None:
    def round_strip(rows: Any) -> None:
        wide = x[rows].astype(jnp.float32)
        inverse_norm = rsqrt_of_mean_square(wide, epsilon)
        # rounded to the dtype of x like the norm outside of the kernel
        normed = (wide * inverse_norm).astype(x.dtype).astype(jnp.float32) * factor[...].astype(
            jnp.float32
        )
        normed = normed.astype(jnp.result_type(x.dtype, factor.dtype)).astype(jnp.float32)
        scale[rows] = jnp.max(jnp.abs(normed), axis=1, keepdims=True) / largest_number(
            numbers.dtype
        )
        numbers[rows] = narrow(normed * inverse(scale[rows]), numbers.dtype)

    by_strips(x.shape[0], ROWS, round_strip)


def round_columns(
    x: Float[Array, "B H T W"], dtype: DTypeLike, factor: Float[Array, "B T 1"] | None = None
) -> tuple[EightBits[Array, "B T HW"], Float[Array, "B 1 HW"]]:
    """Return heads side by side, times a factor of each position, rounded, and a scale for each row
    and column over T.
    """
    B, H, T, W = x.shape
    block = largest_block(W, 512, LANES, _BYTES * T)
    in_specs = [pl.BlockSpec((None, None, T, block), lambda b, h, j: (b, h, 0, j))]
    in_specs += [pl.BlockSpec((None, T, 1), lambda b, h, j: (b, 0, 0))] * (factor is not None)
    return call_kernel(
        _round_columns,
        (B, H, W // block),
        [x, *([] if factor is None else [factor])],
        in_specs,
        [
            pl.BlockSpec((None, rows, block), lambda b, h, j: (b, 0, h * (W // block) + j))
            for rows in (T, 1)
        ],
        [
            jax.ShapeDtypeStruct((B, T, H * W), dtype),
            jax.ShapeDtypeStruct((B, 1, H * W), jnp.float32),
        ],
        name="round_columns",
    )


def _round_columns(x_ref: Any, *refs: Any) -> None:
    *factor, numbers, scale = refs

    def round_strip(columns: Any) -> None:
        x = x_ref[:, columns].astype(jnp.float32)
        x = x * factor[0][...] if factor else x
        scales = jnp.max(jnp.abs(x), axis=0, keepdims=True) / largest_number(numbers.dtype)
        scale[:, columns] = scales
        numbers[:, columns] = narrow(x * inverse(scales), numbers.dtype)

    by_strips(x_ref.shape[1], LANES, round_strip)


class _ResultBlocks(NamedTuple):
    """The result of a product, "B H T W": its array and its blocks.

    Attributes:
      shape: the array.
      block: the shape of a block. Rows are positions. Columns are components of one head, or of
        several whole heads.
      columns: the columns of a block.
    """

    shape: tuple[int, ...]
    block: tuple[int | None, ...]
    columns: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, columns: int, tile: Tile) -> "_ResultBlocks":
        """Return the result with blocks of about a tile, and of whole heads."""
        width = columns // heads
        if heads == 1:
            return cls((batch, 1, length, width), (None, 1, *tile), tile.columns)
        count = tile.columns // width if tile.columns % width == 0 else 1
        return cls((batch, heads, length, width), (None, count, tile.rows, width), count * width)

    def place(self, b: Any, i: Any, j: Any) -> tuple[Any, ...]:
        """Return the indices of a block: row of the batch, rows, columns."""
        return (b, j, i, 0) if self.shape[1] > 1 else (b, 0, i, j)


def _write(out: Any, columns: Any, value: Array) -> None:
    """Write columns of a block; they lie in one head, or are whole heads."""
    width = out.shape[2]
    start, size = columns.start, columns.size
    if size <= width:
        if out.shape[0] == 1:
            out[0, :, columns] = value
        else:
            first = pl.multiple_of(lax.rem(start, width), size)
            out[lax.div(start, width), :, pl.ds(first, size)] = value
        return
    for i in range(size // width):
        out[lax.div(start, width) + i] = value[:, i * width : (i + 1) * width]


def forward(
    x: EightBits[Array, "B T K"],
    x_scale: Float[Array, "B T 1"],
    weight: EightBits[Array, "R S"],
    weight_scale: Float[Array, "1 CN"],
    sizes: Sizes,
    part: int,
    added: Float[Array, "B 1 T W"] | None = None,
    *,
    dtype: DTypeLike,
) -> Float[Array, "B H T W"]:
    """Return the product of activations and a part of a weight over K, with their scales, plus
    `added`.
    """
    (B, T, K), N = x.shape, weight_scale.shape[1] // sizes.parts
    tile = tile_of(T, N, K)
    result = _ResultBlocks.of(B, sizes.heads, T, N, tile)
    columns, blocks = result.columns, N // result.columns
    if sizes.by_channel:
        weight_spec = pl.BlockSpec((columns, K), lambda b, i, j: (j, part))
    else:
        weight_spec = pl.BlockSpec((K, columns), lambda b, i, j: (0, part * blocks + j))
    return call_kernel(
        functools.partial(_forward, int(sizes.by_channel)),
        (B, T // tile.rows, blocks),
        [x, x_scale, weight, weight_scale, *([] if added is None else [added])],
        [
            pl.BlockSpec((None, tile.rows, K), lambda b, i, j: (b, i, 0)),
            pl.BlockSpec((None, tile.rows, 1), lambda b, i, j: (b, i, 0)),
            weight_spec,
            pl.BlockSpec((1, columns), lambda b, i, j: (0, part * blocks + j)),
        ]
        + [pl.BlockSpec(result.block, result.place)] * (added is not None),
        [pl.BlockSpec(result.block, result.place)],
        [jax.ShapeDtypeStruct(result.shape, dtype)],
        name=f"{sizes.precision}_forward",
        flops=2 * B * T * K * N,
    )[0]


def _forward(summed: int, x: Any, x_scale: Any, weight: Any, weight_scale: Any, *refs: Any) -> None:
    *added, out = refs

    def multiply_strip(columns: Any) -> None:
        strip = weight[columns] if summed else weight[:, columns]
        sums = product(x[...], strip, 1, summed, sums_dtype(strip.dtype)).astype(jnp.float32)
        y = (sums * x_scale[...] * weight_scale[:, columns]).astype(out.dtype)
        if added:  # rounded to the dtype of the result before and after, like outside of the kernel
            y = (y.astype(jnp.float32) + added[0][0, :, columns].astype(jnp.float32)).astype(
                out.dtype
            )
        _write(out, columns, y)

    size = weight_scale.shape[1]
    by_strips(size, math.gcd(size, STRIP), multiply_strip)


def gradient_of_tokens(
    grad: EightBits[Array, "B T CN"],
    grad_scale: Float[Array, "B T 1"],
    weight: EightBits[Array, "R S"],
    sizes: Sizes,
    heads: int,
    *,
    dtype: DTypeLike,
) -> Float[Array, "B H T W"]:
    """Return the product of gradients and a weight over C and N.

    The gradients contain the scales of the weight.
    """
    (B, T, S), C = grad.shape, sizes.parts
    N, K = S // C, weight.size // S
    tile = tile_of(T, K, N)
    result = _ResultBlocks.of(B, heads, T, K, tile)
    columns, blocks = result.columns, K // result.columns
    if sizes.by_channel:
        weight_spec = pl.BlockSpec((N, columns), lambda b, i, j, c: (0, c * blocks + j))
    else:
        weight_spec = pl.BlockSpec((columns, N), lambda b, i, j, c: (j, c))
    return call_kernel(
        functools.partial(_gradient_of_tokens, int(not sizes.by_channel)),
        (B, T // tile.rows, blocks, C),
        [grad, grad_scale, weight],
        [
            pl.BlockSpec((None, tile.rows, N), lambda b, i, j, c: (b, i, c)),
            pl.BlockSpec((None, tile.rows, 1), lambda b, i, j, c: (b, i, 0)),
            weight_spec,
        ],
        [pl.BlockSpec(result.block, lambda b, i, j, c: result.place(b, i, j))],
        [jax.ShapeDtypeStruct(result.shape, dtype)],
        name=f"{sizes.precision}_gradient_of_tokens",
        flops=2 * B * T * S * K,
        scratch_shapes=[pltpu.VMEM((tile.rows, columns), sums_dtype(weight.dtype))],
        sequential=1,
    )[0]


def _gradient_of_tokens(
    summed: int, grad: Any, grad_scale: Any, weight: Any, out: Any, sums: Any
) -> None:
    part, last, size = pl.program_id(3), pl.num_programs(3) - 1, sums.shape[1]

    def multiply_strip(columns: Any) -> None:
        factor = weight[columns] if summed else weight[:, columns]
        x = product(grad[...], factor, 1, summed, sums_dtype(factor.dtype))
        total = x + jnp.where(part == 0, 0, sums[:, columns])

        @pl.when(part < last)
        def _keep() -> None:
            sums[:, columns] = total

        @pl.when(part == last)
        def _write_strip() -> None:
            _write(out, columns, (total.astype(jnp.float32) * grad_scale[...]).astype(out.dtype))

    by_strips(size, math.gcd(size, STRIP), multiply_strip)


def gradient_of_weight(
    x: EightBits[Array, "B T K"],
    grad: EightBits[Array, "B T N"],
    grad_scale: Float[Array, "B 1 N"],
    sizes: Sizes,
    *,
    dtype: DTypeLike,
) -> Float[Array, "R S/C"]:
    """Return the product over tokens as a part of the weight.

    A row is summed in 32 bits, rows in float32.

    The gradients contain the scales of x.
    """
    (B, T, K), N = x.shape, grad.shape[2]
    by_channel, (rows, columns) = sizes.by_channel, (N, K) if sizes.by_channel else (K, N)
    # whole rows of x need no sums in VMEM
    block, piece = (1024, 8192) if vmem() >= 96 * 2**20 else (512, 4096)
    tile, piece = Tile(math.gcd(rows, block), math.gcd(columns, 2048)), math.gcd(T, piece)
    row_spec = pl.BlockSpec((None, piece, tile.rows), lambda i, j, b, t: (b, t, i))
    column_spec = pl.BlockSpec((None, piece, tile.columns), lambda i, j, b, t: (b, t, j))
    if by_channel:
        factors, scale = [grad, x], jnp.swapaxes(grad_scale, 1, 2)
        scale_spec = pl.BlockSpec((None, tile.rows, 1), lambda i, j, b, t: (b, i, 0))
    else:
        factors, scale = [x, grad], grad_scale
        scale_spec = pl.BlockSpec((None, 1, tile.columns), lambda i, j, b, t: (b, 0, j))
    return call_kernel(
        _gradient_of_weight,
        (rows // tile.rows, columns // tile.columns, B, T // piece),
        [*factors, scale],
        [row_spec, column_spec, scale_spec],
        [pl.BlockSpec(tuple(tile), lambda i, j, b, t: (i, j))],
        [jax.ShapeDtypeStruct((rows, columns), dtype)],
        name=f"{sizes.precision}_gradient_of_weight",
        flops=2 * B * T * K * N,
        scratch_shapes=[
            pltpu.VMEM(tuple(tile), sums_dtype(x.dtype)),
            pltpu.VMEM(tuple(tile), jnp.float32),
        ],
        sequential=2,
    )[0]


def _gradient_of_weight(
    row_factor: Any, column_factor: Any, scale: Any, out: Any, row_sums: Any, sums: Any
) -> None:
    row, piece = pl.program_id(2), pl.program_id(3)
    last_row, last_piece = pl.num_programs(2) - 1, pl.num_programs(3) - 1

    # not of columns: each would transpose the first factor again
    def multiply_strip(rows: Any) -> None:
        total = product(row_factor[:, rows], column_factor[...], 0, 0, row_sums.dtype)
        total += jnp.where(piece == 0, 0, row_sums[rows])

        @pl.when(piece < last_piece)
        def _keep() -> None:
            row_sums[rows] = total

        @pl.when(piece == last_piece)
        def _add_row() -> None:
            scaled = total.astype(jnp.float32) * (
                scale[rows] if scale.shape[1] == 1 else scale[...]
            )
            scaled += jnp.where(row == 0, 0, sums[rows])

            @pl.when(row < last_row)
            def _keep_row() -> None:
                sums[rows] = scaled

            @pl.when(row == last_row)
            def _write_strip() -> None:
                out[rows] = scaled.astype(out.dtype)

    by_strips(out.shape[0], math.gcd(out.shape[0], STRIP), multiply_strip)


def tile_of(rows: int, columns: int, summed: int, largest: int = 1024) -> Tile:
    """Return the tile of a result that fits and reads its operands least often.

    `largest` is the longest side.

    Two buffers of the operands, and sums, take three quarters of VMEM.
    """
    sizes = [size for size in (2048, 1024, 512, 256, LANES) if size <= largest]
    tiles = [Tile(math.gcd(rows, a), math.gcd(columns, b)) for a in sizes for b in sizes]
    fits = [
        tile for tile in tiles if 2 * summed * sum(tile) + 12 * math.prod(tile) <= vmem() * 3 // 4
    ]
    return max(fits or tiles[-1:], key=lambda tile: math.prod(tile) / sum(tile))


def takes(parts: int, length: int, summed: int, channels: int) -> bool:
    """Return whether the kernels take a product: sizes are multiples of 128, and whole rows and
    columns fit into VMEM.
    """
    row, column = parts * max(summed, channels), max(length, summed)
    is_whole = not (length % LANES or summed % LANES or channels % LANES)
    return is_whole and _BYTES * max(ROWS * row, LANES * column) <= vmem()
