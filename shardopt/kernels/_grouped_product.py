"""Products of rows sorted by group, each group with its own matrix.

The flops do not grow with the number of groups.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardopt.core import wide_dtype
from shardopt.mesh import device_kind_or_default
from shardopt.trace._marks import GROUPED_PRODUCT, marked

Implementation = Literal["ragged_dot", "megablox", "blocks"]
_TILE = 256
"""The most rows in a tile on CPU."""


def grouped_product(
    rows: Float[Array, "M D"], weights: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Return rows[i] @ weights[g(i)]; the first sizes[0] rows are of group 0, and so on.

    Rows beyond the sum give 0.

    Args:
      rows: [M, D], sorted by group.
      weights: [E, D, F], in the dtype of the rows.
      sizes: [E], int32, rows of each group; their sum is M at most.

    Sums are computed in float32 at least and rounded once, even if the result is narrower: the
    kernels hold the sums in the memory of a core. Only the arguments are stored for the backward
    pass. On v5p from jax 0.12 on, `jax.lax.ragged_dot` is one kernel. On other TPUs `ragged_dot` is
    dense (flops times E), so Pallas megablox is used. On CPU it is a loop over tiles of rows.
    """
    return _run(implementation_here(), rows, weights, sizes)


def implementation_here() -> Implementation:
    """Return how products are computed on the devices at hand."""
    device_kind = device_kind_or_default()
    if device_kind == "cpu":
        return "blocks"
    # before jax 0.12 the gradient of the weights by ragged_dot is dense on v5p, too
    dense = device_kind.startswith("TPU") and (
        device_kind not in ("TPU v5", "TPU v5p") or jax.__version_info__ < (0, 12)
    )
    return "megablox" if dense else "ragged_dot"


def product_of_groups(
    implementation: Implementation,
    rows: Array,
    weights: Array,
    sizes: Array,
    *,
    transposed: bool = False,
) -> Array:
    """Return the grouped product with the weights, or with their transposes."""
    if implementation == "blocks":
        run = functools.partial(_product_in_tiles, transposed=transposed)
        return marked(GROUPED_PRODUCT, run)(rows, weights, sizes)
    if implementation == "ragged_dot":
        dims = lax.RaggedDotDimensionNumbers(
            (((1,), (2 if transposed else 1,)), ((), ())), [0], [0]
        )
        out = lax.ragged_dot_general(rows, weights, sizes, dims, preferred_element_type=rows.dtype)
    else:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        tiles = _tiles(
            rows.dtype,
            rows.shape[0],
            sizes.shape[0],
            rows.shape[1],
            weights.shape[1 if transposed else 2],
        )
        padded_rows = _padded(rows, tiles[0])
        out = gmm(padded_rows, weights, sizes, rows.dtype, tiles, transpose_rhs=transposed)[
            : rows.shape[0]
        ]
    # Not every implementation writes the rows behind the last group.
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), out, 0)


def outer_of_groups(
    implementation: Implementation, rows: Array, grads: Array, sizes: Array
) -> Array:
    """Return [E, D, F], the sum over each group's rows of rows[i] outer grads[i], in the dtype of
    the rows.
    """
    if implementation == "blocks":
        return marked(GROUPED_PRODUCT, _outer_in_tiles)(rows, grads, sizes).astype(rows.dtype)
    if implementation == "ragged_dot":
        dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(rows, grads, sizes, dims, preferred_element_type=rows.dtype)
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = _tiles(rows.dtype, rows.shape[0], sizes.shape[0], rows.shape[1], grads.shape[1])
    rows = _padded(rows, tiles[0])
    grads = _padded(grads, tiles[0])
    return tgmm(rows.swapaxes(0, 1), grads, sizes, rows.dtype, tiles)


def _forward(
    implementation: Implementation, rows: Array, weights: Array, sizes: Array
) -> tuple[Array, tuple]:
    return product_of_groups(implementation, rows, weights, sizes), (rows, weights, sizes)


def _backward(
    implementation: Implementation, residuals: tuple[Array, Array, Array], grads: Array
) -> tuple[Array, Array, None]:
    rows, weights, sizes = residuals
    d_rows = product_of_groups(implementation, grads, weights, sizes, transposed=True)
    return d_rows, outer_of_groups(implementation, rows, grads, sizes), None


_run = jax.custom_vjp(product_of_groups, nondiff_argnums=(0,))
_run.defvjp(_forward, _backward)


def _tiles(
    dtype: jnp.dtype, rows: int, groups: int, inner: int, outer: int
) -> tuple[int, int, int]:
    """Return the tile sizes of rows, of the contracted dim and of the other dim, so that tiles fit
    in the memory of a core.

    If several groups share a tile, it is multiplied once for each of them. So it has no more rows
    than the average group.
    """
    max_size = 2048 // jnp.dtype(dtype).itemsize

    def tile_size(size, limit):
        return min(limit, -(-size // 128) * 128)

    return (
        tile_size(-(-rows // groups), 512),
        tile_size(inner, max_size),
        tile_size(outer, max_size),
    )


def _padded(rows: Array, tile: int) -> Array:
    return jnp.pad(rows, ((0, -rows.shape[0] % tile), (0, 0)))


# --- CPU: tiles of rows, each within one group; the number of tiles depends on the sizes ----------


def _visits(num_rows: int, sizes: Array) -> tuple[int, Array, Array, Array, Array]:
    """Return the rows of a tile, the number of tiles, and for each tile its group, its first row
    and the end of its group.
    """
    groups = sizes.shape[0]
    # About the average group, as a power of two: larger tiles would mostly be padding.
    tile = min(_TILE, max(8, 1 << (num_rows // (2 * groups)).bit_length()))
    tiles_per_group = -(-sizes // tile)
    ends = jnp.cumsum(sizes)
    tile_ends = jnp.cumsum(tiles_per_group)
    # At most so many tiles, whatever the sizes are: each group wastes less than one. The loop below
    # ends at the real number.
    index = jnp.arange(-(-num_rows // tile) + groups)
    group = jnp.minimum(jnp.sum(index[:, None] >= tile_ends[None], axis=1), groups - 1)
    first = (ends - sizes)[group] + (index - (tile_ends - tiles_per_group)[group]) * tile
    return tile, tile_ends[-1], group, first, ends[group]


def _product_in_tiles(rows: Array, weights: Array, sizes: Array, transposed: bool) -> Array:
    """Return the product by a loop over tiles.

    A tile may write beyond its group, and the next tile overwrites these rows.
    """
    M = rows.shape[0]
    tile, count, group, first, end = _visits(M, sizes)
    rows, wide = jnp.pad(rows, ((0, tile), (0, 0))), wide_dtype(rows.dtype)

    def multiply_tile(i: Array, out: Array) -> Array:
        tile_rows = lax.dynamic_slice_in_dim(rows, first[i], tile)
        dims = ((1,), (1 if transposed else 0,)), ((), ())
        tile_product = lax.dot_general(
            tile_rows, weights[group[i]], dims, preferred_element_type=wide
        )
        in_group = first[i] + jnp.arange(tile)[:, None] < end[i]
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(in_group, tile_product, 0).astype(out.dtype), first[i], 0
        )

    # Room for the last tile, which may write beyond the rows.
    out = jnp.zeros((M + tile, weights.shape[1 if transposed else 2]), rows.dtype)
    return lax.fori_loop(0, count, multiply_tile, out)[:M]


def _outer_in_tiles(rows: Array, grads: Array, sizes: Array) -> Array:
    tile, count, group, first, end = _visits(rows.shape[0], sizes)
    rows, grads = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, grads))
    wide = wide_dtype(rows.dtype)

    def add_tile(i: Array, out: Array) -> Array:
        x, g = (lax.dynamic_slice_in_dim(array, first[i], tile) for array in (rows, grads))
        x = jnp.where(first[i] + jnp.arange(tile)[:, None] < end[i], x, 0)
        total = lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return out.at[group[i]].add(total)

    return lax.fori_loop(
        0, count, add_tile, jnp.zeros((sizes.shape[0], rows.shape[1], grads.shape[1]), wide)
    )
