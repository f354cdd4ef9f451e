"""`shampoo`: gradients between inverse roots of their own second moments, rows on the left, columns on the right."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.types import PyTree, wide_dtype
from shardopt.optimizers import sides
from shardopt.optimizers.inverse_root import inverse_root
from shardopt.optimizers.matrices import Matrices
from shardopt.optimizers.sides import Number, Pair

WHO = "shampoo"
Graft = Literal["adam", "sgd"]


class ShampooState(NamedTuple):
    """The state of `shampoo` for leaves that hold matrices [..., m, n].

    Attributes:
      step: int32, gradients seen.
      mu: the mean of gradients, shaped as the leaf.
      nu: the mean of their squares, shaped as the leaf; None unless grafted from Adam.
      left: the mean of G G^T, [..., m, m]; None on a side longer than `max_dim`.
      right: the mean of G^T G, [..., n, n].
      left_root: the inverse root of `left` when it was last taken.
      right_root: that of `right`.
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    left: PyTree
    right: PyTree
    left_root: PyTree
    right_root: PyTree


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    ridge: Number = 1e-5,
    weight_decay: Number = 0.0,
    interval: int = 10,
    graft: Graft | None = "adam",
    max_dim: int = 8192,
    matrices: Matrices = None,
) -> optax.GradientTransformationExtraArgs:
    """Precondition each matrix from both sides; AdamW for all that is no matrix.

    Of a gradient G [m, n], with moving means L of G G^T, R of G^T G and M of G, bias corrected:

        D = L^(-1/4) M R^(-1/4),   W <- W - learning_rate (D |A| / |D| + weight_decay W)

    where A is what Adam would do (`graft="adam"`), or M (`graft="sgd"`), and |.| the Frobenius norm of each matrix: Shampoo
    gives the direction, A the size of the step. Roots are taken anew every `interval` steps, from the first on, and are stale
    in between. If one side is longer than `max_dim`, the other is preconditioned alone, with root -1/2.

    **Equivalence**: a plain optax transformation: under any strategy equal to one device, up to summation order. With
    b1=0, graft=None and interval=1 it is Shampoo as published, but for means in place of sums.

    **Placement**: a leaf holds its two moments, and of each of its matrices 2 m^2 + 2 n^2 numbers in leaves [..., m, m] and
    [..., n, n] whose first dims are those of the leaf that count matrices, in fp32 at least.

    **Communication**: none of its own: all that it computes is batched over the dims that count matrices and made of products, so
    where these dims are sharded, as blocks are, every matrix is worked on by its owner alone. Where matrices are sharded
    within, the partitioner gathers them.

    Args:
      learning_rate: a number or a schedule, also that of AdamW.
      b1: decay of the mean of gradients, also that of AdamW.
      b2: decay of the means of squares and of L and R, also that of AdamW.
      eps: added to the root of Adam's second moment.
      ridge: added to the diagonals of L and R before a root, as a share of their Frobenius norms; in fp32 not below 1e-6.
      weight_decay: decoupled, also that of AdamW.
      interval: steps from one root to the next.
      graft: whose step size to take, "adam" or "sgd"; None takes D as it is.
      max_dim: sides that are longer are not preconditioned.
      matrices: `[(regex, so.optimizers.Matrix), ...]`, searched in key paths, first match wins, None for leaves that are no
        matrices; by default the leaves of two dims.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if one is out of range; in `init`, if a rule matches nothing or does not fit its leaf.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.optimizers.shampoo(0.1, b1=0.0, graft=None, interval=1)
      >>> params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
      >>> grads = {"w": jnp.array([[4.0, 0.0], [0.0, 1.0]]), "b": jnp.array([2.0, -3.0])}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> print(jnp.diag(updates["w"]).round(3), updates["b"].round(3))
      [-0.1 -0.1] [-0.1  0.1]

    References:
      Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018, algorithm 1; Anil, Gupta, Koren,
      Regan and Singer, "Scalable Second Order Optimization for Deep Learning", 2020, grafting and stale roots; Shi et al.,
      "A Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer", 2023, algorithm 2.
    """
    if graft not in ("adam", "sgd", None):
        raise ValueError(f"{WHO}: graft must be 'adam', 'sgd' or None, got {graft!r}.")
    numbers = {"b1": b1, "b2": b2, "eps": eps, "ridge": ridge, "weight_decay": weight_decay}
    scale = _scale_by_shampoo(b1, b2, eps, ridge, interval, graft, max_dim, matrices)
    return sides.on_matrices(WHO, scale, learning_rate, matrices, max_dim, interval, **numbers)


def _scale_by_shampoo(
    b1: Number,
    b2: Number,
    eps: Number,
    ridge: Number,
    interval: int,
    graft: Graft | None,
    max_dim: int,
    matrices: Matrices,
) -> optax.GradientTransformation:
    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        zeros = lambda: treedef.unflatten([jnp.zeros(leaf.shape, wide_dtype(leaf.dtype)) for leaf in leaves])  # noqa: E731
        found = sides.matrices_of(WHO, matrices, params)
        pairs, roots = ([sides.zero_sides(*one, max_dim) for one in zip(leaves, found, strict=True)] for _ in range(2))
        nu = zeros() if graft == "adam" else None
        return ShampooState(
            jnp.zeros((), jnp.int32), zeros(), nu, *sides.as_trees(treedef, pairs), *sides.as_trees(treedef, roots)
        )

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates)
        found, count = sides.matrices_of(WHO, matrices, updates), state.step + 1
        wide = treedef.unflatten([leaf.astype(wide_dtype(leaf.dtype)) for leaf in leaves])
        mu = jax.tree.map(lambda old, g: sides.moving_mean(old, g, b1), state.mu, wide)
        mean = jax.tree.map(lambda m: sides.unbiased(m, b1, count), mu)
        nu = (
            None if state.nu is None else jax.tree.map(lambda old, g: sides.moving_mean(old, g * g, b2), state.nu, wide)
        )
        step = mean
        if nu is not None:
            step = jax.tree.map(
                lambda m, v: m / (jnp.sqrt(sides.unbiased(v, b2, count)) + jnp.asarray(eps, v.dtype)), mean, nu
            )

        moments = [
            sides.second_moments(matrix.of(g), pair, b2)
            for g, matrix, pair in zip(
                jax.tree.leaves(wide), found, sides.as_pairs(treedef, state.left, state.right), strict=True
            )
        ]
        roots = [
            sides.every(interval, state.step, lambda pair=pair: _roots(pair, b2, count, ridge), old)
            for pair, old in zip(moments, sides.as_pairs(treedef, state.left_root, state.right_root), strict=True)
        ]
        new = []
        of_leaves = zip(leaves, found, jax.tree.leaves(mean), jax.tree.leaves(step), roots, strict=True)
        for leaf, matrix, m, size, pair in of_leaves:
            direction = sides.between(pair, matrix.of(m))
            if graft is not None:
                direction = _with_norm_of(direction, matrix.of(size))
            new.append(matrix.leaf(direction, leaf.shape).astype(leaf.dtype))
        kept = (*sides.as_trees(treedef, moments), *sides.as_trees(treedef, roots))
        return treedef.unflatten(new), ShampooState(count, mu, nu, *kept)

    return optax.GradientTransformation(init, update)


def _roots(pair: Pair, b2: Number, count: jax.Array, ridge: Number) -> Pair:
    """Return the inverse fourth roots of both second moments, or that of the only one squared."""
    root = 2 if any(one is None for one in pair) else 4
    left, right = (None if one is None else inverse_root(sides.unbiased(one, b2, count), root, ridge) for one in pair)
    return left, right


def _with_norm_of(direction: jax.Array, other: jax.Array) -> jax.Array:
    """Return each matrix as long as another one; zero where it is zero."""
    norm, wanted = (jnp.sqrt(jnp.sum(jnp.square(x), (-2, -1), keepdims=True)) for x in (direction, other))
    return direction * (wanted / jnp.where(norm > 0, norm, jnp.ones_like(norm)))
