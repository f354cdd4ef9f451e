"""Attention tile by tile in plain XLA with an online softmax: it never holds more than one tile of
scores.

`absorb` adds one block of keys to the softmax, and `gradients` is its backward pass for one block.
The callers decide where blocks come from: `ring` gets them from neighbours, `exchange` from a
gather.

Suffixes: B sequences, G heads of keys and values, R heads of queries to each of them, T queries, S
keys, K width. Heads come before positions in these arrays, so that the products need no transposes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from shardopt.core import PyTree, wide_dtype

NAME = "attention"
"""The `checkpoint_name` of the mixed values, and of the logarithm of the softmax sum."""
TILE = 512
"""The most queries, and the most keys, in one tile of scores."""
HIDDEN = -1e30
"""The score of a key that a query does not see; finite, so that a row of hidden keys alone gives no
NaN.
"""
_PADDING_POSITION = np.iinfo(np.int32).max  # the position of padding keys: after every query
Carry = TypeVar("Carry")


def factor_of_scores(scale: float | None, width: int) -> float:
    """Return the factor of scores: `scale`, or 1 / sqrt(K) for None; `width` is K."""
    return width**-0.5 if scale is None else scale


class MaskRule(NamedTuple):
    """Which keys a query sees by position, and the cap and the factor of scores.

    See `so.nn.attention`.
    """

    causal: bool
    window: int | None
    softcap: float | None = None
    scale: float | None = None

    def scaled(self, x: Array, width: int) -> Array:
        """Return scores, or queries, times the factor of scores; `width` is K."""
        factor = factor_of_scores(self.scale, width)
        return x if factor == 1 else x * factor


class Marks(NamedTuple):
    """The properties of each token that the attention mask compares.

    Attributes:
      positions: [1 or B, T], int32; None: natural order.
      segments: [B, T]; None: all tokens are of one segment.
    """

    positions: Int[Array, "#B T"] | None
    segments: Int[Array, "B T"] | None


class Keys(NamedTuple):
    """A block of keys.

    Attributes:
      key: [B, G, S, K].
      value: [B, G, S, V].
      marks: the marks of these keys.
    """

    key: Float[Array, "B G S K"]
    value: Float[Array, "B G S V"]
    marks: Marks


class Queries(NamedTuple):
    """The operands of the backward pass on the side of the queries.

    `...` is [B, G, R], or [B, H] in the splash kernel.

    Attributes:
      query: [..., T, K].
      d_out: [..., T, V].
      logsumexp: [..., T], over the keys of all blocks.
      delta: [..., T], see `delta_of`.
      marks: the marks of these queries.
    """

    query: Float[Array, "... T K"]
    d_out: Float[Array, "... T V"]
    logsumexp: Float[Array, "... T"]
    delta: Float[Array, "... T"]
    marks: Marks


class State(NamedTuple):
    """The softmax over the blocks so far.

    Attributes:
      top: m, the largest score.
      total: l, the sum of exp(score - m).
      mixed: o, the sum of exp(score - m) value.
    """

    top: Float[Array, "B G R T"]
    total: Float[Array, "B G R T"]
    mixed: Float[Array, "B G R T K"]


def heads_first(
    query: Float[Array, "B T H K"], key: Float[Array, "B T G K"], value: Float[Array, "B T G K"]
) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G T K"], Float[Array, "B G T K"]]:
    """Return the arrays with heads before positions.

    Heads of queries are grouped by the head of keys that they use.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    grouped = jnp.transpose(query.reshape(B, T, G, H // G, K), (0, 2, 3, 1, 4))
    return grouped, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)


def heads_last(mixed: Float[Array, "B G R T K"]) -> Float[Array, "B T H K"]:
    """Undo `heads_first`."""
    B, G, R, T, K = mixed.shape
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(B, T, G * R, K)


def empty_state(query: Float[Array, "B G R T K"]) -> State:
    """Return the state before the first block of keys."""
    wide = wide_dtype(query.dtype)
    return State(
        jnp.full(query.shape[:-1], HIDDEN, wide),
        jnp.zeros(query.shape[:-1], wide),
        jnp.zeros(query.shape, wide),
    )


def absorb(
    state: State, query: Float[Array, "B G R T K"], query_marks: Marks, keys: Keys, rule: MaskRule
) -> State:
    """Return the state after a block of keys: m' = max(m, m_i), l' = l e^(m-m') + l_i e^(m_i-m'),
    o' likewise.

    The marks must have positions. A query that sees no key of any block has no defined result.
    """
    states = State(
        _split_tiles(state.top, -1), _split_tiles(state.total, -1), _split_tiles(state.mixed, -2)
    )
    query_tiles = _split_tiles(query, -2), _split_marks(query_marks, -1), states
    key_tiles = _split_keys(keys)

    def absorb_into_query_tile(
        _: None, query_tile: tuple[Array, Marks, State]
    ) -> tuple[None, State]:
        query, query_marks, state = query_tile

        def absorb_key_tile(state: State, keys: Keys) -> tuple[State, None]:
            def update(state):
                return _absorb_tile(state, query, query_marks, keys, rule)

            return _unless_hidden(update, state, query_marks, keys.marks, rule), None

        return None, _scan(absorb_key_tile, state, key_tiles)[0]

    _, states = _scan(absorb_into_query_tile, None, query_tiles)
    join = functools.partial(_join_tiles, length=query.shape[-2])
    return State(join(states.top, -1), join(states.total, -1), join(states.mixed, -2))


def finish(
    state: State, dtype: DTypeLike, sinks: Float[Array, " H"] | None
) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G R T"]]:
    """Return o / l in a dtype, and m + log l.

    A sink is one more key, with a value of zeros, of each query of its head.

    Both have a `checkpoint_name`: if they are saved, the backward pass does not run the forward
    again.
    """
    if sinks is not None:
        scores = jnp.broadcast_to(_score_of_sinks(sinks, state.top), state.top.shape)
        top = jnp.maximum(state.top, scores)
        rescale = jnp.exp(state.top - top)
        state = State(
            top, state.total * rescale + jnp.exp(scores - top), state.mixed * rescale[..., None]
        )
    mixed = state.mixed / state.total[..., None]
    logsumexp = state.top + jnp.log(state.total)
    return checkpoint_name(mixed.astype(dtype), NAME), checkpoint_name(logsumexp, NAME)


def sink_gradient(
    sinks: Float[Array, " H"] | None,
    logsumexp: Float[Array, "B ... T"],
    delta: Float[Array, "B ... T"],
) -> Float[Array, " H"] | None:
    """Return the gradient of the sinks for these queries: ds = p (0 - delta) with p = exp(sink -
    logsumexp), summed.
    """
    if sinks is None:
        return None
    d_scores = -jnp.exp(_score_of_sinks(sinks, logsumexp) - logsumexp) * delta
    return jnp.sum(d_scores, axis=(0, -1)).reshape(sinks.shape).astype(sinks.dtype)


def _score_of_sinks(
    sinks: Float[Array, " H"], rows: Float[Array, "B ... T"]
) -> Float[Array, "1 ... 1"]:
    """Return the sinks with the dims of `rows`, which are [B, G, R, T] or [B, H, T]."""
    return sinks.astype(rows.dtype).reshape(1, *rows.shape[1:-1], 1)


def delta_of(
    out: Float[Array, "B G R T K"],
    d_out: Float[Array, "B G R T K"],
    logsumexp: Float[Array, "B G R T"],
) -> Float[Array, "B G R T"]:
    """Return sum_k out dout, an operand of `gradients` for every block."""
    return jnp.sum(d_out.astype(logsumexp.dtype) * out.astype(logsumexp.dtype), axis=-1)


def gradients(
    queries: Queries, keys: Keys, rule: MaskRule
) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """Return what one block of keys adds to dQ, and its dK and dV from these queries, in float32 at
    least.

    With p = exp(score - logsumexp) over all keys, and delta = sum_k out dout: dv = p^T dout, ds = p
    (dout v^T - delta).
    """
    wide = wide_dtype(queries.query.dtype)
    query_tiles = _split_queries(queries)
    key_tiles = _split_keys(keys)
    d_key_tiles = jnp.zeros(key_tiles.key.shape, wide), jnp.zeros(key_tiles.value.shape, wide)

    def add_query_tile(
        sums: tuple[Array, Array], queries: Queries
    ) -> tuple[tuple[Array, Array], Array]:
        def add_key_tile(
            dq: Array, key_tile: tuple[Keys, tuple]
        ) -> tuple[Array, tuple[Array, Array]]:
            keys, sums = key_tile

            def update(partial_sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                return jax.tree.map(jnp.add, partial_sums, _tile_gradients(queries, keys, rule))

            dq, dk, dv = _unless_hidden(update, (dq, *sums), queries.marks, keys.marks, rule)
            return dq, (dk, dv)

        dq, sums = _scan(add_key_tile, jnp.zeros(queries.query.shape, wide), (key_tiles, sums))
        return sums, dq

    # Queries outside, keys inside: dQ of a tile is complete after the inner loop, while dK and dV
    # of all tiles are carried.
    (dk, dv), dq = _scan(add_query_tile, d_key_tiles, query_tiles)
    length = keys.key.shape[-2]
    return (
        _join_tiles(dq, -2, queries.query.shape[-2]),
        _join_tiles(dk, -2, length),
        _join_tiles(dv, -2, length),
    )


def _absorb_tile(
    state: State, query: Array, query_marks: Marks, keys: Keys, rule: MaskRule
) -> State:
    scores = _scores(query, query_marks, keys, rule)
    value = keys.value
    # The running maximum keeps exponentials at 1 at most. Sums so far are rescaled to the new one.
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    # If all keys are hidden, the weights are 1. The first visible key multiplies them by exp(-1e30)
    # = 0.
    weights = jnp.exp(scores - top[..., None])
    rescale = jnp.exp(state.top - top)
    mixed = jnp.einsum(
        "bgrts,bgsk->bgrtk",
        weights.astype(value.dtype),
        value,
        preferred_element_type=weights.dtype,
    )
    return State(
        top,
        state.total * rescale + jnp.sum(weights, axis=-1),
        state.mixed * rescale[..., None] + mixed,
    )


def _tile_gradients(queries: Queries, keys: Keys, rule: MaskRule) -> tuple[Array, Array, Array]:
    query, d_out, logsumexp, delta, query_marks = queries
    key, value, _ = keys
    product = functools.partial(jnp.einsum, preferred_element_type=wide_dtype(query.dtype))
    scores = _scores(query, query_marks, keys, rule)
    p = jnp.exp(scores - logsumexp[..., None])
    dp = product("bgrtk,bgsk->bgrts", d_out, value)
    ds = rule.scaled(p * (dp - delta[..., None]), query.shape[-1])
    if rule.softcap is not None:
        # hidden keys have p = 0
        # tanh' = 1 - tanh^2, and `scores` are c tanh already.
        ds = ds * (1 - jnp.square(jnp.maximum(scores, -rule.softcap) / rule.softcap))
    ds = ds.astype(query.dtype)
    dv = product("bgrts,bgrtk->bgsk", p.astype(value.dtype), d_out)
    return product("bgrts,bgsk->bgrtk", ds, key), product("bgrts,bgrtk->bgsk", ds, query), dv


def _scores(
    query: Array, query_marks: Marks, keys: Keys, rule: MaskRule
) -> Float[Array, "B G R T S"]:
    scores = jnp.einsum(
        "bgrtk,bgsk->bgrts", query, keys.key, preferred_element_type=wide_dtype(query.dtype)
    )
    mask_bias = jnp.where(sees(query_marks, keys.marks, rule), 0, HIDDEN).astype(scores.dtype)
    return capped(rule.scaled(scores, query.shape[-1]), rule.softcap) + mask_bias[:, None, None]


def capped(scores: Array, softcap: float | None) -> Array:
    """Return softcap tanh(scores / softcap), which lies between -softcap and softcap.

    None changes nothing.
    """
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def sees(query_marks: Marks, key_marks: Marks, rule: MaskRule) -> Bool[Array, "#B T S"]:
    """Return [1 or B, T, S], whether each query sees each key."""
    assert query_marks.positions is not None
    assert key_marks.positions is not None
    query = query_marks.positions[:, :, None]
    key = key_marks.positions[:, None, :]
    mask = (
        query >= key
        if rule.causal
        else jnp.broadcast_to(key < _PADDING_POSITION, (*query.shape[:2], key.shape[2]))
    )
    if rule.window is not None:
        mask = mask & (query - key < rule.window)
    if query_marks.segments is not None and key_marks.segments is not None:
        mask = mask & (query_marks.segments[:, :, None] == key_marks.segments[:, None, :])
    return mask


def _unless_hidden(
    update: Callable[[Carry], Carry],
    carry: Carry,
    query_marks: Marks,
    key_marks: Marks,
    rule: MaskRule,
) -> Carry:
    """Skip a tile if no query sees a key, judged by the least and greatest position and segment of
    the tile.
    """
    smallest = functools.partial(jnp.min, axis=-1)
    largest = functools.partial(jnp.max, axis=-1)
    assert query_marks.positions is not None
    assert key_marks.positions is not None
    # Judged by extremes, which are cheap. A tile that is skipped costs no product, unlike a mask.
    needed = None
    if rule.causal:
        needed = largest(query_marks.positions) >= smallest(key_marks.positions)
    if needed is not None and rule.window is not None:
        needed &= smallest(query_marks.positions) - largest(key_marks.positions) < rule.window
    if query_marks.segments is not None and key_marks.segments is not None:
        segments_overlap = (largest(query_marks.segments) >= smallest(key_marks.segments)) & (
            largest(key_marks.segments) >= smallest(query_marks.segments)
        )
        needed = segments_overlap if needed is None else needed & segments_overlap
    return (
        update(carry)
        if needed is None
        else lax.cond(jnp.any(needed), update, lambda carry: carry, carry)
    )


def _split_tiles(x: Array, dim: int, fill: float = 0) -> Array:
    """Cut a dim, counted from the end, into tiles, [tiles, ..., tile, ...].

    The last tile may be padded.
    """
    length = x.shape[dim]
    count = -(-length // TILE)
    if count == 1:
        return x[None]
    # Equal tiles with little padding, not full ones and a small last one.
    size = -(-length // count)
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, count * size - length)
    x = jnp.pad(x, widths, constant_values=fill)
    dim_index = x.ndim + dim
    return jnp.moveaxis(
        x.reshape(*x.shape[:dim_index], count, size, *x.shape[dim_index + 1 :]), dim_index, 0
    )


def _split_keys(keys: Keys) -> Keys:
    return Keys(
        _split_tiles(keys.key, -2),
        _split_tiles(keys.value, -2),
        _split_marks(keys.marks, _PADDING_POSITION),
    )


def _split_queries(queries: Queries) -> Queries:
    query, d_out, logsumexp, delta, marks = queries
    # a padded query has no weights: exp(score - 1e30) = 0
    rows = _split_tiles(logsumexp, -1, -HIDDEN), _split_tiles(delta, -1), _split_marks(marks, -1)
    return Queries(_split_tiles(query, -2), _split_tiles(d_out, -2), *rows)


def _split_marks(marks: Marks, position: int) -> Marks:
    assert marks.positions is not None
    segments = None if marks.segments is None else _split_tiles(marks.segments, -1)
    return Marks(_split_tiles(marks.positions, -1, position), segments)


def _join_tiles(x: Array, dim: int, length: int) -> Array:
    """Undo `_split_tiles`."""
    x = jnp.moveaxis(x, 0, dim - 1)
    dim_index = x.ndim + dim
    x = x.reshape(*x.shape[: dim_index - 1], -1, *x.shape[dim_index + 1 :])
    return lax.slice_in_dim(x, 0, length, axis=dim_index - 1)


def _scan(f: Callable, carry: Carry, xs: PyTree) -> tuple[Carry, PyTree]:
    """Return `lax.scan(f, carry, xs)`; a single tile needs no loop."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(f, carry, xs)
    carry, y = f(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], y)
