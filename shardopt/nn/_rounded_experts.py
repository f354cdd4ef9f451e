"""Pallas kernels for TPU that round rows sorted by expert to 8 bits, and multiply them by the weights of their experts.

The experts are the parts of one matrix, see `core._rounded_weight.Form`. A step of a kernel visits the rows of one expert in
one tile of rows. Rows of no expert are neither rounded nor multiplied.

Suffixes: M rows, E experts, K summed dims, N channels, V visits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.core._rounded_weight import Precision, eight_bits, inverse, largest_number, narrow
from shardopt.nn._kernel_tiles import LANES, ROWS, by_strips, call_kernel, largest_block, product, vmem
from shardopt.nn._rounded_product import STRIP, EightBits, MatrixWeight, gradient_of, like, sums_dtype

_BYTES = 24
"""The bytes of VMEM for a number that is rounded: two buffers of it and of its factor, and float32."""


class RoundedRows(NamedTuple):
    """Rows in 8 bits.

    Attributes:
      numbers: the rows; those of no expert are not defined.
      scale: the factors of the rows.
    """

    numbers: EightBits[Array, "M K"]
    scale: Float[Array, "M 1"]


class Visits(NamedTuple):
    """The steps of a kernel. Each has the rows of one expert in one tile; there may be none.

    Attributes:
      tile: the tile.
      expert: the expert.
      first: the first row.
      end: the row after the last one.
    """

    tile: Int[Array, " V"]
    expert: Int[Array, " V"]
    first: Int[Array, " V"]
    end: Int[Array, " V"]

    @classmethod
    def of(cls, sizes: Int[Array, " E"], num_rows: int, tile_rows: int, *, by_expert: bool) -> "Visits":
        """Return the visits in the order of experts, at least one of each, or in the order of tiles, at least one of each.

        Args:
          sizes: rows of each expert.
          num_rows: M, with the rows of no expert.
          tile_rows: rows of a tile.
          by_expert: whether they are in the order of experts.
        """
        E, num_tiles = sizes.shape[0], -(-num_rows // tile_rows)
        place = functools.partial(jnp.searchsorted, side="right", method="compare_all")
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        if by_expert:
            first, last = starts // tile_rows, (ends - 1) // tile_rows
        else:
            rows = jnp.arange(num_tiles) * tile_rows
            first, last = (place(ends, jnp.minimum(row, ends[-1] - 1)) for row in (rows, rows + tile_rows - 1))
        counts = jnp.maximum(last - first, 0) + 1
        totals, step = jnp.cumsum(counts), jnp.arange(num_tiles + E)
        outer = jnp.minimum(place(totals, step), counts.shape[0] - 1)
        inner = first[outer] + step - (totals - counts)[outer]
        inner = jnp.minimum(inner, (num_tiles if by_expert else E) - 1)
        expert, tile = (outer, inner) if by_expert else (inner, outer)
        begin = jnp.maximum(starts[expert], tile * tile_rows)
        end = jnp.minimum(ends[expert], (tile + 1) * tile_rows)
        end = jnp.where(step < totals[-1], end, 0)  # steps beyond the last visit have no rows
        return cls(*(x.astype(jnp.int32) for x in (tile, expert, begin, end)))


class Layout(NamedTuple):
    """The static part of a product.

    Attributes:
      by_channel: whether the rows of the matrix are channels, and else summed.
      precision: of rounded numbers.
    """

    by_channel: bool
    precision: Precision


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_expert_product(
    layout: Layout,
    x: Float[Array, "M K"],
    rows: RoundedRows,
    weight: MatrixWeight,
    sizes: Int[Array, " E"],
) -> Float[Array, "M N"]:
    """Return the product of each rounded row and its expert's part of a rounded weight; 0 for rows of no expert.

    The gradient of x is rounded, too, with a scale for each row. The gradient of the weight is not: a row and a channel of it
    would need a scale, and the rows of an expert come from many rows of the batch. K and N are multiples of 128.

    Args:
      layout: the form of the weight.
      x: rows sorted by expert. They have the gradient, and are read for that of the weight.
      rows: x, rounded by `round_by_expert`.
      weight: the rounded weight, whose zeros are one matrix.
      sizes: rows of each expert.
    """
    return _with_residuals(layout, x, rows, weight, sizes)[0]


def _with_residuals(layout: Layout, x: Array, rows: RoundedRows, weight: MatrixWeight, sizes: Array) -> Any:
    (zeros,), numbers, scale = weight
    y = multiply(rows, numbers, scale, sizes, summed_rows=not layout.by_channel, dtype=jnp.result_type(x, zeros))
    return y, (x, like(zeros), numbers, scale, sizes)


def _gradients(layout: Layout, residuals: Any, grad: Array) -> Any:
    x, like_weight, numbers, scale, sizes = residuals
    rows = round_by_expert(grad, sizes, eight_bits(layout.precision)[1], scale)
    dx = multiply(rows, numbers, None, sizes, summed_rows=layout.by_channel, dtype=x.dtype)
    factors = (grad, x) if layout.by_channel else (x, grad)
    dw = gradient_of_experts(*factors, sizes, dtype=like_weight.dtype)
    return dx, RoundedRows(None, None), gradient_of((dw,)), None  # pyright: ignore[reportArgumentType]


rounded_expert_product.defvjp(_with_residuals, _gradients)


def _rows_of_visit(tile: Any, first: Any, end: Any, start: Any, count: int, rows: int) -> Array:
    """Return [count, 1]: whether the rows from `start` of a tile of so many rows are those of a visit."""
    row = tile * rows + start + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    return (first <= row) & (row < end)


def round_by_expert(
    x: Float[Array, "M K"], sizes: Int[Array, " E"], dtype: DTypeLike, factor: Float[Array, "1 EK"] | None = None
) -> RoundedRows:
    """Return rows, times a factor of each expert's columns, rounded, and a scale for each row."""
    from jax.experimental import pallas as pl  # imported late, since the import takes long

    M, K = x.shape
    block = largest_block(512, 512, ROWS, _BYTES * K)
    visits = Visits.of(sizes, M, block, by_expert=False)
    by_row = lambda width: pl.BlockSpec((block, width), lambda v, tile, *_: (tile[v], 0))  # noqa: E731
    rounded = call_kernel(
        _round_by_expert,
        visits.tile.shape,
        [x, *([] if factor is None else [factor])],
        [by_row(K)] + [pl.BlockSpec((1, K), lambda v, _, expert, *__: (0, expert[v]))] * (factor is not None),
        [by_row(K), by_row(1)],
        [jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((M, 1), jnp.float32)],
        name="round_by_expert",
        sequential=1,
        scalars=visits,
    )
    return RoundedRows(*rounded)


def _round_by_expert(tile: Any, expert: Any, first: Any, end: Any, x: Any, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    *factor, numbers, scale = refs
    visit = pl.program_id(0)
    block, start = x.shape[0], tile[visit] * x.shape[0]

    def round_strip(i: Any, *, keeps: bool) -> None:
        rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        wide = x[rows].astype(jnp.float32)
        wide = wide * factor[0][...] if factor else wide
        new_scale = jnp.max(jnp.abs(wide), axis=1, keepdims=True) / largest_number(numbers.dtype)
        rounded = wide * inverse(new_scale)
        if keeps:
            mine = _rows_of_visit(tile[visit], first[visit], end[visit], i * ROWS, ROWS, block)
            rounded = jnp.where(mine, rounded, numbers[rows].astype(jnp.float32))
            new_scale = jnp.where(mine, new_scale, scale[rows])
        numbers[rows] = narrow(rounded, numbers.dtype)
        scale[rows] = new_scale

    # The first strip may begin with rows of the visit before. The last one may end with rows of the next, which comes later.
    begin, shared = (first[visit] - start) // ROWS, lax.rem(first[visit], ROWS) > 0

    @pl.when(shared & (first[visit] < end[visit]))
    def _first_strip() -> None:
        round_strip(begin, keeps=True)

    end_strip = (end[visit] - start + ROWS - 1) // ROWS
    lax.fori_loop(begin + shared.astype(jnp.int32), end_strip, lambda i, _: round_strip(i, keeps=False), None)


def takes(size: int) -> bool:
    """Return whether the kernels take a summed dim, or channels, of a size: whole rows fit into VMEM."""
    return size % LANES == 0 and _BYTES * ROWS * size <= vmem()


def multiply(
    rows: RoundedRows,
    matrix: EightBits[Array, "R S"],
    channel_scale: Float[Array, "1 EN"] | None,
    sizes: Int[Array, " E"],
    *,
    summed_rows: bool,
    dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """Return the products of rows and their experts' parts of a matrix, with their scales; 0 for rows of no expert.

    Args:
      rows: the rounded rows.
      matrix: [K, E N] with `summed_rows`, and else [N, E K].
      channel_scale: the factors of N channels of each expert, or None.
      sizes: rows of each expert.
      summed_rows: whether rows of the matrix are summed.
      dtype: of the result.
    """
    from jax.experimental import pallas as pl

    (M, K), E = rows.numbers.shape, sizes.shape[0]
    N = matrix.shape[1] // E if summed_rows else matrix.shape[0]
    tile_rows, columns = _tile(N, K)
    visits, blocks = Visits.of(sizes, M, tile_rows, by_expert=False), N // columns
    by_row = lambda width: pl.BlockSpec((tile_rows, width), lambda j, v, tile, *_: (tile[v], 0))  # noqa: E731
    by_column = lambda rows: pl.BlockSpec((rows, columns), lambda j, v, _, expert, *__: (0, expert[v] * blocks + j))  # noqa: E731
    of_matrix = by_column(K) if summed_rows else pl.BlockSpec((columns, K), lambda j, v, _, expert, *__: (j, expert[v]))
    return call_kernel(
        functools.partial(_multiply, int(not summed_rows)),
        (blocks, visits.tile.shape[0]),
        [*rows, matrix, *([] if channel_scale is None else [channel_scale])],
        [by_row(K), by_row(1), of_matrix] + [by_column(1)] * (channel_scale is not None),
        [pl.BlockSpec((tile_rows, columns), lambda j, v, tile, *_: (tile[v], j))],
        [jax.ShapeDtypeStruct((M, N), dtype)],
        name=f"{'int8' if matrix.dtype == jnp.int8 else 'fp8'}_expert_product",
        flops=2 * M * K * N,
        sequential=1,
        scalars=visits,
    )[0]


def _multiply(
    summed: int, tile: Any, _: Any, first: Any, end: Any, x: Any, x_scale: Any, matrix: Any, *refs: Any
) -> None:
    from jax.experimental import pallas as pl

    *channel_scale, out = refs
    visit = pl.program_id(1)
    rows = out.shape[0]

    @pl.when((visit == 0) | (tile[visit] != tile[jnp.maximum(visit - 1, 0)]))
    def _begin_tile() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(first[visit] < end[visit])
    def _add_rows() -> None:
        mine = _rows_of_visit(tile[visit], first[visit], end[visit], 0, rows, rows)

        def multiply_strip(columns: Any) -> None:
            strip = matrix[columns] if summed else matrix[:, columns]
            y = product(x[...], strip, 1, summed, sums_dtype(strip.dtype)).astype(jnp.float32) * x_scale[...]
            y = y * channel_scale[0][:, columns] if channel_scale else y
            out[:, columns] = jnp.where(mine, y.astype(out.dtype), out[:, columns])

        by_strips(out.shape[1], min(STRIP, out.shape[1]), multiply_strip)


def _tile(columns: int, summed: int) -> tuple[int, int]:
    """Return rows and columns of a tile whose operands, twice, and sums fit into three quarters of VMEM."""
    sizes = [size for size in (2048, 1024, 512, 256, LANES) if columns % size == 0]
    tiles = [(rows, size) for rows in (256, LANES) for size in sizes]
    fits = [tile for tile in tiles if 2 * summed * sum(tile) + 12 * tile[0] * tile[1] <= vmem() * 3 // 4]
    return max(fits or tiles[-1:], key=lambda tile: tile[0] * tile[1] / sum(tile))


def gradient_of_experts(
    a: Float[Array, "M R"], b: Float[Array, "M C"], sizes: Int[Array, " E"], *, dtype: DTypeLike
) -> Float[Array, "R EC"]:
    """Return the sum over the rows of each expert of outer(a, b), for all experts side by side."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (M, R), C, E = a.shape, b.shape[1], sizes.shape[0]
    side, tile_rows = 2048 if vmem() >= 96 * 2**20 else 1024, 512
    height, width = (max(size for size in (LANES, 256, 512, 1024, side) if x % size == 0) for x in (R, C))
    visits, blocks = Visits.of(sizes, M, tile_rows, by_expert=True), C // width
    return call_kernel(
        _gradient_of_experts,
        (R // height, blocks, visits.tile.shape[0]),
        [a, b],
        [
            pl.BlockSpec((tile_rows, height), lambda i, j, v, tile, *_: (tile[v], i)),
            pl.BlockSpec((tile_rows, width), lambda i, j, v, tile, *_: (tile[v], j)),
        ],
        [pl.BlockSpec((height, width), lambda i, j, v, _, expert, *__: (i, expert[v] * blocks + j))],
        [jax.ShapeDtypeStruct((R, E * C), dtype)],
        name="gradient_of_experts",
        flops=2 * M * R * C,
        scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
        sequential=1,
        scalars=visits,
    )[0]


def _gradient_of_experts(tile: Any, expert: Any, first: Any, end: Any, a: Any, b: Any, out: Any, sums: Any) -> None:
    from jax.experimental import pallas as pl

    visit, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when((visit == 0) | (expert[visit] != expert[jnp.maximum(visit - 1, 0)]))
    def _begin_expert() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(first[visit] < end[visit])
    def _add_rows() -> None:
        rows = a.shape[0]
        mine = _rows_of_visit(tile[visit], first[visit], end[visit], 0, rows, rows)
        columns = jnp.where(mine, b[...], 0)

        def multiply_strip(strip: Any) -> None:
            sums[strip] += product(jnp.where(mine, a[:, strip], 0), columns, 0, 0)

        by_strips(sums.shape[0], min(STRIP, sums.shape[0]), multiply_strip)

    @pl.when((visit == last) | (expert[visit] != expert[jnp.minimum(visit + 1, last)]))
    def _end_expert() -> None:
        out[...] = sums[...].astype(out.dtype)
