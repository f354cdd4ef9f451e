"""`soap`: Adam in the eigenbasis of Shampoo's second moments; the basis is updated slowly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core import PyTree, calling, wide_zeros, widened
from shardopt.optimizers import _sides as sides
from shardopt.optimizers._matrices import Matrices
from shardopt.optimizers._sides import Number, Pair, Side

CALLER = "soap"
_FIRST_ITERATIONS = 10
"""The number of orthogonal iterations of the first step, starting from the identity."""


class SoapState(NamedTuple):
    """The state of `soap` for leaves that hold matrices [..., m, n].

    Attributes:
      step: int32, the number of gradients so far.
      mu: the moving mean of gradients, in the shape of the leaf.
      nu: the moving mean of squared gradients in the eigenbasis, in the shape of the leaf.
      left: the moving mean of G G^T, [..., m, m]; None for a side longer than `max_dim`.
      right: the moving mean of G^T G, [..., n, n]; None for a side longer than `max_dim`.
      left_basis: the approximate eigenvectors of `left`, as columns.
      right_basis: the approximate eigenvectors of `right`, as columns.
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    left: PyTree
    right: PyTree
    left_basis: PyTree
    right_basis: PyTree


def soap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Number = 0.95,
    b2: Number = 0.95,
    eps: Number = 1e-8,
    ridge: Number = 1e-4,
    weight_decay: Number = 0.0,
    interval: int = 10,
    max_dim: int = 8192,
    matrices: Matrices = None,
) -> optax.GradientTransformationExtraArgs:
    """Run Adam in the eigenbasis of each matrix's second moments.

    Use AdamW for leaves that are not matrices.

    Args:
      learning_rate: a number or a schedule, also for AdamW.
      b1: decay of the mean of gradients, also for AdamW.
      b2: decay of the means of squares, of L and of R, also for AdamW.
      eps: added to the root of the second moment, also for AdamW.
      ridge: added to the diagonals of L and R before an orthogonal iteration, as a fraction of the
        mean of the diagonal.
      weight_decay: decoupled weight decay, also for AdamW.
      interval: the number of steps from one orthogonal iteration to the next.
      max_dim: sides that are longer are not rotated.
      matrices: rules `[(regex, so.optimizers.Matrix), ...]`. The regex is searched in key paths,
        and the first match wins; None instead of a `Matrix` for leaves that are not matrices. By
        default the leaves of two dims.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if an argument is out of range; in `init`, if a rule matches nothing or does not
        fit its leaf.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.optimizers.soap(0.1, matrices=[("qkv$", so.optimizers.Matrix(rows=1, columns=(3, 4)))])
      >>> params = {"qkv": jnp.ones((2, 8, 3, 2, 4)), "norm": jnp.ones((2, 8))}  # [L, D, 3, H, K], [L, D]
      >>> state = tx.init(params).inner_states["matrices"].inner_state[0]
      >>> state.nu["qkv"].shape, state.left["qkv"].shape, state.right["qkv"].shape
      ((2, 8, 3, 2, 4), (2, 3, 8, 8), (2, 3, 8, 8))

    For a gradient G [m, n], let L, R and M be the moving means of G G^T, G^T G and G. Let Q_L and
    Q_R be the eigenvectors of L and R:

        V <- b2 V + (1 - b2) (Q_L^T G Q_R)^2
        W <- W - learning_rate (Q_L ((Q_L^T M Q_R) / (sqrt(V) + eps)) Q_R^T + weight_decay W)

    M and V are bias corrected. Every `interval` steps, Q_L is updated by one step of orthogonal
    iteration, Q_L <- qr((L + ridge tr(L)/m I) Q_L), and Q_R likewise. The first gradient only
    initialises L, R and the bases, by several iterations from the identity; its update is zero.

    The ridge does not change eigenvectors. Directions without any gradient have no preferred basis:
    the ridge keeps them from following rounding errors. It also slows down directions with very
    small gradients.

    **Equivalence**: a plain optax transformation. Under any strategy it equals one device, up to
    summation order.

    **Placement**: a leaf holds its two moments, in fp32 or wider. Each of its matrices has 2 m^2 +
    2 n^2 more numbers, in leaves [..., m, m] and [..., n, n]. The first dims of these leaves are
    the dims that count matrices.

    **Communication**: none. Products and factorisations are batched over the dims that count
    matrices, and the partitioner leaves such a batch sharded. For an eigendecomposition, XLA:TPU
    would gather the batch. If these dims are sharded, as blocks are, each device works only on the
    matrices that it owns. If rows or columns are sharded, the partitioner gathers the matrices.

    References:
      Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson and Kakade, "SOAP: Improving and
      Stabilizing Shampoo using Adam", 2024, algorithms 3 and 4.
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "ridge": ridge, "weight_decay": weight_decay}
    scale = _scale_by_soap(b1, b2, eps, ridge, interval, max_dim, matrices)
    return sides.on_matrices(CALLER, scale, learning_rate, matrices, max_dim, interval, **numbers)


def _scale_by_soap(
    b1: Number,
    b2: Number,
    eps: Number,
    ridge: Number,
    interval: int,
    max_dim: int,
    matrices: Matrices,
) -> optax.GradientTransformation:
    @calling(CALLER)
    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        leaf_matrices = sides.matrices_of(matrices, params)
        moments, bases = (
            [sides.zero_sides(*args, max_dim) for args in zip(leaves, leaf_matrices, strict=True)]
            for _ in range(2)
        )
        bases = [(_identity_like(left), _identity_like(right)) for left, right in bases]
        side_trees = (*sides.as_trees(treedef, moments), *sides.as_trees(treedef, bases))
        return SoapState(
            jnp.zeros((), jnp.int32), wide_zeros(params), wide_zeros(params), *side_trees
        )

    @calling(CALLER)
    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates)
        leaf_matrices = sides.matrices_of(matrices, updates)
        wide = [widened(leaf) for leaf in leaves]
        bases = sides.as_pairs(treedef, state.left_basis, state.right_basis)
        # The first gradient only makes the basis. In its own basis it would be diagonal, except for
        # rounding errors.
        after_first = state.step > 0
        count = jnp.maximum(state.step, 1)
        mu = []
        nu = []
        new_updates = []
        moments = zip(treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu), strict=True)
        for g, leaf, matrix, basis, (m, v) in zip(
            wide, leaves, leaf_matrices, bases, moments, strict=True
        ):

            def rotate(x, *, into_basis, matrix=matrix, basis=basis):
                return matrix.leaf(
                    sides.multiply_sides(basis, matrix.of(x), into_basis=into_basis), x.shape
                )

            mu.append(jnp.where(after_first, sides.moving_mean(m, g, b1), m))
            nu.append(
                jnp.where(
                    after_first, sides.moving_mean(v, jnp.square(rotate(g, into_basis=True)), b2), v
                )
            )
            mean = rotate(sides.unbiased(mu[-1], b1, count), into_basis=True)
            scaled = mean / (
                jnp.sqrt(sides.unbiased(nu[-1], b2, count)) + jnp.asarray(eps, g.dtype)
            )
            new_updates.append(rotate(scaled, into_basis=False).astype(leaf.dtype))

        pairs = zip(
            wide, leaf_matrices, sides.as_pairs(treedef, state.left, state.right), strict=True
        )
        second_moments = [sides.second_moments(matrix.of(g), pair, b2) for g, matrix, pair in pairs]
        moments_and_bases = zip(second_moments, bases, strict=True)
        bases = [
            _update_bases(pair, basis, state.step, interval, ridge)
            for pair, basis in moments_and_bases
        ]
        side_trees = (*sides.as_trees(treedef, second_moments), *sides.as_trees(treedef, bases))
        return treedef.unflatten(new_updates), SoapState(
            jnp.asarray(optax.safe_increment(state.step)),
            treedef.unflatten(mu),
            treedef.unflatten(nu),
            *side_trees,
        )

    return optax.GradientTransformation(init, update)


def _update_bases(
    moments: Pair, bases: Pair, step: jax.Array, interval: int, ridge: Number
) -> Pair:
    """Return the bases of a leaf after the orthogonal iterations of this step."""

    def iterate(bases: Pair) -> Pair:
        return _orthogonal_iteration(moments[0], bases[0], ridge), _orthogonal_iteration(
            moments[1], bases[1], ridge
        )

    def iterate_first(bases: Pair) -> Pair:
        return jax.lax.fori_loop(0, _FIRST_ITERATIONS, lambda _, carry: iterate(carry), bases)

    branch_index = jnp.where(step == 0, 0, jnp.where(step % interval == 0, 1, 2))
    return jax.lax.switch(
        branch_index, (iterate_first, iterate, lambda unchanged: unchanged), bases
    )


def _orthogonal_iteration(moment: Side, basis: Side, ridge: Number) -> Side:
    """Return qr((S + ridge tr(S)/m I) Q) for the second moment S [m, m] and the basis Q.

    Q if S is zero.
    """
    if moment is None or basis is None:
        return None
    eye = jnp.eye(moment.shape[-1], dtype=bool)
    mean = jnp.mean(jnp.sum(jnp.where(eye, moment, 0), -1, keepdims=True), -2, keepdims=True)
    shift = jnp.where(mean > 0, jnp.asarray(ridge, mean.dtype) * mean, jnp.ones_like(mean))
    return orthonormal(sides.product(moment, basis) + shift * basis)


def _identity_like(zeros: Side) -> Side:
    return (
        None
        if zeros is None
        else jnp.broadcast_to(jnp.eye(zeros.shape[-1], dtype=zeros.dtype), zeros.shape)
    )


def orthonormal(x: jax.Array) -> jax.Array:
    """Return Q of X = Q R, for X [..., m, m] of full rank; the signs of columns are arbitrary.

    The method depends on the backend. TPU and GPU use `jnp.linalg.qr`, which XLA:TPU leaves sharded
    over its batch. On CPU that would be LAPACK, which spreads a batch over threads on which other
    simulated devices wait in collectives: with several simulated devices the step hangs. So CPU
    runs modified Gram-Schmidt twice. A single run loses more digits the worse X is conditioned.

    Example:
      >>> import jax.numpy as jnp
      >>> print(abs(orthonormal(jnp.array([[3.0, 1.0], [4.0, 7.0]]))).round(3))
      [[0.6 0.8]
       [0.8 0.6]]
    """
    return jax.lax.platform_dependent(
        x, cpu=lambda x: _gram_schmidt(_gram_schmidt(x)), default=lambda x: jnp.linalg.qr(x)[0]
    )


def _gram_schmidt(x: jax.Array) -> jax.Array:
    column_index = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)

    def normalize_column(j: jax.Array, x: jax.Array) -> jax.Array:
        v = jnp.sum(jnp.where(column_index == j, x, jnp.zeros_like(x)), -1, keepdims=True)
        v = v / jnp.sqrt(jnp.sum(jnp.square(v), -2, keepdims=True))
        projected = x - v * jnp.sum(v * x, -2, keepdims=True)
        return jnp.where(column_index > j, projected, jnp.where(column_index == j, v, x))

    return jax.lax.fori_loop(0, x.shape[-1], normalize_column, x)
