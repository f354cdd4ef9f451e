"""How TPUs gather and scatter arrays without copies: in whole tiles of rows, and small matrices
together.
"""

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from shardopt.collectives._buckets import MeshAxes, split_points
from shardopt.core import Arrays, replaced
from shardopt.mesh import device_kind

Move = Callable[[jax.Array, int], jax.Array]
Gather = Callable[[jax.Array, MeshAxes, int], jax.Array]

_TILE_ROWS = 8
_SMALL_MATRIX = 2**25
"""Bytes of a gathered matrix that is small. XLA:TPU may send a gather of 16 MB as an all-reduce of
zeros and a shard. It takes 2.3 ms on v5e:16x16, where a gather of 33 MB takes 0.3, and a pass over
the gathered matrix on v6e:8x8."""
_MANY_CHIPS = 64
"""On 16 chips of v5e XLA gathers small matrices as they are. Chips with a SparseCore send them
while they compute.
"""


def is_tpu() -> bool:
    """Return whether the devices under trace are TPUs."""
    return (device_kind() or "").startswith("TPU")


def joined_to_tiles(move: Move, x: jax.Array, dim: int) -> jax.Array:
    """Apply a collective `move(x, dim)`.

    The last two dims are joined for it if they follow `dim` and fill no tiles.

    XLA:TPU sends arrays in tiles of the last two dims. A weight [D, 2, F] that was gathered in
    tiles of 2 x 128 is copied before its product, 2.1 ms a block of Llama 3 8B (v5p:8x8x8).
    """
    # `rows` is the dim of a tile's rows. A collective on it or after it cannot join the last two
    # dims.
    rows = x.ndim - 2
    if dim >= rows or x.shape[rows] >= _TILE_ROWS:
        return move(x, dim)
    moved = move(x.reshape(*x.shape[:rows], -1), dim)
    return moved.reshape(*moved.shape[:rows], *x.shape[rows:])


def in_gathered_layout(gathered: jax.Array, dim: int) -> jax.Array:
    """Return an array that was gathered on `dim`.

    A weight of three dims that was gathered on the last one keeps this layout.

    XLA:TPU may choose another one, and copy. For 4096 tokens a chip of Llama 3 8B (v5p:4x4x4, all
    products kept, 16 ms a block):

    - A weight [D, C, F] may have few parts C. XLA:TPU stores its kept product with tokens next to
      each other, and copies it in the backward pass, 1.2 ms. The layout of the gather has the
      components of D next to each other.
    - It copies the weight [H, K, D] after attention, 0.1 ms.
    """
    if gathered.ndim != 3 or dim != 2:
        return gathered
    has_few_parts = gathered.shape[1] < _TILE_ROWS
    return with_layout_constraint(gathered, Layout((1, 2, 0) if has_few_parts else (2, 0, 1)))


def joins_small_matrices(axis: MeshAxes) -> bool:
    """Return whether `gather_joined` is faster than one gather for each array."""
    return device_kind() == "TPU v5 lite" and jax.lax.axis_size(axis) >= _MANY_CHIPS


def gather_joined(
    xs: Sequence[jax.Array], dims: Sequence[int], axis: MeshAxes, gather: Gather
) -> Arrays:
    """Return every x all-gathered on its dim.

    Small arrays with as many rows are joined while they are sent.
    """
    bundles: dict[Hashable, list[int]] = {}
    for i, (x, dim) in enumerate(zip(xs, dims, strict=True)):
        is_small = x.nbytes * jax.lax.axis_size(axis) <= _SMALL_MATRIX
        joins = is_small and dim == 0 and x.ndim > 1
        # A number as key is a bundle of one array, since no two arrays have one index.
        bundles.setdefault((len(x), x.dtype) if joins else i, []).append(i)
    gathered = list(xs)
    for bundle in bundles.values():
        members = [xs[i] for i in bundle]
        if len(members) == 1:
            parts = [gather(members[0], axis, dims[bundle[0]])]
        else:
            rows = jnp.concatenate([x.reshape(len(x), -1) for x in members], axis=1)
            # The gather multiplies rows and leaves columns, so columns of shards cut the whole
            # array.
            ends = split_points([x.size // len(x) for x in members])
            parts = jnp.split(gather(rows, axis, 0), ends, axis=1)
            parts = [part.reshape(-1, *x.shape[1:]) for part, x in zip(parts, members, strict=True)]
        gathered = replaced(gathered, bundle, parts)
    return gathered
