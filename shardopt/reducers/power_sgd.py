"""`power_sgd`: two thin factors in place of a matrix."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.arguments import check_count, check_is_number
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, leaves_with_paths, wide_dtype
from shardopt.reducers.axis import AxisName
from shardopt.reducers.error_feedback import warm_up
from shardopt.reducers.mean import mean_bytes, mean_of
from shardopt.reducers.reducer import Dtypes, MessageCodec, Reducer, Values, make_reducer, real_dtype, real_shape

STACKED = r"^blocks/(?!\d+(/|$))"
"""Leaves of a `BlockModel`: dim 0 counts blocks. Not those of a list of blocks."""


Factors = list[jax.Array | None]


class PowerSGDState(NamedTuple):
    """The state of `power_sgd`, the same on all devices.

    Attributes:
      factors: Q [layers, columns, rank] of each compressed leaf, None for the others.
    """

    factors: PyTree


class Matrices(NamedTuple):
    """How a leaf is seen: `layers` matrices of `rows` times `columns`, to be compressed to `rank`."""

    layers: int
    rows: int
    columns: int
    rank: int


def power_sgd(
    rank: int = 4, *, start_step: int = 0, min_ratio: float = 2.0, stacked: str = STACKED, seed: int = 0
) -> Reducer:
    """Average gradients as products of two thin factors; use it with `error_feedback`.

    Each leaf is a matrix M_d of a rows and c columns. P = orth(mean_d(M_d Q)); Q = mean_d(M_d^T P); the mean is
    estimated as P Q^T, and Q starts the next call. Dims are grouped into rows and columns where a + c is smallest.

    **Equivalence**: the mean where its rank is at most `rank`, up to rounding, from the second call on for a constant
    gradient and at once at full rank; with `error_feedback` nothing is lost over time. Leaves that are not compressed
    get the plain mean. A NaN or inf makes its leaf non-finite.

    **Placement**: Q of each compressed leaf, replicated.

    **Communication** a call, per device, as two all-reduces a bucket: 2(N-1)/N (rank (a + c) per compressed matrix, in
    fp32 or wider, + the elements of all other leaves, in their dtype). Each is padded to a multiple of N.

    Args:
      rank: columns of the factors.
      start_step: calls before this one send the plain mean: short for `warm_up(power_sgd(...), start_step)`.
      min_ratio: leaves that the factors would not shrink by this go uncompressed, as do those with less than two
        dims (blocks apart).
      stacked: regular expression, searched in key paths, for leaves whose dim 0 counts layers; each layer is a matrix
        of its own. By default the leaves of a `BlockModel`; "$^" for none.
      seed: of the random Q that it starts from.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `rank` is below 1, `start_step` or `min_ratio` below 0, or `stacked` no regular expression.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.power_sgd(rank=4)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)  # 6 (64 + 32) 4
      2304
      >>> grads = {"w": jnp.outer(jnp.arange(64.0), jnp.ones(32))[None] * jnp.array([1.0, 3.0])[:, None, None]}
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, reducer.init(g), "data")[0], axis_name="data"))(grads)
      >>> bool(jnp.allclose(mean["w"][0], 2 * grads["w"][0], atol=1e-3))
      True

    References:
      Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019, algorithm 1.
    """
    check_count("power_sgd", "rank", rank)
    check_is_number("power_sgd", "min_ratio", min_ratio)
    check_count("power_sgd", "start_step", start_step, least=0)
    if min_ratio < 0:
        raise ValueError(format_error("power_sgd", f"min_ratio must not be negative, got {min_ratio}."))
    layered = _compiled(stacked)

    def views(tree):
        return [_view(path, leaf, int(rank), min_ratio, layered) for path, leaf in leaves_with_paths(tree)]

    def init(params):
        keys = jax.random.split(jax.random.key(seed), max(1, len(jax.tree.leaves(params))))
        factors = [
            None if view is None else _start(key, view, real_dtype(wide_dtype(leaf.dtype)))
            for key, view, leaf in zip(keys, views(params), jax.tree.leaves(params), strict=False)
        ]
        return PowerSGDState(jax.tree.unflatten(jax.tree.structure(params), factors))

    def send(values, dtypes, state, axis_name):
        factors, treedef = jax.tree.flatten(state.factors, is_leaf=lambda node: node is None)
        means, lefts, factors = _power_iteration(values, dtypes, factors, axis_name)
        return means, lefts, PowerSGDState(treedef.unflatten(factors))

    def count(params, axis_size):
        leaves, found = jax.tree.leaves(params), views(params)
        wide = [real_dtype(wide_dtype(leaf.dtype)) for leaf in leaves]
        first, wire = [], []
        for leaf, view, own in zip(leaves, found, wide, strict=True):
            first.append(math.prod(real_shape(leaf)) if view is None else view.layers * view.rows * view.rank)
            wire.append(real_dtype(leaf.dtype) if view is None else own)
        second = [0 if view is None else view.layers * view.columns * view.rank for view in found]
        return mean_bytes(first, wide, wire, axis_size) + mean_bytes(second, wide, wide, axis_size)

    codec = MessageCodec(_write_factors, _read_factors)
    reducer = make_reducer(f"power_sgd(rank={rank})", init=init, send=send, count=count, codec=codec)
    return warm_up(reducer, start_step) if start_step else reducer


def _power_iteration(
    values: Values, dtypes: Dtypes, factors: Factors, axis_name: AxisName
) -> tuple[Values, Values, Factors]:
    """Return (means, lefts, new factors); where a factor is None the value is averaged as it is."""
    matrices = [value if q is None else _as_matrices(value, q) for value, q in zip(values, factors, strict=True)]
    first = [m if q is None else _product("lac,lcr->lar", m, q) for m, q in zip(matrices, factors, strict=True)]
    wire = [dtype if q is None else value.dtype for value, dtype, q in zip(values, dtypes, factors, strict=True)]
    means, lefts = mean_of(first, wire, axis_name)
    low_rank = [i for i, q in enumerate(factors) if q is not None]
    bases = {i: _basis(means[i]) for i in low_rank}
    second, _ = mean_of(
        [_product("lac,lar->lcr", matrices[i], bases[i]) for i in low_rank],
        [values[i].dtype for i in low_rank],
        axis_name,
    )
    new = list(factors)
    for i, q in zip(low_rank, second, strict=True):
        means[i] = _product("lar,lcr->lac", bases[i], q).reshape(values[i].shape)
        lefts[i] = values[i] - means[i]  # over all devices: the sum of the values less N estimates
        new[i] = q
    return means, lefts, new


def _write_factors(values: Values, dtypes: Dtypes, state: PowerSGDState) -> tuple[list[PyTree], PowerSGDState]:
    """Return P and Q of one sender's own matrices, and values that are not compressed as they are."""
    factors, treedef = jax.tree.flatten(state.factors, is_leaf=lambda node: node is None)
    message: list[PyTree] = []
    new = list(factors)
    for i, (value, q, dtype) in enumerate(zip(values, factors, dtypes, strict=True)):
        if q is None:
            message.append(value.astype(dtype))
            continue
        matrices = _as_matrices(value, q)
        base = _basis(_product("lac,lcr->lar", matrices, q))
        new[i] = _product("lac,lar->lcr", matrices, base)
        message.append((base, new[i]))
    return message, PowerSGDState(treedef.unflatten(new))


def _read_factors(message: list[PyTree], shapes: Sequence[jax.Array | jax.ShapeDtypeStruct], dtypes: Dtypes) -> Values:
    return [
        _product("lar,lcr->lac", *part).reshape(like.shape) if isinstance(part, tuple) else part.astype(like.dtype)
        for part, like in zip(message, shapes, strict=True)
    ]


def _view(
    path: str, leaf: jax.Array | jax.ShapeDtypeStruct, rank: int, min_ratio: float, layered: re.Pattern[str]
) -> Matrices | None:
    """Return how a leaf is compressed, or None."""
    shape = tuple(leaf.shape)
    layers, dims = (shape[0], shape[1:]) if shape and layered.search(path) else (1, shape)
    if len(dims) < 2 or not math.prod(shape) or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return None
    splits = [(math.prod(dims[:i]), math.prod(dims[i:])) for i in range(1, len(dims))]
    rows, columns = min(splits, key=sum)
    rank = min(rank, rows, columns)
    if rows * columns < min_ratio * rank * (rows + columns):
        return None
    return Matrices(layers, rows, columns, rank)


def _start(key: jax.Array, view: Matrices, dtype: np.dtype) -> jax.Array:
    return jax.random.normal(key, (view.layers, view.columns, view.rank), dtype)


def _as_matrices(value: jax.Array, q: jax.Array) -> jax.Array:
    layers, columns, _ = q.shape
    return value.reshape(layers, -1, columns)


def _basis(x: jax.Array) -> jax.Array:
    """Return orthonormal columns for each [rows, rank] of [layers, rows, rank].

    On CPU one after another: LAPACK shares out a batch to the threads on which other simulated devices wait in collectives.
    """
    one = lambda m: jnp.linalg.qr(m)[0]  # noqa: E731
    return jax.lax.platform_dependent(x, cpu=lambda x: jax.lax.map(one, x), default=one)


def _product(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(equation, one, other, precision=jax.lax.Precision.HIGHEST)


def _compiled(stacked: str) -> re.Pattern[str]:
    if not isinstance(stacked, str):
        raise TypeError(format_error("power_sgd", f"stacked must be a regular expression, got {stacked!r}."))
    try:
        return re.compile(stacked)
    except re.error as error:
        what = f"stacked={stacked!r} is no regular expression: {error}."
        raise ValueError(format_error("power_sgd", what)) from error
