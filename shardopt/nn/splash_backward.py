"""The gradients of splash attention by one Pallas kernel for TPU, which computes the scores of a tile once.

jax's own two backward kernels each compute scores and their gradients for themselves, seven products a tile. Here the gradients
of a head's queries, and of its keys and values, stay in VMEM while all tiles pass by: five. Elsewhere than on TPU it runs
interpreted, which is for tests.

Suffixes: B sequences, H heads of queries, G heads of keys and values, T positions, K width of a head, V of its values.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.mesh import device_kind_or_default
from shardopt.nn.flash import HIDDEN, TILE, Rule

LANES = 128
"""It works on tiles of a multiple of so many positions, and pads heads up to it."""
_ALL = Rule(causal=False, window=None)
Sums = tuple[Array, Array, Array]


class Rows(NamedTuple):
    """Queries, and what comes with each; segments may be None.

    Attributes:
      query: [B, H, T, K], scaled.
      d_out: [B, H, T, V].
      logsumexp: [B, H, T], over the keys of all blocks.
      delta: [B, H, T], sum_v out d_out.
      segments: [B, T].
    """

    query: Float[Array, "B H T K"]
    d_out: Float[Array, "B H T V"]
    logsumexp: Float[Array, "B H T"]
    delta: Float[Array, "B H T"]
    segments: Int[Array, "B T"] | None


class Columns(NamedTuple):
    """Keys [B, G, T, K], values [B, G, T, V] and their segments [B, T], or None."""

    key: Float[Array, "B G T K"]
    value: Float[Array, "B G T V"]
    segments: Int[Array, "B T"] | None


def gradients(
    rows: Rows, columns: Columns, rule: Rule, *, dtype: DTypeLike
) -> tuple[Float[Array, "B H T K"], Float[Array, "B G T K"], Float[Array, "B G T V"]]:
    """Return what these keys add to dQ, and what these queries add to dK and dV, summed in float32, as `dtype`.

    As `flash.gradients`, with scores query key^T; the first query stands where the first key does. T is a multiple of 128. Where
    the gradients of all rows do not fit into VMEM, pieces of them are taken: with heads of 128 in half precision beyond 10,752
    rows, 4096 or so at a time.
    """
    T, K, V = *rows.query.shape[2:], columns.value.shape[3]
    block = math.gcd(T, TILE)
    padded = lambda width: -(-width // LANES) * LANES  # noqa: E731
    width = padded(K) + padded(K) + padded(V)  # of dQ, dK and dV
    # of a row, the sums in float32, and two buffers on their way out; a third of the room is left to what comes in and to tiles
    fit = lambda dtype: max(2 * _vmem() // 3 // (width * (4 + 2 * np.dtype(dtype).itemsize)) // block, 1)  # noqa: E731
    if fit(dtype) * block >= T:
        return _of_piece(rows, columns, rule, 0, block, dtype)
    piece = block * max(n for n in range(1, fit(jnp.float32) + 1) if T // block % n == 0)
    alike: dict[tuple[Rule, int], list[tuple[int, int]]] = {}  # pieces between which the mask is the same
    for ahead in range(piece - T, T, piece):
        if _tiles(piece, ahead, block, rule):
            mask = (_ALL, 0) if _sees_all(piece, ahead, rule) else (rule, ahead)
            places = [(i, i - ahead) for i in range(max(ahead, 0), T + min(ahead, 0), piece)]
            alike.setdefault(mask, []).extend(places)
    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)  # noqa: E731
    sums: Sums = zeros(rows.query), zeros(columns.key), zeros(columns.value)
    for (mask, ahead), places in alike.items():

        def add(sums: Sums, at: Array, mask: Rule = mask, ahead: int = ahead) -> tuple[Sums, None]:
            i, j = at
            here = jax.tree.map(lambda x: _cut(x, i, piece), rows)
            there = jax.tree.map(lambda x: _cut(x, j, piece), columns)
            found = _of_piece(here, there, mask, ahead, block, jnp.float32)
            dq, dk, dv = (_plus(x, start, y) for x, start, y in zip(sums, (i, j, j), found, strict=True))
            return (dq, dk, dv), None

        sums = lax.scan(add, sums, jnp.asarray(places, jnp.int32))[0]
    dq, dk, dv = (x.astype(dtype) for x in sums)
    return dq, dk, dv


def _cut(x: Array, at: Array, piece: int) -> Array:
    """Return so many positions: of segments [B, T] dim 1, else dim 2."""
    return lax.dynamic_slice_in_dim(x, at, piece, min(x.ndim - 1, 2))


def _plus(x: Array, at: Array, y: Array) -> Array:
    """Add y to the positions of x from `at` on, dim 2."""
    return lax.dynamic_update_slice_in_dim(x, _cut(x, at, y.shape[2]) + y, at, 2)


def _sees_all(piece: int, ahead: int, rule: Rule) -> bool:
    """Return whether no query of a piece is kept from a key of another, which begins `ahead` before it."""
    return (not rule.causal or ahead >= piece - 1) and (rule.window is None or ahead + piece - 1 < rule.window)


def _tiles(T: int, ahead: int, block: int, rule: Rule) -> list[tuple[int, int]]:
    """Return the tiles, by number of the block of queries and of keys, in which some query sees some key."""

    def seen(i: int, j: int) -> bool:
        newest, oldest = ahead + (i + 1 - j) * block - 1, ahead + (i - j - 1) * block + 1
        return (not rule.causal or newest >= 0) and (rule.window is None or oldest < rule.window)

    return [(i, j) for j in range(T // block) for i in range(T // block) if seen(i, j)]


def _of_piece(
    rows: Rows, columns: Columns, rule: Rule, ahead: int, block: int, dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    from jax.experimental import pallas as pl  # here, since it takes long to import
    from jax.experimental.pallas import tpu as pltpu

    (B, H, T, K), (G, V) = rows.query.shape, columns.value.shape[1::2]
    R, tiles = H // G, _tiles(T, ahead, block, rule)
    # index maps are given the place in the grid, then the numbers of the blocks of queries and keys of each tile
    of_query = lambda width: pl.BlockSpec(  # noqa: E731
        (None, None, block, width), lambda b, g, r, t, i, _: (b, g * R + r, i[t], 0)
    )
    of_key = lambda width: pl.BlockSpec((None, None, block, width), lambda b, g, r, t, _, j: (b, g, j[t], 0))  # noqa: E731
    number = pl.BlockSpec((None, None, 1, block), lambda b, g, r, t, i, _: (b, g * R + r, 0, i[t]))
    inputs = [rows.query, rows.d_out, rows.logsumexp[:, :, None], rows.delta[:, :, None], columns.key, columns.value]
    in_specs = [of_query(K), of_query(V), number, number, of_key(K), of_key(V)]
    if rows.segments is not None and columns.segments is not None:
        inputs += [rows.segments[:, None], jnp.broadcast_to(columns.segments[:, :, None], (B, T, LANES))]
        in_specs += [
            pl.BlockSpec((None, 1, block), lambda b, g, r, t, i, _: (b, 0, i[t])),
            pl.BlockSpec((None, block, LANES), lambda b, g, r, t, _, j: (b, j[t], 0)),
        ]
    of_head = lambda b, g, r, *_: (b, g * R + r, 0, 0)  # noqa: E731
    of_group = lambda b, g, *_: (b, g, 0, 0)  # noqa: E731
    places = [(H, T, K, of_head), (G, T, K, of_group), (G, T, V, of_group)]
    out_shape = [jax.ShapeDtypeStruct((B, *shape), dtype) for *shape, _ in places]
    products = 2 * block**2 * len(tiles) * B * H
    run = pl.pallas_call(
        functools.partial(_add_tile, rule=rule, block=block, ahead=ahead),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, G, R, len(tiles)),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((None, None, length, width), at) for _, length, width, at in places],
            scratch_shapes=[pltpu.VMEM((length, width), jnp.float32) for _, length, width, _ in places],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_vmem()
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * (3 * K + 2 * V),
            transcendentals=products // 2,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *out_shape)),
        ),
        name="splash_backward",
        interpret=not device_kind_or_default().startswith("TPU"),
    )
    numbers = np.asarray(tiles, np.int32)
    dq, dk, dv = run(jnp.asarray(numbers[:, 0]), jnp.asarray(numbers[:, 1]), *inputs)
    return dq, dk, dv


def _add_tile(at_query: Any, at_key: Any, *refs: Any, rule: Rule, block: int, ahead: int) -> None:
    """Add what one tile gives; scores and weights are [keys, queries], so that the numbers of queries are rows."""
    from jax.experimental import pallas as pl

    query, d_out, logsumexp, delta, key, value, *segments = (ref[...] for ref in refs[:-6])
    out, (dq, dk, dv) = refs[-6:-3], refs[-3:]
    r, t = pl.program_id(2), pl.program_id(3)
    last = pl.num_programs(3) - 1

    @pl.when(t == 0)
    def _() -> None:
        dq[...] = jnp.zeros_like(dq)

    @pl.when((t == 0) & (r == 0))
    def _() -> None:
        dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)

    scores = _product(key, query, 1, 1)
    gap = ahead + (at_query[t] - at_key[t]) * block + _count(1, block) - _count(0, block)  # of the query from the key
    seen = []
    if rule.causal:
        seen.append(gap >= 0)
    if rule.window is not None:
        seen.append(gap < rule.window)
    if segments:
        seeing, of_keys = segments
        seen.append(seeing == of_keys[:, :1])
    if seen:
        scores = jnp.where(functools.reduce(jnp.logical_and, seen), scores, HIDDEN)
    weights = jnp.exp(scores - logsumexp)
    d_scores = (weights * (_product(value, d_out, 1, 1) - delta)).astype(query.dtype)
    queries, keys = pl.ds(at_query[t] * block, block), pl.ds(at_key[t] * block, block)
    dv[keys] += _product(weights.astype(d_out.dtype), d_out, 1, 0)
    dk[keys] += _product(d_scores, query, 1, 0)
    dq[queries] += _product(d_scores, key, 0, 0)

    @pl.when(t == last)
    def _() -> None:
        out[0][...] = dq[...].astype(out[0].dtype)

    @pl.when((t == last) & (r == pl.num_programs(2) - 1))
    def _() -> None:
        out[1][...], out[2][...] = dk[...].astype(out[1].dtype), dv[...].astype(out[2].dtype)


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _count(dim: int, block: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (block, block), dim)


def _vmem() -> int:
    """Return how many bytes the kernel may take, of the 64 MiB or more of a core; up to TPU v4 a core has 16."""
    return 16 * 2**20 if device_kind_or_default() in ("TPU v2", "TPU v3", "TPU v4") else 48 * 2**20
