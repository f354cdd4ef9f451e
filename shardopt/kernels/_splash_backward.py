"""The gradients of splash attention by one Pallas kernel for TPU, which computes the scores of a
tile once.

jax has two backward kernels, and each computes scores and their gradients: seven products a tile.
This kernel needs five. It holds the gradients of some heads' queries, and of their keys and values,
in VMEM while it goes through all tiles. On other devices it runs interpreted, for tests.

Suffixes: B sequences, H heads of queries, G heads of keys and values, T positions, K width of a
head, V of its values.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.kernels._devices import vmem
from shardopt.kernels._flash import TILE, Keys, Marks, MaskRule, Queries, capped
from shardopt.kernels._pallas import LANES, pl, pltpu, product
from shardopt.kernels._splash_tiles import divisors, hide, padded
from shardopt.mesh import device_kind_or_default

Sums = tuple[Array, Array, Array]


def gradients(
    queries: Queries, keys: Keys, rule: MaskRule, *, dtype: DTypeLike
) -> tuple[Float[Array, "B H T K"], Float[Array, "B G T K"], Float[Array, "B G T V"]]:
    """Return what these keys add to dQ, and what these queries add to dK and dV, summed in float32,
    as `dtype`.

    It computes `flash.gradients` with scores query key^T: queries are scaled. Queries and keys
    begin at the same position, so the positions of marks are not read. T is a multiple of 128. If
    the gradients of all rows do not fit into VMEM, it works on pieces of rows. With heads of 128 in
    half precision this happens beyond 12,288 rows on v5p; a piece has about 4096. As many heads of
    queries as fit share a step, up to four.
    """
    queries = queries._replace(marks=Marks(None, queries.marks.segments))
    keys = keys._replace(marks=Marks(None, keys.marks.segments))
    T = queries.query.shape[2]
    block = math.gcd(queries.query.shape[2], TILE)
    most_heads = functools.partial(
        heads_of_step, queries.query.shape, keys.key.shape, keys.value.shape[3]
    )
    heads = most_heads(T, dtype, vmem()) or (block == T)
    if heads:
        return _piece_gradients(queries, keys, rule, 0, block, int(heads), dtype)
    sizes = [size for size in range(block, T, block) if T % size == 0]
    piece_size = max(
        size for size in sizes if size == block or most_heads(size, jnp.float32, vmem())
    )
    heads = max(most_heads(piece_size, jnp.float32, vmem()), 1)
    # pairs of pieces that have the same mask
    # The kernel is compiled for each mask, not for each pair: most pairs below the diagonal see
    # all.
    pairs_by_mask: dict[tuple[MaskRule, int], list[tuple[int, int]]] = {}
    for query_lead in range(piece_size - T, T, piece_size):
        if _tiles(piece_size, query_lead, block, rule):
            sees_all = _sees_all(piece_size, query_lead, rule)
            mask = (rule._replace(causal=False, window=None), 0) if sees_all else (rule, query_lead)
            pairs = [
                (i, i - query_lead)
                for i in range(max(query_lead, 0), T + min(query_lead, 0), piece_size)
            ]
            pairs_by_mask.setdefault(mask, []).extend(pairs)

    def zeros_like(x):
        return jnp.zeros(x.shape, jnp.float32)

    sums: Sums = zeros_like(queries.query), zeros_like(keys.key), zeros_like(keys.value)
    for (mask, query_lead), pairs in pairs_by_mask.items():

        def add_piece(
            sums: Sums, pair: Array, mask: MaskRule = mask, query_lead: int = query_lead
        ) -> tuple[Sums, None]:
            i, j = pair
            query_piece = jax.tree.map(lambda x: _slice_positions(x, i, piece_size), queries)
            key_piece = jax.tree.map(lambda x: _slice_positions(x, j, piece_size), keys)
            piece_gradients = _piece_gradients(
                query_piece, key_piece, mask, query_lead, block, heads, jnp.float32
            )
            dq, dk, dv = (
                _add_at(x, start, y)
                for x, start, y in zip(sums, (i, j, j), piece_gradients, strict=True)
            )
            return (dq, dk, dv), None

        sums = lax.scan(add_piece, sums, jnp.asarray(pairs, jnp.int32))[0]
    dq, dk, dv = (x.astype(dtype) for x in sums)
    return dq, dk, dv


def heads_of_step(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value_width: int,
    length: int,
    dtype: DTypeLike,
    memory: int,
) -> int:
    """Return how many heads of queries share a step.

    0 if not even the gradients of one head fit into VMEM.

    They are sums in float32 and two output buffers. A head has a tile as well.

    Args:
      query: the shape of queries, [B, H, T, K].
      key: the shape of keys, [B, G, T, K].
      value_width: V.
      length: positions of a piece.
      dtype: of gradients.
      memory: bytes of VMEM.
    """
    row = length * (4 + 2 * np.dtype(dtype).itemsize)
    keys = row * (padded(query[3]) + padded(value_width))
    head = row * padded(query[3]) + 14 * math.gcd(query[2], TILE) ** 2
    return max(
        (count for count in divisors(query[1] // key[1]) if keys + count * head <= 5 * memory // 6),
        default=0,
    )


def _slice_positions(x: Array, start: Array, piece: int) -> Array:
    """Return `piece` positions from `start` on: of dim 1 for segments [B, T], otherwise of dim 2."""
    return lax.dynamic_slice_in_dim(x, start, piece, min(x.ndim - 1, 2))


def _add_at(x: Array, start: Array, y: Array) -> Array:
    """Add y to the positions of x from `start` on, dim 2."""
    return lax.dynamic_update_slice_in_dim(x, _slice_positions(x, start, y.shape[2]) + y, start, 2)


def _sees_all(piece: int, query_lead: int, rule: MaskRule) -> bool:
    """Return whether every query of a piece sees every key of another piece that begins
    `query_lead` positions earlier.
    """
    return (not rule.causal or query_lead >= piece - 1) and (
        rule.window is None or query_lead + piece - 1 < rule.window
    )


def _tiles(T: int, query_lead: int, block: int, rule: MaskRule) -> list[tuple[int, int]]:
    """Return the tiles where some query sees some key, as (number of the query block, number of the
    key block).
    """

    def has_visible_key(i: int, j: int) -> bool:
        largest_gap = query_lead + (i + 1 - j) * block - 1
        smallest_gap = query_lead + (i - j - 1) * block + 1
        return (not rule.causal or largest_gap >= 0) and (
            rule.window is None or smallest_gap < rule.window
        )

    # By key block: the same keys stay in VMEM while queries pass.
    return [(i, j) for j in range(T // block) for i in range(T // block) if has_visible_key(i, j)]


def _piece_gradients(
    queries: Queries,
    keys: Keys,
    rule: MaskRule,
    query_lead: int,
    block: int,
    heads: int,
    dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    (B, H, T, K), (G, V) = queries.query.shape, keys.value.shape[1::2]
    R = H // G
    tiles = _tiles(T, query_lead, block, rule)

    # index maps get the grid indices, then the query block and the key block of each tile
    def query_spec(width):
        return pl.BlockSpec(
            (None, heads, block, width), lambda b, g, r, t, i, _: (b, g * (R // heads) + r, i[t], 0)
        )

    def key_spec(width):
        return pl.BlockSpec((None, None, block, width), lambda b, g, r, t, _, j: (b, g, j[t], 0))

    row_spec = pl.BlockSpec(
        (None, heads, 1, block), lambda b, g, r, t, i, _: (b, g * (R // heads) + r, 0, i[t])
    )
    inputs = [
        queries.query,
        queries.d_out,
        queries.logsumexp[:, :, None],
        queries.delta[:, :, None],
        keys.key,
        keys.value,
    ]
    in_specs = [query_spec(K), query_spec(V), row_spec, row_spec, key_spec(K), key_spec(V)]
    if queries.marks.segments is not None and keys.marks.segments is not None:
        inputs += [
            queries.marks.segments[:, None],
            jnp.broadcast_to(keys.marks.segments[:, :, None], (B, T, LANES)),
        ]
        in_specs += [
            pl.BlockSpec((None, 1, block), lambda b, g, r, t, i, _: (b, 0, i[t])),
            pl.BlockSpec((None, block, LANES), lambda b, g, r, t, _, j: (b, j[t], 0)),
        ]

    def head_index(b, g, r, *_):
        return (b, g * (R // heads) + r, 0, 0)

    def group_index(b, g, *_):
        return (b, g, 0, 0)

    outputs = [(heads, T, K, head_index), (None, T, K, group_index), (None, T, V, group_index)]
    out_shape = [
        jax.ShapeDtypeStruct((B, *shape), dtype) for shape in ((H, T, K), (G, T, K), (G, T, V))
    ]
    products = 2 * block**2 * len(tiles) * B * H
    kernel = pl.pallas_call(
        functools.partial(_add_tile, rule=rule, block=block, query_lead=query_lead),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, G, R // heads, len(tiles)),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((None, *shape), index_map) for *shape, index_map in outputs],
            scratch_shapes=[
                pltpu.VMEM([n for n in shape if n], jnp.float32) for *shape, _ in outputs
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem(),
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * (3 * K + 2 * V),
            transcendentals=products // 2,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *out_shape)),
        ),
        name="splash_backward",
        interpret=not device_kind_or_default().startswith("TPU"),
    )
    tile_blocks = np.asarray(tiles, np.int32)
    dq, dk, dv = kernel(jnp.asarray(tile_blocks[:, 0]), jnp.asarray(tile_blocks[:, 1]), *inputs)
    return dq, dk, dv


def _add_tile(
    query_blocks: Any, key_blocks: Any, *refs: Any, rule: MaskRule, block: int, query_lead: int
) -> None:
    """Add the gradients of one tile.

    Scores and weights are [keys, queries of the heads], so numbers per query are rows.
    """
    query, d_out, logsumexp, delta, key, value, *segments = (ref[...] for ref in refs[:-6])
    out, (dq, dk, dv) = refs[-6:-3], refs[-3:]
    heads = query.shape[0]  # columns of a tile are the queries of all heads
    query, d_out = (x.reshape(heads * block, -1) for x in (query, d_out))
    logsumexp, delta = (
        jnp.concatenate([x[h] for h in range(heads)], axis=1) for x in (logsumexp, delta)
    )
    # Grid: (B, G, groups of heads, tiles). The last two run in order on one core, so sums stay:
    #
    # dQ of these heads        cleared at their first tile, written after their last
    # dK, dV of this group     cleared at the first tile of the first heads, written after the last
    head = pl.program_id(2)
    tile = pl.program_id(3)
    last_tile = pl.num_programs(3) - 1
    pl.when(tile == 0)(lambda: _clear(dq))
    pl.when((tile == 0) & (head == 0))(lambda: _clear(dk, dv))
    scores = capped(product(key, query, 1, 1), rule.softcap)
    # of the scores before the cap: tanh' = 1 - tanh^2
    slope = None if rule.softcap is None else 1 - jnp.square(scores / rule.softcap)
    # Positions of queries minus positions of keys, of which the mask depends alone.
    lead = query_lead + (query_blocks[tile] - key_blocks[tile]) * block
    same_segment = segments[0] == segments[1][:, :1] if segments else None
    by_head = [slice(h * block, (h + 1) * block) for h in range(heads)]
    scores = jnp.concatenate(
        [hide(scores[:, part], lead, 1, same_segment, rule) for part in by_head], axis=1
    )
    # The weights themselves: `logsumexp` is of all keys, so no sum is needed here.
    weights = jnp.exp(scores - logsumexp)
    d_scores = weights * (product(value, d_out, 1, 1) - delta)
    d_scores = (d_scores if slope is None else d_scores * slope).astype(query.dtype)
    query_rows = pl.ds(query_blocks[tile] * block, block)
    key_rows = pl.ds(key_blocks[tile] * block, block)
    dv[key_rows] += product(weights.astype(d_out.dtype), d_out, 1, 0)
    dk[key_rows] += product(d_scores, query, 1, 0)
    for h, part in enumerate(by_head):
        dq[h, query_rows] += product(d_scores[:, part], key, 0, 0)
    pl.when(tile == last_tile)(lambda: _copy((dq,), out[:1]))
    pl.when((tile == last_tile) & (head == pl.num_programs(2) - 1))(
        lambda: _copy((dk, dv), out[1:])
    )


def _clear(*refs: Any) -> None:
    for ref in refs:
        ref[...] = jnp.zeros_like(ref)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source[...].astype(target.dtype)
