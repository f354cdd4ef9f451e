"""Attention tile by tile in plain XLA, with the softmax merged online: never more than a tile of scores.

`absorb` takes in one block of keys after the other, `gradients` is its backward pass for one block; who calls them decides
where blocks come from: `ring` from the neighbours, `exchange` from a gather.

Suffixes: B sequences, G heads of keys and values, R heads of queries to each of them, T queries, S keys, K width. Heads come
before positions here, so that the products need no transposes.
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

from shardopt.core.types import PyTree

NAME = "attention"
"""The `checkpoint_name` of what is mixed, and of the logarithm of its sum."""
TILE = 512
"""How many queries, and how many keys, are held against each other at a time."""
HIDDEN = -1e30
"""The score of a key that a query does not see; finite, so that a row of them alone has no NaN."""
_NOWHERE = np.iinfo(np.int32).max  # the position of what pads keys: after every query
Carry = TypeVar("Carry")


class Rule(NamedTuple):
    """Which positions see which: as in `so.nn.attention`."""

    causal: bool
    window: int | None


class Marks(NamedTuple):
    """What a mask compares of each token.

    Attributes:
      positions: [1 or B, T], int32; None: the order in which they stand.
      segments: [B, T], or None: all of one.
    """

    positions: Int[Array, "#B T"] | None
    segments: Int[Array, "B T"] | None


class State(NamedTuple):
    """The softmax so far.

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
    """Return them with heads before positions, those of queries by the head of keys that they use."""
    B, T, H, K = query.shape
    G = key.shape[2]
    grouped = jnp.transpose(query.reshape(B, T, G, H // G, K), (0, 2, 3, 1, 4))
    return grouped, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)


def heads_last(mixed: Float[Array, "B G R T K"]) -> Float[Array, "B T H K"]:
    """Undo `heads_first`."""
    B, G, R, T, K = mixed.shape
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(B, T, G * R, K)


def start(query: Float[Array, "B G R T K"]) -> State:
    """Return the state before any key was seen."""
    wide = _wide(query)
    return State(
        jnp.full(query.shape[:-1], HIDDEN, wide), jnp.zeros(query.shape[:-1], wide), jnp.zeros(query.shape, wide)
    )


def absorb(
    state: State,
    query: Float[Array, "B G R T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    seeing: Marks,
    seen: Marks,
    rule: Rule,
) -> State:
    """Return the state after a block of keys: m' = max(m, m_i), l' = l e^(m-m') + l_i e^(m_i-m'), o' likewise.

    The marks must have positions. A query that sees no key of this nor of any other block has no defined result.
    """
    states = State(_tiled(state.top, -1), _tiled(state.total, -1), _tiled(state.mixed, -2))
    rows = _tiled(query, -2), _tiled_marks(seeing, -1), states
    columns = _tiled(key, -2), _tiled(value, -2), _tiled_marks(seen, _NOWHERE)

    def of_query(_: None, row: tuple[Array, Marks, State]) -> tuple[None, State]:
        query, seeing, state = row

        def of_key(state: State, column: tuple[Array, Array, Marks]) -> tuple[State, None]:
            key, value, seen = column
            update = lambda state: _absorbed(state, query, key, value, seeing, seen, rule)  # noqa: E731
            return _where_needed(update, state, seeing, seen, rule), None

        return None, _scanned(of_key, state, columns)[0]

    _, states = _scanned(of_query, None, rows)
    joined = functools.partial(_joined, length=query.shape[-2])
    return State(joined(states.top, -1), joined(states.total, -1), joined(states.mixed, -2))


def finish(state: State, dtype: DTypeLike) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G R T"]]:
    """Return o / l in a dtype, and m + log l, both named: where they are kept, the forward pass is not run again."""
    mixed, logsumexp = state.mixed / state.total[..., None], state.top + jnp.log(state.total)
    return checkpoint_name(mixed.astype(dtype), NAME), checkpoint_name(logsumexp, NAME)


def delta_of(
    out: Float[Array, "B G R T K"], d_out: Float[Array, "B G R T K"], logsumexp: Float[Array, "B G R T"]
) -> Float[Array, "B G R T"]:
    """Return sum_k out dout, which `gradients` of every block takes."""
    return jnp.sum(d_out.astype(logsumexp.dtype) * out.astype(logsumexp.dtype), axis=-1)


def gradients(
    query: Float[Array, "B G R T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    logsumexp: Float[Array, "B G R T"],
    delta: Float[Array, "B G R T"],
    d_out: Float[Array, "B G R T K"],
    seeing: Marks,
    seen: Marks,
    rule: Rule,
) -> tuple[Float[Array, "B G R T K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """Return what one block of keys adds to dQ, and what these queries add to its dK and dV, in float32 at least.

    With p = exp(score - logsumexp) over all keys, and delta = sum_k out dout: dv = p^T dout, ds = p (dout v^T - delta).
    """
    wide = _wide(query)
    # a padded query has no weights: exp(score - 1e30) = 0
    rows = _tiled(query, -2), _tiled(d_out, -2), _tiled(delta, -1), _tiled(logsumexp, -1, -HIDDEN)
    rows = *rows, _tiled_marks(seeing, -1)
    columns = _tiled(key, -2), _tiled(value, -2), _tiled_marks(seen, _NOWHERE)
    d_columns = jnp.zeros(columns[0].shape, wide), jnp.zeros(columns[1].shape, wide)

    def of_query(
        sums: tuple[Array, Array], row: tuple[Array, Array, Array, Array, Marks]
    ) -> tuple[tuple[Array, Array], Array]:
        query, d_out, delta, logsumexp, seeing = row

        def of_key(dq: Array, column: tuple) -> tuple[Array, tuple[Array, Array]]:
            (key, value, seen), sums = column

            def update(found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                more = _gradients(query, key, value, logsumexp, delta, d_out, seeing, seen, rule)
                return jax.tree.map(jnp.add, found, more)

            dq, dk, dv = _where_needed(update, (dq, *sums), seeing, seen, rule)
            return dq, (dk, dv)

        dq, sums = _scanned(of_key, jnp.zeros(query.shape, wide), (columns, sums))
        return sums, dq

    (dk, dv), dq = _scanned(of_query, d_columns, rows)
    length = key.shape[-2]
    return _joined(dq, -2, query.shape[-2]), _joined(dk, -2, length), _joined(dv, -2, length)


def _absorbed(state: State, query: Array, key: Array, value: Array, seeing: Marks, seen: Marks, rule: Rule) -> State:
    scores = _scores(query, key, seeing, seen, rule)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    # Where all is hidden these are 1: the first key that is seen multiplies them by exp(-1e30) = 0.
    weights = jnp.exp(scores - top[..., None])
    kept = jnp.exp(state.top - top)
    mixed = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(value.dtype), value, preferred_element_type=weights.dtype)
    return State(top, state.total * kept + jnp.sum(weights, axis=-1), state.mixed * kept[..., None] + mixed)


def _gradients(
    query: Array,
    key: Array,
    value: Array,
    logsumexp: Array,
    delta: Array,
    d_out: Array,
    seeing: Marks,
    seen: Marks,
    rule: Rule,
) -> tuple[Array, Array, Array]:
    product = functools.partial(jnp.einsum, preferred_element_type=_wide(query))
    p = jnp.exp(_scores(query, key, seeing, seen, rule) - logsumexp[..., None])
    dp = product("bgrtk,bgsk->bgrts", d_out, value)
    ds = (p * (dp - delta[..., None]) * query.shape[-1] ** -0.5).astype(query.dtype)
    dv = product("bgrts,bgrtk->bgsk", p.astype(value.dtype), d_out)
    return product("bgrts,bgsk->bgrtk", ds, key), product("bgrts,bgrtk->bgsk", ds, query), dv


def _scores(query: Array, key: Array, seeing: Marks, seen: Marks, rule: Rule) -> Float[Array, "B G R T S"]:
    scores = jnp.einsum("bgrtk,bgsk->bgrts", query, key, preferred_element_type=_wide(query))
    hidden = jnp.where(sees(seeing, seen, rule), 0, HIDDEN).astype(scores.dtype)
    return scores * query.shape[-1] ** -0.5 + hidden[:, None, None]


def sees(seeing: Marks, seen: Marks, rule: Rule) -> Bool[Array, "#B T S"]:
    """Return which key each query sees."""
    assert seeing.positions is not None
    assert seen.positions is not None
    query, key = seeing.positions[:, :, None], seen.positions[:, None, :]
    mask = query >= key if rule.causal else jnp.broadcast_to(key < _NOWHERE, (*query.shape[:2], key.shape[2]))
    if rule.window is not None:
        mask = mask & (query - key < rule.window)
    if seeing.segments is not None and seen.segments is not None:
        mask = mask & (seeing.segments[:, :, None] == seen.segments[:, None, :])
    return mask


def _where_needed(update: Callable[[Carry], Carry], carry: Carry, seeing: Marks, seen: Marks, rule: Rule) -> Carry:
    """Skip a tile in which no query sees a key, as least and greatest position and segment tell."""
    least, most = functools.partial(jnp.min, axis=-1), functools.partial(jnp.max, axis=-1)
    assert seeing.positions is not None
    assert seen.positions is not None
    needed = None
    if rule.causal:
        needed = most(seeing.positions) >= least(seen.positions)
    if needed is not None and rule.window is not None:
        needed &= least(seeing.positions) - most(seen.positions) < rule.window
    if seeing.segments is not None and seen.segments is not None:
        shared = (most(seeing.segments) >= least(seen.segments)) & (most(seen.segments) >= least(seeing.segments))
        needed = shared if needed is None else needed & shared
    return update(carry) if needed is None else lax.cond(jnp.any(needed), update, lambda carry: carry, carry)


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _tiled(x: Array, dim: int, fill: float = 0) -> Array:
    """Cut a dim, counted from the end, into tiles, which come first: [tiles, ..., tile, ...]; the last may be padded."""
    length = x.shape[dim]
    count = _tiles(length)
    if count == 1:
        return x[None]
    size = -(-length // count)
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, count * size - length)
    x = jnp.pad(x, widths, constant_values=fill)
    at = x.ndim + dim
    return jnp.moveaxis(x.reshape(*x.shape[:at], count, size, *x.shape[at + 1 :]), at, 0)


def _tiled_marks(marks: Marks, position: int) -> Marks:
    assert marks.positions is not None
    segments = None if marks.segments is None else _tiled(marks.segments, -1)
    return Marks(_tiled(marks.positions, -1, position), segments)


def _joined(x: Array, dim: int, length: int) -> Array:
    """Undo `_tiled`."""
    x = jnp.moveaxis(x, 0, dim - 1)
    at = x.ndim + dim
    x = x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])
    return lax.slice_in_dim(x, 0, length, axis=at - 1)


def _scanned(f: Callable, carry: Carry, xs: PyTree) -> tuple[Carry, PyTree]:
    """Return `lax.scan(f, carry, xs)`; of one tile there is no loop."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(f, carry, xs)
    carry, y = f(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], y)


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
