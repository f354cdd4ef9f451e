"""Pallas kernels for TPU that round matrices to int8 and multiply them, each in one pass over its operands.

XLA reads an array twice to round it, for its maxima and for its numbers, and writes sums in int32. Here a block of whole rows
or columns is rounded while it is in VMEM, and sums are scaled before they leave it. No operand is transposed in HBM. On other
devices the kernels run interpreted, for tests.

Suffixes: C parts of the weight, B rows, T positions, M = B T tokens, K summed dims of the forward product, N channels of a part.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from shardopt.mesh import device_kind_or_default
from shardopt.nn._kernel_tiles import LANES, product, vmem

LARGEST, STRIP = 127, 256
_ROWS, _BYTES = 32, 22
"""Rows of a register of int8, and the bytes of VMEM for a number that is rounded: two buffers of it, and float32."""


@jax.custom_vjp
def int8_product(x: Float[Array, "B T K"], weight: Float[Array, "C K N"]) -> Float[Array, "C B T N"]:
    """Return the product over K of rounded activations and a rounded weight; gradients are rounded, too.

    A token has a scale, and so has a channel of the weight. The scales of a gradient are of a token for the gradient of x, and
    of a row and a channel for the gradient of the weight. T, K and N are multiples of 128.
    """
    return _with_residuals(x, weight)[0]


def _with_residuals(x: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    (B, T, K), (C, _, N) = x.shape, weight.shape
    (qx,), x_scale = round_rows(x.reshape(1, B * T, K))
    qw, weight_scale = (array[:, 0] for array in round_columns(weight[:, None]))
    y = forward(qx, x_scale, qw, weight_scale, dtype=jnp.result_type(x.dtype, weight.dtype))
    residuals = jnp.zeros(0, x.dtype), jnp.zeros(0, weight.dtype), qx, x_scale, qw, weight_scale
    return y.reshape(C, B, T, N), residuals


def _gradients(residuals: tuple[Array, ...], grad: Array) -> tuple[Array, Array]:
    like_x, like_weight, qx, x_scale, qw, weight_scale = residuals
    (C, B, T, N), K = grad.shape, qx.shape[1]
    by_token, token_scale = round_rows(grad.reshape(C, B * T, N), weight_scale)
    dx = gradient_of_tokens(by_token, token_scale, qw, dtype=like_x.dtype)
    by_channel, channel_scale = round_columns(grad, x_scale.reshape(B, T, 1))
    dw = gradient_of_weight(qx.reshape(B, T, K), by_channel, channel_scale, dtype=like_weight.dtype)
    return dx.reshape(B, T, K), dw


int8_product.defvjp(_with_residuals, _gradients)


class Tile(NamedTuple):
    """Sizes of a block of a product: rows and columns of the result."""

    rows: int
    columns: int


def round_rows(
    x: Float[Array, "C M K"], factor: Float[Array, "C 1 K"] | None = None
) -> tuple[Int8[Array, "C M K"], Float[Array, "M 1"]]:
    """Return x times a factor of each column, rounded, and a scale for each row over C and K."""
    from jax.experimental import pallas as pl  # imported late, since the import takes long

    C, M, K = x.shape
    block = largest_block(M, 512, _ROWS, _BYTES * C * K)
    spec = pl.BlockSpec((C, block, K), lambda i: (0, i, 0))
    in_specs = [spec] + [pl.BlockSpec((C, 1, K), lambda i: (0, 0, 0))] * (factor is not None)
    return _call(
        _round_rows,
        (M // block,),
        [x] if factor is None else [x, factor],
        in_specs,
        [spec, pl.BlockSpec((block, 1), lambda i: (i, 0))],
        [jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((M, 1), jnp.float32)],
        name="round_rows",
    )


def _round_rows(x_ref: Any, *refs: Any) -> None:
    *factor, numbers, scale = refs

    def round_strip(rows: Any) -> None:
        parts = [x_ref[c, rows].astype(jnp.float32) for c in range(x_ref.shape[0])]
        if factor:
            parts = [part * factor[0][c] for c, part in enumerate(parts)]
        maxima = [jnp.max(jnp.abs(part), axis=1, keepdims=True) for part in parts]
        scales = functools.reduce(jnp.maximum, maxima) / LARGEST
        scale[rows] = scales
        for c, part in enumerate(parts):
            numbers[c, rows] = _divided(part, scales)

    _by_strips(x_ref.shape[1], _ROWS, round_strip)


def round_columns(
    x: Float[Array, "C B T N"], factor: Float[Array, "B T 1"] | None = None
) -> tuple[Int8[Array, "C B T N"], Float[Array, "C B 1 N"]]:
    """Return x times a factor of each position, rounded, and a scale for each row and channel over T."""
    from jax.experimental import pallas as pl

    C, B, T, N = x.shape
    block = largest_block(N, 512, LANES, _BYTES * T)
    spec = pl.BlockSpec((None, None, T, block), lambda c, b, j: (c, b, 0, j))
    return _call(
        _round_columns,
        (C, B, N // block),
        [x] if factor is None else [x, factor],
        [spec] + [pl.BlockSpec((None, T, 1), lambda c, b, j: (b, 0, 0))] * (factor is not None),
        [spec, pl.BlockSpec((None, None, 1, block), lambda c, b, j: (c, b, 0, j))],
        [jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((C, B, 1, N), jnp.float32)],
        name="round_columns",
    )


def _round_columns(x_ref: Any, *refs: Any) -> None:
    *factor, numbers, scale = refs

    def round_strip(columns: Any) -> None:
        x = x_ref[:, columns].astype(jnp.float32)
        x = x * factor[0][...] if factor else x
        scales = jnp.max(jnp.abs(x), axis=0, keepdims=True) / LARGEST
        scale[:, columns] = scales
        numbers[:, columns] = _divided(x, scales)

    _by_strips(x_ref.shape[1], LANES, round_strip)


def _divided(x: Array, scale: Array) -> Array:
    return jnp.round(x * inverse(scale)).astype(jnp.int8)


def inverse(scale: Array) -> Array:
    """Return 1 / scale, or 0 for a scale of 0: one division for many numbers."""
    return jnp.where(scale == 0, 0, 1 / scale)


def _by_strips(size: int, strip: int, run: Any) -> None:
    """Run a function on each strip of a block: a loop has less code, which compiles faster."""
    from jax.experimental import pallas as pl

    lax.fori_loop(0, size // strip, lambda i, _: run(pl.ds(pl.multiple_of(i * strip, strip), strip)), None)


def forward(
    x: Int8[Array, "M K"],
    x_scale: Float[Array, "M 1"],
    weight: Int8[Array, "C K N"],
    weight_scale: Float[Array, "C 1 N"],
    *,
    dtype: DTypeLike,
) -> Float[Array, "C M N"]:
    """Return the product of activations and a weight over K, with their scales."""
    from jax.experimental import pallas as pl

    (M, K), (C, _, N) = x.shape, weight.shape
    tile = tile_of(M, N, K)
    return _call(
        _forward,
        (M // tile.rows, C, N // tile.columns),
        [x, x_scale, weight, weight_scale],
        [
            pl.BlockSpec((tile.rows, K), lambda i, c, j: (i, 0)),
            pl.BlockSpec((tile.rows, 1), lambda i, c, j: (i, 0)),
            pl.BlockSpec((None, K, tile.columns), lambda i, c, j: (c, 0, j)),
            pl.BlockSpec((None, 1, tile.columns), lambda i, c, j: (c, 0, j)),
        ],
        [pl.BlockSpec((None, *tile), lambda i, c, j: (c, i, j))],
        [jax.ShapeDtypeStruct((C, M, N), dtype)],
        name="int8_forward",
        flops=2 * C * M * K * N,
    )[0]


def _forward(x: Any, x_scale: Any, weight: Any, weight_scale: Any, out: Any) -> None:
    def multiply_strip(columns: Any) -> None:
        sums = product(x[...], weight[:, columns], 1, 0, jnp.int32).astype(jnp.float32)
        out[:, columns] = (sums * x_scale[...] * weight_scale[:, columns]).astype(out.dtype)

    _by_strips(weight.shape[1], math.gcd(weight.shape[1], STRIP), multiply_strip)


def gradient_of_tokens(
    grad: Int8[Array, "C M N"], grad_scale: Float[Array, "M 1"], weight: Int8[Array, "C K N"], *, dtype: DTypeLike
) -> Float[Array, "M K"]:
    """Return the product of gradients and a weight over C and N; the gradients contain the scales of the weight."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (C, M, N), K = grad.shape, weight.shape[1]
    tile = tile_of(M, K, N, largest=512)
    return _call(
        _gradient_of_tokens,
        (M // tile.rows, K // tile.columns, C),
        [grad, grad_scale, weight],
        [
            pl.BlockSpec((None, tile.rows, N), lambda i, j, c: (c, i, 0)),
            pl.BlockSpec((tile.rows, 1), lambda i, j, c: (i, 0)),
            pl.BlockSpec((None, tile.columns, N), lambda i, j, c: (c, j, 0)),
        ],
        [pl.BlockSpec(tuple(tile), lambda i, j, c: (i, j))],
        [jax.ShapeDtypeStruct((M, K), dtype)],
        name="int8_gradient_of_tokens",
        flops=2 * C * M * K * N,
        scratch_shapes=[pltpu.VMEM(tuple(tile), jnp.int32)],
        sequential=1,
    )[0]


def _gradient_of_tokens(grad: Any, grad_scale: Any, weight: Any, out: Any, sums: Any) -> None:
    from jax.experimental import pallas as pl

    part = pl.program_id(2)

    def multiply_strip(columns: Any) -> None:
        _accumulate(sums.at[:, columns], product(grad[...], weight[columns], 1, 1, jnp.int32), part == 0)

    _by_strips(weight.shape[0], math.gcd(weight.shape[0], STRIP), multiply_strip)

    @pl.when(part == pl.num_programs(2) - 1)
    def _write() -> None:
        out[...] = (sums[...].astype(jnp.float32) * grad_scale[...]).astype(out.dtype)


def gradient_of_weight(
    x: Int8[Array, "B T K"], grad: Int8[Array, "C B T N"], grad_scale: Float[Array, "C B 1 N"], *, dtype: DTypeLike
) -> Float[Array, "C K N"]:
    """Return the product over tokens; a row is summed in int32, rows in float32. The gradients contain the scales of x."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (B, T, K), (C, _, _, N) = x.shape, grad.shape
    tile, piece = Tile(math.gcd(K, 512), math.gcd(N, 2048)), math.gcd(T, 4096)
    return _call(
        _gradient_of_weight,
        (C, K // tile.rows, N // tile.columns, B, T // piece),
        [x, grad, grad_scale],
        [
            pl.BlockSpec((None, piece, tile.rows), lambda c, i, j, b, t: (b, t, i)),
            pl.BlockSpec((None, None, piece, tile.columns), lambda c, i, j, b, t: (c, b, t, j)),
            pl.BlockSpec((None, None, 1, tile.columns), lambda c, i, j, b, t: (c, b, 0, j)),
        ],
        [pl.BlockSpec((None, *tile), lambda c, i, j, b, t: (c, i, j))],
        [jax.ShapeDtypeStruct((C, K, N), dtype)],
        name="int8_gradient_of_weight",
        flops=2 * C * B * T * K * N,
        scratch_shapes=[pltpu.VMEM(tuple(tile), jnp.int32), pltpu.VMEM(tuple(tile), jnp.float32)],
        sequential=2,
    )[0]


def _gradient_of_weight(x: Any, grad: Any, grad_scale: Any, out: Any, row_sums: Any, sums: Any) -> None:
    from jax.experimental import pallas as pl

    row, piece = pl.program_id(3), pl.program_id(4)
    # not by strips: each would transpose x again
    _accumulate(row_sums, product(x[...], grad[...], 0, 0, jnp.int32), piece == 0)

    @pl.when(piece == pl.num_programs(4) - 1)
    def _add_row() -> None:
        scaled = row_sums[...].astype(jnp.float32) * grad_scale[...]
        _accumulate(sums, scaled, row == 0)

        @pl.when(row == pl.num_programs(3) - 1)
        def _write() -> None:
            out[...] = sums[...].astype(out.dtype)


def _accumulate(sums: Any, x: Array, first: Array) -> None:
    from jax.experimental import pallas as pl

    @pl.when(first)
    def _begin() -> None:
        sums[...] = x

    @pl.when(jnp.logical_not(first))
    def _add() -> None:
        sums[...] += x


def tile_of(rows: int, columns: int, summed: int, largest: int = 1024) -> Tile:
    """Return the largest tile of a result that fits: two buffers of its operands, and its sums, take two thirds of VMEM."""
    for block in (size for size in (1024, 512, 256, LANES) if size <= largest):
        tile = Tile(math.gcd(rows, largest), math.gcd(columns, block))
        if 2 * summed * sum(tile) + 12 * tile.rows * tile.columns <= vmem() * 2 // 3:
            return tile
    return Tile(math.gcd(rows, LANES), math.gcd(columns, LANES))


def largest_block(size: int, largest: int, smallest: int, bytes_per_index: int) -> int:
    """Return the largest block of a dim between `smallest` and `largest`, which are powers of 2, that fits into VMEM."""
    block = math.gcd(size, largest)
    while block > smallest and block * bytes_per_index > vmem():
        block //= 2
    return block


def takes(parts: int, length: int, summed: int, channels: int) -> bool:
    """Return whether the kernels take a product: sizes are multiples of 128, and whole rows and columns fit into VMEM."""
    row, column = parts * max(summed, channels), max(length, summed)
    is_whole = not (length % LANES or summed % LANES or channels % LANES)
    return is_whole and _BYTES * max(_ROWS * row, LANES * column) <= vmem()


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: list[Array],
    in_specs: list[Any],
    out_specs: list[Any],
    out_shape: list[Any],
    *,
    name: str,
    flops: int = 0,
    scratch_shapes: Any = (),
    sequential: int = 0,
) -> Any:
    """Run a kernel; the last `sequential` dims of its grid run in order, and the others on any core."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    semantics: Any = ("parallel",) * (len(grid) - sequential) + ("arbitrary",) * sequential
    bytes_accessed = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (*inputs, *out_shape))
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem()),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=bytes_accessed),
        name=name,
        interpret=not device_kind_or_default().startswith("TPU"),
    )
    # jax 0.10 keeps a kernel whose results nothing reads, and drops a jitted function
    return jax.jit(call)(*inputs)
