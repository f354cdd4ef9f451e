"""`soap`: Adam in the eigenbasis of Shampoo's second moments, which follows them slowly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.types import PyTree, wide_dtype
from shardopt.optimizers import sides
from shardopt.optimizers.inverse_root import product
from shardopt.optimizers.matrices import Matrices
from shardopt.optimizers.orthonormal import orthonormal
from shardopt.optimizers.sides import Number, Pair, Side

WHO = "soap"
_FIRST = 10
"""Orthogonal iterations of the first step, from the identity."""


class SoapState(NamedTuple):
    """The state of `soap` for leaves that hold matrices [..., m, n].

    Attributes:
      step: int32, gradients seen.
      mu: the mean of gradients, shaped as the leaf.
      nu: the mean of their squares within the basis, shaped as the leaf.
      left: the mean of G G^T, [..., m, m]; None on a side longer than `max_dim`.
      right: the mean of G^T G, [..., n, n].
      left_basis: eigenvectors of `left`, as columns, nearly.
      right_basis: those of `right`.
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
    """Run Adam in the eigenbasis of each matrix's second moments; AdamW for all that is no matrix.

    Of a gradient G [m, n], with moving means L of G G^T, R of G^T G, M of G, and Q_L, Q_R the eigenvectors of L and R:

        V <- b2 V + (1 - b2) (Q_L^T G Q_R)^2
        W <- W - learning_rate (Q_L ((Q_L^T M Q_R) / (sqrt(V) + eps)) Q_R^T + weight_decay W)

    with M and V bias corrected. Every `interval` steps Q <- qr((L + ridge tr(L)/m I) Q), one step of orthogonal iteration; after
    the first gradient several, from the identity. That gradient is for L and R alone: its update is zero. The ridge
    changes no eigenvector. It keeps directions that no gradient has seen, of which any basis is as good, from following
    rounding, and those with next to no gradient from being followed closely.

    **Equivalence**: a plain optax transformation: under any strategy equal to one device, up to summation order.

    **Placement**: a leaf holds its two moments, and of each of its matrices 2 m^2 + 2 n^2 numbers in leaves [..., m, m] and
    [..., n, n] whose first dims are those of the leaf that count matrices, in fp32 at least.

    **Communication**: none of its own: products and factorisations are batched over the dims that count matrices, and the
    partitioner leaves such a batch sharded (an eigendecomposition it would gather on TPU), so where these dims are sharded, as
    blocks are, every matrix is worked on by its owner alone. Where matrices are sharded within, they are gathered.

    Args:
      learning_rate: a number or a schedule, also that of AdamW.
      b1: decay of the mean of gradients, also that of AdamW.
      b2: decay of the means of squares and of L and R, also that of AdamW.
      eps: added to the root of the second moment, also that of AdamW.
      ridge: added to the diagonals of L and R before an orthogonal iteration, as a share of their mean.
      weight_decay: decoupled, also that of AdamW.
      interval: steps from one orthogonal iteration to the next.
      max_dim: sides that are longer are not rotated.
      matrices: `[(regex, so.optimizers.Matrix), ...]`, searched in key paths, first match wins, None for leaves that are no
        matrices; by default the leaves of two dims.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if one is out of range; in `init`, if a rule matches nothing or does not fit its leaf.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.optimizers.soap(0.1, matrices=[("qkv$", so.optimizers.Matrix(rows=1, columns=(3, 4)))])
      >>> params = {"qkv": jnp.ones((2, 8, 3, 2, 4)), "norm": jnp.ones((2, 8))}  # [L, D, 3, H, K], [L, D]
      >>> state = tx.init(params).inner_states["matrices"].inner_state[0]
      >>> state.nu["qkv"].shape, state.left["qkv"].shape, state.right["qkv"].shape
      ((2, 8, 3, 2, 4), (2, 3, 8, 8), (2, 3, 8, 8))

    References:
      Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson and Kakade, "SOAP: Improving and Stabilizing Shampoo using
      Adam", 2024, algorithms 3 and 4.
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "ridge": ridge, "weight_decay": weight_decay}
    scale = _scale_by_soap(b1, b2, eps, ridge, interval, max_dim, matrices)
    return sides.on_matrices(WHO, scale, learning_rate, matrices, max_dim, interval, **numbers)


def _scale_by_soap(
    b1: Number,
    b2: Number,
    eps: Number,
    ridge: Number,
    interval: int,
    max_dim: int,
    matrices: Matrices,
) -> optax.GradientTransformation:
    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        zeros = lambda: treedef.unflatten([jnp.zeros(leaf.shape, wide_dtype(leaf.dtype)) for leaf in leaves])  # noqa: E731
        found = sides.matrices_of(WHO, matrices, params)
        pairs, bases = ([sides.zero_sides(*one, max_dim) for one in zip(leaves, found, strict=True)] for _ in range(2))
        bases = [(_identity(left), _identity(right)) for left, right in bases]
        kept = (*sides.as_trees(treedef, pairs), *sides.as_trees(treedef, bases))
        return SoapState(jnp.zeros((), jnp.int32), zeros(), zeros(), *kept)

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates)
        found = sides.matrices_of(WHO, matrices, updates)
        wide = [leaf.astype(wide_dtype(leaf.dtype)) for leaf in leaves]
        bases = sides.as_pairs(treedef, state.left_basis, state.right_basis)
        # The first gradient only makes the basis: within its own it would be diagonal, and what is off it rounding.
        later, count = state.step > 0, jnp.maximum(state.step, 1)
        mu, nu, new = [], [], []
        moments = zip(treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu), strict=True)
        for g, leaf, matrix, basis, (m, v) in zip(wide, leaves, found, bases, moments, strict=True):

            def turned(x, *, into, matrix=matrix, basis=basis):
                return matrix.leaf(sides.between(basis, matrix.of(x), into=into), x.shape)

            mu.append(jnp.where(later, sides.moving_mean(m, g, b1), m))
            nu.append(jnp.where(later, sides.moving_mean(v, jnp.square(turned(g, into=True)), b2), v))
            mean = turned(sides.unbiased(mu[-1], b1, count), into=True)
            scaled = mean / (jnp.sqrt(sides.unbiased(nu[-1], b2, count)) + jnp.asarray(eps, g.dtype))
            new.append(turned(scaled, into=False).astype(leaf.dtype))

        pairs = zip(wide, found, sides.as_pairs(treedef, state.left, state.right), strict=True)
        seconds = [sides.second_moments(matrix.of(g), pair, b2) for g, matrix, pair in pairs]
        both = zip(seconds, bases, strict=True)
        bases = [_follow(second, basis, state.step, interval, ridge) for second, basis in both]
        kept = (*sides.as_trees(treedef, seconds), *sides.as_trees(treedef, bases))
        return treedef.unflatten(new), SoapState(state.step + 1, treedef.unflatten(mu), treedef.unflatten(nu), *kept)

    return optax.GradientTransformation(init, update)


def _follow(second: Pair, basis: Pair, step: jax.Array, interval: int, ridge: Number) -> Pair:
    """Return the bases of a leaf after the orthogonal iterations of this step."""

    def iterate(basis: Pair) -> Pair:
        return _iterated(second[0], basis[0], ridge), _iterated(second[1], basis[1], ridge)

    def first(basis: Pair) -> Pair:
        return jax.lax.fori_loop(0, _FIRST, lambda _, found: iterate(found), basis)

    which = jnp.where(step == 0, 0, jnp.where(step % interval == 0, 1, 2))
    return jax.lax.switch(which, (first, iterate, lambda basis: basis), basis)


def _iterated(second: Side, basis: Side, ridge: Number) -> Side:
    """Return qr((S + ridge tr(S)/m I) Q); Q where S is zero."""
    if second is None or basis is None:
        return None
    eye = jnp.eye(second.shape[-1], dtype=bool)
    mean = jnp.mean(jnp.sum(jnp.where(eye, second, 0), -1, keepdims=True), -2, keepdims=True)
    shift = jnp.where(mean > 0, jnp.asarray(ridge, mean.dtype) * mean, jnp.ones_like(mean))
    return orthonormal(product(second, basis) + shift * basis)


def _identity(zeros: Side) -> Side:
    return None if zeros is None else jnp.broadcast_to(jnp.eye(zeros.shape[-1], dtype=zeros.dtype), zeros.shape)
