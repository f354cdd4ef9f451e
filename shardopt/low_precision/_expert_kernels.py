"""Pallas kernels for TPU that round rows sorted by expert to 8 bits, and multiply them by the
weights of their experts.

The experts are the parts of one matrix, see `low_precision._weight.Form`. A step of a kernel visits
the rows of one expert in one tile of rows. Rows of no expert are neither rounded nor multiplied.

Suffixes: M rows, E experts, K summed dims, N channels, V visits.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.core._rounding import Precision
from shardopt.kernels._devices import vmem
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
from shardopt.low_precision._product_kernels import (
    NO_GRADIENT,
    STRIP,
    EightBits,
    MatrixWeight,
    RoundedTokens,
    gradient_of,
    like,
    sums_dtype,
    tile_of,
)

_TILE_ROWS = 256
"""Rows of a tile of a product. Larger tiles would more often have rows of two experts, and be
multiplied twice.
"""
_BYTES = 24
"""The bytes of VMEM for a number that is rounded: two buffers of it and of its factor, and float32.
"""


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
    def of(
        cls, sizes: Int[Array, " E"], num_rows: int, tile_rows: int, *, by_expert: bool
    ) -> "Visits":
        """Return visits in the order of experts or of tiles, with at least one visit of each.

        Args:
          sizes: rows of each expert.
          num_rows: M, with the rows of no expert.
          tile_rows: rows of a tile.
          by_expert: whether visits are in the order of experts, or else of tiles.
        """
        E, num_tiles = sizes.shape[0], -(-num_rows // tile_rows)
        place = functools.partial(jnp.searchsorted, side="right", method="compare_all")
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        if by_expert:
            first, last = starts // tile_rows, (ends - 1) // tile_rows
        else:
            rows = jnp.arange(num_tiles) * tile_rows
            first, last = (
                place(ends, jnp.minimum(row, ends[-1] - 1)) for row in (rows, rows + tile_rows - 1)
            )
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


class ExpertForm(NamedTuple):
    """The static part of a product.

    Attributes:
      by_channel: whether the rows of the matrix are channels, and else summed.
      precision: of rounded numbers.
    """

    by_channel: bool
    precision: Precision


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_expert_product(
    layout: ExpertForm,
    x: Float[Array, "M K"],
    rows: RoundedTokens,
    weight: MatrixWeight,
    sizes: Int[Array, " E"],
) -> Float[Array, "M N"]:
    """Return the product of each rounded row and its expert's part of a rounded weight.

    0 for rows of no expert.

    The gradient of x is rounded, too, with a scale for each row. The gradient of the weight is not:
    a row and a channel of it would need a scale, and the rows of an expert come from many rows of
    the batch. K and N are multiples of 128.

    Args:
      layout: the form of the weight.
      x: rows sorted by expert. They have the gradient, and the gradient of the weight reads them.
      rows: x, rounded by `round_by_expert`.
      weight: the rounded weight, whose zeros are one matrix.
      sizes: rows of each expert.
    """
    return _with_residuals(layout, x, rows, weight, sizes)[0]


@first_order
def _with_residuals(
    layout: ExpertForm, x: Array, rows: RoundedTokens, weight: MatrixWeight, sizes: Array
) -> Any:
    (zeros,), numbers, scale = weight
    dtype = jnp.result_type(x, zeros)
    y = multiply(
        rows,
        numbers,
        scale,
        sizes,
        layout.precision,
        summed_rows=not layout.by_channel,
        dtype=dtype,
    )
    return y, (x, like(zeros), as_bits(numbers), scale, sizes)


@first_order
def _gradients(layout: ExpertForm, residuals: Any, grad: Array) -> Any:
    x, like_weight, bits, scale, sizes = residuals
    numbers = from_bits(bits, layout.precision)
    rows = round_by_expert(grad, sizes, eight_bits(layout.precision).gradients, scale)
    dx = multiply(
        rows, numbers, None, sizes, layout.precision, summed_rows=layout.by_channel, dtype=x.dtype
    )
    factors = (grad, x) if layout.by_channel else (x, grad)
    dw = gradient_of_experts(*factors, sizes, dtype=like_weight.dtype)
    return dx, NO_GRADIENT, gradient_of((dw,)), None


rounded_expert_product.defvjp(_with_residuals, _gradients)


def _begins(places: Any, visit: Any) -> Any:
    """Return whether a visit is the first of its tile, or of its expert: `places` has the tile or
    expert of each visit.
    """
    return (visit == 0) | (places[visit] != places[jnp.maximum(visit - 1, 0)])


def _rows_between(first: Any, end: Any, start: Any, count: int) -> Array:
    """Return [count, 1]: for each of the rows from `start` on, whether `first` <= row < `end`."""
    row = start + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    return (first <= row) & (row < end)


def round_by_expert(
    x: Float[Array, "M K"],
    sizes: Int[Array, " E"],
    dtype: DTypeLike,
    factor: Float[Array, "1 EK"] | None = None,
) -> RoundedTokens:
    """Return rows, times a factor of each expert's columns, rounded, and a scale for each row.

    Rows of no expert are not defined.
    """
    M, K = x.shape
    block = largest_block(512, 512, ROWS, _BYTES * K)
    visits = Visits.of(sizes, M, block, by_expert=False)

    def by_row(width):
        return pl.BlockSpec((block, width), lambda v, tile, *_: (tile[v], 0))

    rounded = call_kernel(
        _round_by_expert,
        visits.tile.shape,
        [x, *([] if factor is None else [factor])],
        [by_row(K)]
        + [pl.BlockSpec((1, K), lambda v, _, expert, *__: (0, expert[v]))] * (factor is not None),
        [by_row(K), by_row(1)],
        [jax.ShapeDtypeStruct((M, K), dtype), jax.ShapeDtypeStruct((M, 1), jnp.float32)],
        name="round_by_expert",
        sequential=1,
        scalars=visits,
    )
    return RoundedTokens(*rounded)


def _round_by_expert(tile: Any, expert: Any, first: Any, end: Any, x: Any, *refs: Any) -> None:
    *factor, numbers, scale = refs
    visit = pl.program_id(0)
    start = tile[visit] * x.shape[0]

    def round_strip(i: Any, *, keeps: bool) -> None:
        rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        wide = x[rows].astype(jnp.float32)
        wide = wide * factor[0][...] if factor else wide
        new_scale = jnp.max(jnp.abs(wide), axis=1, keepdims=True) / largest_number(numbers.dtype)
        rounded = wide * inverse(new_scale)
        if keeps:
            mine = _rows_between(first[visit], end[visit], start + i * ROWS, ROWS)
            rounded = jnp.where(mine, rounded, numbers[rows].astype(jnp.float32))
            new_scale = jnp.where(mine, new_scale, scale[rows])
        numbers[rows] = narrow(rounded, numbers.dtype)
        scale[rows] = new_scale

    # The first strip may begin with rows of the visit before. The last one may end with rows of the
    # next, which comes later.
    begin, shared = (first[visit] - start) // ROWS, lax.rem(first[visit], ROWS) > 0

    @pl.when(shared & (first[visit] < end[visit]))
    def _first_strip() -> None:
        round_strip(begin, keeps=True)

    end_strip = (end[visit] - start + ROWS - 1) // ROWS
    lax.fori_loop(
        begin + shared.astype(jnp.int32), end_strip, lambda i, _: round_strip(i, keeps=False), None
    )


def takes(size: int) -> bool:
    """Return whether the kernels take a summed dim, or channels, of a size: whole rows fit into
    VMEM.
    """
    return size % LANES == 0 and _BYTES * ROWS * size <= vmem()


def multiply(
    rows: RoundedTokens,
    matrix: EightBits[Array, "R S"],
    channel_scale: Float[Array, "1 EN"] | None,
    sizes: Int[Array, " E"],
    precision: Precision,
    *,
    summed_rows: bool,
    dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """Return the products of rows and their experts' parts of a matrix, with their scales.

    0 for rows of no expert.

    Args:
      rows: the rounded rows.
      matrix: [K, E N] with `summed_rows`, and else [N, E K].
      channel_scale: the factors of N channels of each expert, or None.
      sizes: rows of each expert.
      precision: of rounded numbers.
      summed_rows: whether rows of the matrix are summed.
      dtype: of the result.
    """
    (M, K), E = rows.numbers.shape, sizes.shape[0]
    N = matrix.shape[1] // E if summed_rows else matrix.shape[0]
    tile_rows, columns = tile_of(_TILE_ROWS, N, K, largest=2048)
    visits, blocks = Visits.of(sizes, M, tile_rows, by_expert=False), N // columns

    def by_row(width):
        return pl.BlockSpec((tile_rows, width), lambda j, v, tile, *_: (tile[v], 0))

    def by_column(rows):
        return pl.BlockSpec(
            (rows, columns), lambda j, v, _, expert, *__: (0, expert[v] * blocks + j)
        )

    of_matrix = (
        by_column(K)
        if summed_rows
        else pl.BlockSpec((columns, K), lambda j, v, _, expert, *__: (j, expert[v]))
    )
    return call_kernel(
        functools.partial(_multiply, int(not summed_rows)),
        (blocks, visits.tile.shape[0]),
        [*rows, matrix, *([] if channel_scale is None else [channel_scale])],
        [by_row(K), by_row(1), of_matrix] + [by_column(1)] * (channel_scale is not None),
        [pl.BlockSpec((tile_rows, columns), lambda j, v, tile, *_: (tile[v], j))],
        [jax.ShapeDtypeStruct((M, N), dtype)],
        name=f"{precision}_expert_product",
        flops=2 * M * K * N,
        sequential=1,
        scalars=visits,
    )[0]


def _multiply(
    summed: int,
    tile: Any,
    _: Any,
    first: Any,
    end: Any,
    x: Any,
    x_scale: Any,
    matrix: Any,
    *refs: Any,
) -> None:
    *channel_scale, out = refs
    visit, rows = pl.program_id(1), out.shape[0]

    @pl.when(_begins(tile, visit))
    def _begin_tile() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(first[visit] < end[visit])
    def _add_rows() -> None:
        mine = _rows_between(first[visit], end[visit], tile[visit] * rows, rows)

        def multiply_strip(columns: Any) -> None:
            strip = matrix[columns] if summed else matrix[:, columns]
            y = (
                product(x[...], strip, 1, summed, sums_dtype(strip.dtype)).astype(jnp.float32)
                * x_scale[...]
            )
            y = y * channel_scale[0][:, columns] if channel_scale else y
            out[:, columns] = jnp.where(mine, y.astype(out.dtype), out[:, columns])

        by_strips(out.shape[1], math.gcd(out.shape[1], STRIP), multiply_strip)


def gradient_of_experts(
    a: Float[Array, "M R"], b: Float[Array, "M C"], sizes: Int[Array, " E"], *, dtype: DTypeLike
) -> Float[Array, "R EC"]:
    """Return the sum over the rows of each expert of outer(a, b), for all experts side by side."""
    (M, R), C, E = a.shape, b.shape[1], sizes.shape[0]
    side, tile_rows = 2048 if vmem() >= 96 * 2**20 else 1024, 512
    height, width = math.gcd(R, side), math.gcd(C, side)
    visits, blocks = Visits.of(sizes, M, tile_rows, by_expert=True), C // width
    return call_kernel(
        _gradient_of_experts,
        (R // height, blocks, visits.tile.shape[0]),
        [a, b],
        [
            pl.BlockSpec((tile_rows, height), lambda i, j, v, tile, *_: (tile[v], i)),
            pl.BlockSpec((tile_rows, width), lambda i, j, v, tile, *_: (tile[v], j)),
        ],
        [
            pl.BlockSpec(
                (height, width), lambda i, j, v, _, expert, *__: (i, expert[v] * blocks + j)
            )
        ],
        [jax.ShapeDtypeStruct((R, E * C), dtype)],
        name="gradient_of_experts",
        flops=2 * M * R * C,
        scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
        sequential=1,
        scalars=visits,
    )[0]


def _gradient_of_experts(
    tile: Any, expert: Any, first: Any, end: Any, a: Any, b: Any, out: Any, sums: Any
) -> None:
    visit, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(_begins(expert, visit))
    def _begin_expert() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(first[visit] < end[visit])
    def _add_rows() -> None:
        rows = a.shape[0]
        mine = _rows_between(first[visit], end[visit], tile[visit] * rows, rows)
        columns = jnp.where(mine, b[...], 0)

        def multiply_strip(strip: Any) -> None:
            sums[strip] += product(jnp.where(mine, a[:, strip], 0), columns, 0, 0)

        by_strips(sums.shape[0], math.gcd(sums.shape[0], STRIP), multiply_strip)

    @pl.when((visit == last) | (expert[visit] != expert[jnp.minimum(visit + 1, last)]))
    def _end_expert() -> None:
        out[...] = sums[...].astype(out.dtype)
