"""`shampoo`: precondition each matrix by inverse roots of its second moments.

The root of the rows multiplies from the left, the root of the columns from the right.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core._errors import calling
from shardopt.core._types import PyTree, wide_dtype, wide_zeros
from shardopt.optimizers import _sides as sides
from shardopt.optimizers._inverse_root import inverse_root
from shardopt.optimizers._matrices import Matrices
from shardopt.optimizers._sides import Number, Pair

CALLER = "shampoo"
Graft = Literal["adam", "sgd"]


class ShampooState(NamedTuple):
    """The state of `shampoo` for leaves that hold matrices [..., m, n].

    Attributes:
      step: int32, the number of gradients so far.
      mu: the moving mean of gradients, in the shape of the leaf.
      nu: the moving mean of squared gradients, in the shape of the leaf; None unless
        `graft="adam"`.
      left: the moving mean of G G^T, [..., m, m]; None for a side longer than `max_dim`.
      right: the moving mean of G^T G, [..., n, n]; None for a side longer than `max_dim`.
      left_root: the last inverse root of `left`.
      right_root: the last inverse root of `right`.
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
    """Precondition each matrix from both sides; use AdamW for leaves that are not matrices.

    For a gradient G [m, n], let L, R and M be the bias-corrected moving means of G G^T, G^T G and
    G:

    Args:
      learning_rate: a number or a schedule, also for AdamW.
      b1: decay of the mean of gradients, also for AdamW.
      b2: decay of the means of squares, of L and of R, also for AdamW.
      eps: added to the root of Adam's second moment.
      ridge: added to the diagonals of L and R before a root, as a fraction of their Frobenius
        norms; in fp32 not below 1e-6.
      weight_decay: decoupled weight decay, also for AdamW.
      interval: the number of steps from one computation of the roots to the next.
      graft: the optimizer whose step size to use, "adam" or "sgd"; None uses D without rescaling.
      max_dim: sides that are longer are not preconditioned.
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
      >>> tx = so.optimizers.shampoo(0.1, b1=0.0, graft=None, interval=1)
      >>> params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
      >>> grads = {"w": jnp.array([[4.0, 0.0], [0.0, 1.0]]), "b": jnp.array([2.0, -3.0])}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> print(jnp.diag(updates["w"]).round(3), updates["b"].round(3))
      [-0.1 -0.1] [-0.1  0.1]

        D = L^(-1/4) M R^(-1/4),   W <- W - learning_rate (D |A| / |D| + weight_decay W)

    A is the step of Adam (`graft="adam"`), or M (`graft="sgd"`), and |.| is the Frobenius norm of
    each matrix. So D gives the direction, and A the size of the step. The roots are computed on the
    first step and then every `interval` steps; steps in between use the old roots. If one side is
    longer than `max_dim`, only the other side is preconditioned, with the power -1/2.

    **Equivalence**: a plain optax transformation. Under any strategy it equals one device, up to
    summation order. With b1=0, graft=None and interval=1 it is Shampoo as published, except that it
    uses means instead of sums.

    **Placement**: a leaf holds its two moments, in fp32 or wider. Each of its matrices has 2 m^2 +
    2 n^2 more numbers, in leaves [..., m, m] and [..., n, n]. The first dims of these leaves are
    the dims that count matrices.

    **Communication**: none. The computation consists of products, batched over the dims that count
    matrices. If these dims are sharded, as blocks are, each device works only on the matrices that
    it owns. If rows or columns are sharded, the partitioner gathers the matrices.

    References:
      Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018,
      algorithm 1; Anil, Gupta, Koren, Regan and Singer, "Scalable Second Order Optimization for
      Deep Learning", 2020, grafting and stale roots; Shi et al., "A Distributed Data-Parallel
      PyTorch Implementation of the Distributed Shampoo Optimizer", 2023, algorithm 2.
    """
    if graft not in ("adam", "sgd", None):
        raise ValueError(f"{CALLER}: graft must be 'adam', 'sgd' or None, got {graft!r}.")
    numbers = {"b1": b1, "b2": b2, "eps": eps, "ridge": ridge, "weight_decay": weight_decay}
    shampoo = _Shampoo(b1, b2, eps, ridge, interval, graft, max_dim, matrices)
    scale = optax.GradientTransformation(shampoo.init, shampoo.update)
    return sides.on_matrices(CALLER, scale, learning_rate, matrices, max_dim, interval, **numbers)


class _Shampoo(NamedTuple):
    """The functions that precondition gradients, with the arguments of `shampoo`."""

    b1: Number
    b2: Number
    eps: Number
    ridge: Number
    interval: int
    graft: Graft | None
    max_dim: int
    matrices: Matrices

    @calling(CALLER)
    def init(self, params: PyTree) -> ShampooState:
        leaves, treedef = jax.tree.flatten(params)
        leaf_matrices = sides.matrices_of(self.matrices, params)
        moments, roots = (
            [
                sides.zero_sides(*args, self.max_dim)
                for args in zip(leaves, leaf_matrices, strict=True)
            ]
            for _ in range(2)
        )
        nu = wide_zeros(params) if self.graft == "adam" else None
        side_trees = (*sides.as_trees(treedef, moments), *sides.as_trees(treedef, roots))
        return ShampooState(jnp.zeros((), jnp.int32), wide_zeros(params), nu, *side_trees)

    @calling(CALLER)
    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, ShampooState]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        leaf_matrices = sides.matrices_of(self.matrices, updates)
        count = jnp.asarray(optax.safe_increment(state.step))
        wide = treedef.unflatten([leaf.astype(wide_dtype(leaf.dtype)) for leaf in leaves])
        mu = jax.tree.map(lambda old, g: sides.moving_mean(old, g, self.b1), state.mu, wide)
        mean = jax.tree.map(lambda m: sides.unbiased(m, self.b1, count), mu)
        nu = None
        if state.nu is not None:
            nu = jax.tree.map(lambda old, g: sides.moving_mean(old, g * g, self.b2), state.nu, wide)
        moments = [
            sides.second_moments(matrix.of(g), pair, self.b2)
            for g, matrix, pair in zip(
                jax.tree.leaves(wide),
                leaf_matrices,
                sides.as_pairs(treedef, state.left, state.right),
                strict=True,
            )
        ]
        roots = [
            sides.refresh_every(
                self.interval,
                state.step,
                lambda pair=pair: _inverse_roots(pair, self.b2, count, self.ridge),
                old_pair,
            )
            for pair, old_pair in zip(
                moments, sides.as_pairs(treedef, state.left_root, state.right_root), strict=True
            )
        ]
        new_updates = []
        graft_steps = jax.tree.leaves(self.graft_step(mean, nu, count))
        per_leaf = zip(
            leaves, leaf_matrices, jax.tree.leaves(mean), graft_steps, roots, strict=True
        )
        for leaf, matrix, leaf_mean, leaf_graft_step, root_pair in per_leaf:
            direction = sides.multiply_sides(root_pair, matrix.of(leaf_mean))
            if self.graft is not None:
                direction = _with_norm_of(direction, matrix.of(leaf_graft_step))
            new_updates.append(matrix.leaf(direction, leaf.shape).astype(leaf.dtype))
        side_trees = (*sides.as_trees(treedef, moments), *sides.as_trees(treedef, roots))
        return treedef.unflatten(new_updates), ShampooState(count, mu, nu, *side_trees)

    def graft_step(self, mean: PyTree, nu: PyTree, count: jax.Array) -> PyTree:
        """Return the step whose norm each matrix gets: of Adam, or the mean of gradients."""
        if nu is None:
            return mean
        return jax.tree.map(
            lambda m, v: (
                m / (jnp.sqrt(sides.unbiased(v, self.b2, count)) + jnp.asarray(self.eps, v.dtype))
            ),
            mean,
            nu,
        )


def _inverse_roots(pair: Pair, b2: Number, count: jax.Array, ridge: Number) -> Pair:
    """Return the inverse fourth roots of both second moments.

    The inverse square root if there is only one moment.
    """
    root = 2 if any(moment is None for moment in pair) else 4
    left_root, right_root = (
        None if moment is None else inverse_root(sides.unbiased(moment, b2, count), root, ridge)
        for moment in pair
    )
    return left_root, right_root


def _with_norm_of(direction: jax.Array, graft_step: jax.Array) -> jax.Array:
    """Return each matrix of `direction`, scaled to the norm of the matrix of `graft_step`.

    A zero matrix stays zero.
    """
    norm, graft_norm = (
        jnp.sqrt(jnp.sum(jnp.square(x), (-2, -1), keepdims=True)) for x in (direction, graft_step)
    )
    return direction * (graft_norm / jnp.where(norm > 0, norm, jnp.ones_like(norm)))
