"""`power_sgd`: send two thin factors instead of a gradient matrix."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import (
    PyTree,
    calling,
    check_count,
    check_is_number,
    leaves_with_paths,
    type_error,
    value_error,
)
from shardopt.core._axis import AxisName
from shardopt.core._reducer import Dtypes, MessageCodec, Reducer, Values
from shardopt.reducers._mean import mean_bytes, mean_of
from shardopt.reducers._reducer import make_reducer, real_dtype, real_form

STACKED = r"^blocks/(?!\d+(/|$))"
"""Matches the stacked leaves of a `BlockModel`, whose dim 0 counts blocks; not the leaves of a list
of blocks.
"""


Factors = list[jax.Array | None]


class PowerSGDState(NamedTuple):
    """The state of `power_sgd`, the same on all devices.

    Attributes:
      factors: Q [layers, columns, rank] of each compressed leaf, `Uncompressed()` for the others.
    """

    factors: PyTree


class Uncompressed(NamedTuple):
    """Stands for the factor of a leaf that is not compressed.

    None would not do: trees of parameters have None where there is no leaf.
    """


class Matrices(NamedTuple):
    """A leaf as `layers` matrices of `rows` times `columns`, to be compressed to `rank`."""

    layers: int
    rows: int
    columns: int
    rank: int


@calling("power_sgd")
def power_sgd(
    rank: int = 4, *, min_ratio: float = 2.0, stacked: str = STACKED, seed: int = 0
) -> Reducer:
    """Average gradients as products of two thin factors; use it with `error_feedback`.

    Each leaf is a matrix M_d [a, c]. A call computes P = orth(mean_d(M_d Q)) and Q = mean_d(M_d^T
    P). The mean is estimated as P Q^T, and the next call starts from this Q. Dims are grouped into
    rows and columns such that a + c is smallest.

    Args:
      rank: the number of columns of the factors.
      min_ratio: a leaf is sent uncompressed if the factors are not smaller than the leaf by this
        ratio. Leaves with fewer than two dims, not counting the dim of layers, are sent
        uncompressed too.
      stacked: regular expression, searched in key paths, for leaves whose dim 0 counts layers. Each
        layer is then one matrix. By default the leaves of a `BlockModel`; "$^" for none.
      seed: the seed of the random first Q.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `rank` is below 1, `min_ratio` below 0, or `stacked` no regular
        expression.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.power_sgd(rank=4)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)  # 6 (64 + 32) 4
      2304
      >>> grads = {"w": jnp.outer(jnp.arange(64.0), jnp.ones(32))[None] * jnp.array([1.0, 3.0])[:, None, None]}
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, reducer.init(g), "data")[0], axis_name="data"))(grads)
      >>> bool(jnp.allclose(mean["w"][0], 2 * grads["w"][0], atol=1e-3))
      True

    **Equivalence**: equal to the mean up to rounding, where the rank of the mean is at most `rank`.
    For a constant gradient this holds from the second call on; at full rank it holds at once. With
    `error_feedback` nothing is lost over time. Leaves that are not compressed get the exact mean. A
    NaN or inf makes its leaf non-finite.

    **Placement**: Q of each compressed leaf, replicated.

    **Communication** per call and device, as two all-reduces per bucket: 2(N-1)/N times

    - rank (a + c) elements per compressed matrix, in fp32 or wider, and
    - the elements of all other leaves, in their dtype.

    Each buffer is padded to a multiple of N.

    References:
      Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization", 2019, algorithm 1.
    """
    check_count("rank", rank)
    check_is_number("min_ratio", min_ratio)
    if min_ratio < 0:
        raise value_error(f"min_ratio must not be negative, got {min_ratio}.")
    functions = _PowerSGD(int(rank), min_ratio, _compile_pattern(stacked), seed)
    return make_reducer(
        f"power_sgd(rank={rank})",
        init=functions.init,
        send=functions.send,
        count_bytes=functions.count_bytes,
        codec=MessageCodec(_write_factors, _read_factors),
    )


@dataclasses.dataclass(frozen=True)
class _PowerSGD:
    """The functions of `power_sgd`, over lists of real arrays.

    The arguments are as in `make_reducer`.
    """

    rank: int
    min_ratio: float
    stacked: re.Pattern[str]
    seed: int

    def matrices(self, params: PyTree) -> list[Matrices | None]:
        """Return the matrices as which each leaf is compressed.

        None for a leaf that is not compressed.
        """
        return [
            _matrices_of(path, leaf, self.rank, self.min_ratio, self.stacked)
            for path, leaf in leaves_with_paths(params)
        ]

    def init(self, params: PyTree) -> PowerSGDState:
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(self.seed), max(1, len(leaves)))
        factors = [
            (None if matrices is None else _random_factor(key, matrices, real_form(leaf).dtype))
            for key, matrices, leaf in zip(keys, self.matrices(params), leaves, strict=False)
        ]
        return _state_of(treedef, factors)

    def send(
        self, values: Values, dtypes: Dtypes, state: PowerSGDState, axis_name: AxisName
    ) -> tuple[Values, Values, PowerSGDState]:
        factors, treedef = _factors_of(state)
        means, residuals, factors = _power_iteration(values, dtypes, factors, axis_name)
        return means, residuals, _state_of(treedef, factors)

    def count_bytes(self, params: PyTree, axis_size: int) -> int:
        p_sizes = []
        p_dtypes = []
        q_sizes = []
        value_dtypes = []
        for leaf, matrices in zip(jax.tree.leaves(params), self.matrices(params), strict=True):
            form = real_form(leaf)
            value_dtypes.append(form.dtype)
            if matrices is None:
                p_sizes.append(form.size)
                p_dtypes.append(real_dtype(leaf.dtype))
                q_sizes.append(0)
            else:
                p_sizes.append(matrices.layers * matrices.rows * matrices.rank)
                p_dtypes.append(form.dtype)
                q_sizes.append(matrices.layers * matrices.columns * matrices.rank)
        return mean_bytes(p_sizes, value_dtypes, p_dtypes, axis_size) + mean_bytes(
            q_sizes, value_dtypes, value_dtypes, axis_size
        )


def _power_iteration(
    values: Values, dtypes: Dtypes, factors: Factors, axis_name: AxisName
) -> tuple[Values, Values, Factors]:
    """Return (means, residuals, new factors); a value whose factor is None gets the exact mean."""
    matrices = [
        value if q is None else _as_matrices(value, q)
        for value, q in zip(values, factors, strict=True)
    ]
    projections = [
        m if q is None else _product("lac,lcr->lar", m, q)
        for m, q in zip(matrices, factors, strict=True)
    ]
    wire_dtypes = [
        dtype if q is None else value.dtype
        for value, dtype, q in zip(values, dtypes, factors, strict=True)
    ]
    # P is linear in M, so the mean of the products is the product of the mean. A Q that each device
    # had for itself would break that, so Q is the same on all.
    means, residuals = mean_of(projections, wire_dtypes, axis_name)
    compressed = [i for i, q in enumerate(factors) if q is not None]
    # Each device orthogonalises the same P, so no device has to send its basis.
    bases = {i: _basis(means[i]) for i in compressed}
    mean_factors, _ = mean_of(
        [_product("lac,lar->lcr", matrices[i], bases[i]) for i in compressed],
        [values[i].dtype for i in compressed],
        axis_name,
    )
    new_factors = list(factors)
    for i, q in zip(compressed, mean_factors, strict=True):
        means[i] = _product("lar,lcr->lac", bases[i], q).reshape(values[i].shape)
        # summed over devices: the sum of the values minus N times the estimate
        residuals[i] = values[i] - means[i]
        new_factors[i] = q
    return means, residuals, new_factors


def _write_factors(
    values: Values, dtypes: Dtypes, state: PowerSGDState
) -> tuple[list[PyTree], PowerSGDState]:
    """Return a message with P and Q of one sender's matrices, and with the values that are not
    compressed.
    """
    factors, treedef = _factors_of(state)
    message: list[PyTree] = []
    new_factors = list(factors)
    for i, (value, q, dtype) in enumerate(zip(values, factors, dtypes, strict=True)):
        if q is None:
            message.append(value.astype(dtype))
            continue
        matrices = _as_matrices(value, q)
        basis = _basis(_product("lac,lcr->lar", matrices, q))
        new_factors[i] = _product("lac,lar->lcr", matrices, basis)
        message.append((basis, new_factors[i]))
    return message, _state_of(treedef, new_factors)


def _factors_of(state: PowerSGDState) -> tuple[Factors, Any]:
    """Return the factor of each leaf, None for a leaf that is not compressed."""
    factors, treedef = jax.tree.flatten(
        state.factors, is_leaf=lambda node: isinstance(node, Uncompressed)
    )
    return [None if isinstance(q, Uncompressed) else q for q in factors], treedef


def _state_of(treedef: Any, factors: Factors) -> PowerSGDState:
    return PowerSGDState(treedef.unflatten([Uncompressed() if q is None else q for q in factors]))


def _read_factors(
    message: list[PyTree], shapes: Sequence[jax.Array | jax.ShapeDtypeStruct], dtypes: Dtypes
) -> Values:
    return [
        (
            _product("lar,lcr->lac", *encoded).reshape(shape.shape)
            if isinstance(encoded, tuple)
            else encoded.astype(shape.dtype)
        )
        for encoded, shape in zip(message, shapes, strict=True)
    ]


def _matrices_of(
    path: str,
    leaf: jax.Array | jax.ShapeDtypeStruct,
    rank: int,
    min_ratio: float,
    stacked_pattern: re.Pattern[str],
) -> Matrices | None:
    """Return the matrices as which a leaf is compressed; None for a leaf that is not compressed."""
    shape = tuple(leaf.shape)
    layers, dims = (shape[0], shape[1:]) if shape and stacked_pattern.search(path) else (1, shape)
    if len(dims) < 2 or not math.prod(shape) or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return None
    splits = [(math.prod(dims[:i]), math.prod(dims[i:])) for i in range(1, len(dims))]
    rows, columns = min(splits, key=sum)
    rank = min(rank, rows, columns)
    if rows * columns < min_ratio * rank * (rows + columns):
        return None
    return Matrices(layers, rows, columns, rank)


def _random_factor(key: jax.Array, matrices: Matrices, dtype: np.dtype) -> jax.Array:
    return jax.random.normal(key, (matrices.layers, matrices.columns, matrices.rank), dtype)


def _as_matrices(value: jax.Array, q: jax.Array) -> jax.Array:
    layers, columns, _ = q.shape
    return value.reshape(layers, -1, columns)


def _basis(x: jax.Array) -> jax.Array:
    """Return orthonormal columns for each matrix [rows, rank] of [layers, rows, rank].

    On CPU the matrices run one after another. LAPACK would spread a batch over threads on which
    other simulated devices wait in collectives.
    """

    def orthonormalize(m):
        return jnp.linalg.qr(m)[0]

    return jax.lax.platform_dependent(
        x, cpu=lambda x: jax.lax.map(orthonormalize, x), default=orthonormalize
    )


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # On a TPU the default rounds fp32 factors to bf16. A mean of low rank would then not be exact.
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)


def _compile_pattern(stacked: str) -> re.Pattern[str]:
    if not isinstance(stacked, str):
        raise type_error(f"stacked must be a regular expression, got {stacked!r}.")
    try:
        return re.compile(stacked)
    except re.error as error:
        raise value_error(f"stacked={stacked!r} is no regular expression: {error}.") from error
