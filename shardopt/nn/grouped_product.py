"""Products of rows that are sorted by group, each group with a matrix of its own; flops are those of the rows."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardopt.core.types import wide_dtype
from shardopt.mesh import device_kind_or_default

Implementation = Literal["ragged_dot", "megablox", "blocks"]
_TILE = 256
"""Rows at a time on CPU, where groups have so many."""


def grouped_product(
    rows: Float[Array, "M D"], weights: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Return rows[i] @ weights[g(i)], where the first sizes[0] rows are of group 0, and so on; rows beyond the sum give 0.

    Sums are taken in float32 at least and rounded once, also where the result is narrower: the kernels hold them in a core's
    memory. Kept for the backward pass are the arguments alone. `jax.lax.ragged_dot` is one kernel on v5p from jax 0.12 on;
    on other TPUs, where it is dense (flops times E), it is Pallas megablox, and on CPU a loop over tiles of rows.

    Args:
      rows: [M, D], sorted by group.
      weights: [E, D, F], in the dtype of the rows.
      sizes: [E], int32, rows of each group; their sum is M at most.
    """
    return _run(_implementation(), rows, weights, sizes)


def _implementation() -> Implementation:
    kind = device_kind_or_default()
    if kind == "cpu":
        return "blocks"
    # before jax 0.12 its gradient of the weights is dense on v5p, too
    dense = kind.startswith("TPU") and (kind not in ("TPU v5", "TPU v5p") or jax.__version_info__ < (0, 12))
    return "megablox" if dense else "ragged_dot"


def _product(how: Implementation, rows: Array, weights: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Return the grouped product with the weights, or with their transposes."""
    if how == "blocks":
        return _named(functools.partial(_product_in_tiles, transposed=transposed), rows, weights, sizes)
    if how == "ragged_dot":
        over = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
        out = lax.ragged_dot_general(rows, weights, sizes, over, preferred_element_type=rows.dtype)
    else:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        tiles = _tiles(rows.dtype, rows.shape[0], sizes.shape[0], rows.shape[1], weights.shape[1 if transposed else 2])
        padded = _padded(rows, tiles[0])
        out = gmm(padded, weights, sizes, rows.dtype, tiles, transpose_rhs=transposed)[: rows.shape[0]]
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), out, 0)


def _outer(how: Implementation, rows: Array, grads: Array, sizes: Array) -> Array:
    """Return, for each group, the sum over its rows of the outer products of the two: [E, D, F], in the dtype of the rows."""
    if how == "blocks":
        return _named(_outer_in_tiles, rows, grads, sizes).astype(rows.dtype)
    if how == "ragged_dot":
        over = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(rows, grads, sizes, over, preferred_element_type=rows.dtype)
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = _tiles(rows.dtype, rows.shape[0], sizes.shape[0], rows.shape[1], grads.shape[1])
    rows, grads = _padded(rows, tiles[0]), _padded(grads, tiles[0])
    return tgmm(rows.swapaxes(0, 1), grads, sizes, rows.dtype, tiles)


def _forward(how: Implementation, rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple]:
    return _product(how, rows, weights, sizes), (rows, weights, sizes)


def _backward(how: Implementation, kept: tuple[Array, Array, Array], grads: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = kept
    d_rows = _product(how, grads, weights, sizes, transposed=True)
    return d_rows, _outer(how, rows, grads, sizes), None


_run = jax.custom_vjp(_product, nondiff_argnums=(0,))
_run.defvjp(_forward, _backward)


def _tiles(dtype: jnp.dtype, rows: int, groups: int, inner: int, outer: int) -> tuple[int, int, int]:
    """Return tiles of rows, of the contracted dim and of the other that fit in the memory of a core.

    A tile that several groups share is multiplied for each of them: it has no more rows than a group has on average.
    """
    most = 2048 // jnp.dtype(dtype).itemsize
    up = lambda size, most: min(most, -(-size // 128) * 128)  # noqa: E731
    return up(-(-rows // groups), 512), up(inner, most), up(outer, most)


def _padded(rows: Array, tile: int) -> Array:
    return jnp.pad(rows, ((0, -rows.shape[0] % tile), (0, 0)))


# --- CPU: tiles of rows, each within one group; how many there are follows from the sizes ---------------------------------


def _named(f: Callable[[Array, Array, Array], Array], rows: Array, others: Array, sizes: Array) -> Array:
    """Call f by a name in the trace, for flops to be counted: how often its loop runs only the sizes tell."""

    def shardopt_grouped_product(rows: Array, others: Array, sizes: Array) -> Array:
        return f(rows, others, sizes)

    return jax.jit(shardopt_grouped_product)(rows, others, sizes)


def _visits(num_rows: int, sizes: Array) -> tuple[int, Array, Array, Array, Array]:
    """Return the rows of a tile, how many tiles there are, and of each its group, first row and the end of the group."""
    groups = sizes.shape[0]
    tile = min(_TILE, max(8, 1 << (num_rows // (2 * groups)).bit_length()))
    tiles = -(-sizes // tile)
    ends = jnp.cumsum(sizes)
    after = jnp.cumsum(tiles)
    at = jnp.arange(-(-num_rows // tile) + groups)
    group = jnp.minimum(jnp.sum(at[:, None] >= after[None], axis=1), groups - 1)
    first = (ends - sizes)[group] + (at - (after - tiles)[group]) * tile
    return tile, after[-1], group, first, ends[group]


def _product_in_tiles(rows: Array, weights: Array, sizes: Array, transposed: bool) -> Array:
    """Tiles are written in order, so what one writes beyond its group the next one overwrites."""
    M = rows.shape[0]
    tile, count, group, first, end = _visits(M, sizes)
    rows, wide = jnp.pad(rows, ((0, tile), (0, 0))), wide_dtype(rows.dtype)

    def one(i: Array, out: Array) -> Array:
        x = lax.dynamic_slice_in_dim(rows, first[i], tile)
        over = ((1,), (1 if transposed else 0,)), ((), ())
        y = lax.dot_general(x, weights[group[i]], over, preferred_element_type=wide)
        inside = first[i] + jnp.arange(tile)[:, None] < end[i]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(inside, y, 0).astype(out.dtype), first[i], 0)

    out = jnp.zeros((M + tile, weights.shape[1 if transposed else 2]), rows.dtype)
    return lax.fori_loop(0, count, one, out)[:M]


def _outer_in_tiles(rows: Array, grads: Array, sizes: Array) -> Array:
    tile, count, group, first, end = _visits(rows.shape[0], sizes)
    rows, grads = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, grads))
    wide = wide_dtype(rows.dtype)

    def one(i: Array, out: Array) -> Array:
        x, g = (lax.dynamic_slice_in_dim(a, first[i], tile) for a in (rows, grads))
        x = jnp.where(first[i] + jnp.arange(tile)[:, None] < end[i], x, 0)
        total = lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return out.at[group[i]].add(total)

    return lax.fori_loop(0, count, one, jnp.zeros((sizes.shape[0], rows.shape[1], grads.shape[1]), wide))
