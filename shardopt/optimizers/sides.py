"""What Shampoo and SOAP share: second moments of rows and of columns, and which optimizer a leaf goes to."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from shardopt.core.arguments import check_count, check_number
from shardopt.core.types import PyTree, TreeDef, wide_dtype
from shardopt.optimizers.inverse_root import product
from shardopt.optimizers.matrices import Matrices, Matrix, check_matrices, match_matrices

Number = float | jax.Array
Side = jax.Array | None
"""An array [..., m, m] for a side of m; None for one that is too long."""
Pair = tuple[Side, Side]
"""Rows and columns."""


def on_matrices(
    who: str,
    scale: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    matrices: Matrices,
    max_dim: int,
    interval: int,
    **numbers: Number,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of which `scale` is what it does to matrices with a side of at most `max_dim`, AdamW to all else.

    Rules, counts and numbers ("b1", "b2", "eps", "ridge", "weight_decay") that cannot be used are refused; arrays, as
    `optax.inject_hyperparams` makes, are not read.
    """
    check_matrices(who, matrices)
    check_count(who, "max_dim", max_dim, allow_array=False)
    check_count(who, "interval", interval, allow_array=True)
    for name, value in numbers.items():
        if not isinstance(value, jax.Array):
            below = {"below": 1.0} if name in ("b1", "b2") else {}
            check_number(who, name, value, positive=name == "ridge", **below)

    def labels(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, match_matrices(who, matrices, tree), strict=True)
        fits = [one is not None and min(one.shape_in(leaf.shape)[-2:]) <= max_dim for leaf, one in pairs]
        return treedef.unflatten(["matrices" if fit else "others" for fit in fits])

    decay = numbers["weight_decay"]
    of_matrices = optax.chain(scale, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(learning_rate))
    of_others = optax.adamw(learning_rate, *(numbers[name] for name in ("b1", "b2", "eps")), weight_decay=decay)
    return optax.partition({"matrices": of_matrices, "others": of_others}, labels)


def matrices_of(who: str, matrices: Matrices, tree: PyTree) -> list[Matrix]:
    """Return what is a matrix in each leaf of a tree whose leaves all hold some."""
    found = match_matrices(who, matrices, tree)
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def zero_sides(leaf: jax.Array, matrix: Matrix, max_dim: int) -> Pair:
    """Return zeros [..., m, m] and [..., n, n] for the matrices [..., m, n] of a leaf."""
    *batch, m, n = matrix.shape_in(leaf.shape)
    dtype = wide_dtype(leaf.dtype)
    left, right = (jnp.zeros((*batch, side, side), dtype) if side <= max_dim else None for side in (m, n))
    return left, right


def as_trees(treedef: TreeDef, pairs: Sequence[Pair]) -> tuple[PyTree, PyTree]:
    """Return the sides of all leaves as a tree of rows and a tree of columns."""
    return treedef.unflatten([pair[0] for pair in pairs]), treedef.unflatten([pair[1] for pair in pairs])


def as_pairs(treedef: TreeDef, left: PyTree, right: PyTree) -> list[Pair]:
    """Return what `as_trees` made trees of."""
    return list(zip(treedef.flatten_up_to(left), treedef.flatten_up_to(right), strict=True))


def every(interval: int, step: jax.Array, refresh: Callable[[], Pair], kept: Pair) -> Pair:
    """Return what `refresh` makes in steps 0, interval, 2 interval, ..., in others what was kept.

    Of one leaf: a branch for all would tie their matrices together, and `opt_state_layout="matrices"` could not part them.
    """
    if isinstance(interval, int) and interval == 1:
        return refresh()
    return jax.lax.cond(step % interval == 0, refresh, lambda: kept)


def second_moments(g: jax.Array, pair: Pair, decay: Number) -> Pair:
    """Return the moving means of G G^T and G^T G, of matrices G [..., m, n]."""
    left, right = pair
    if left is not None:
        left = moving_mean(left, product(g, g, flip_b=True), decay)
    if right is not None:
        right = moving_mean(right, product(g, g, flip_a=True), decay)
    return left, right


def between(pair: Pair, g: jax.Array, *, into: bool = False) -> jax.Array:
    """Return P G Q^T, or P^T G Q with `into`, of matrices G and sides P, Q; a side that is None is left out."""
    left, right = pair
    if left is not None:
        g = product(left, g, flip_a=into)
    if right is not None:
        g = product(g, right, flip_b=not into)
    return g


def moving_mean(mean: jax.Array, new: jax.Array, decay: Number) -> jax.Array:
    """Return decay mean + (1 - decay) new."""
    share = jnp.asarray(decay, mean.dtype)
    return share * mean + (1 - share) * new


def unbiased(mean: jax.Array, decay: Number, count: jax.Array) -> jax.Array:
    """Return a moving mean that began at zero divided by the weights of its `count` terms."""
    share = jnp.asarray(decay, mean.dtype)
    return mean / (1 - share ** count.astype(mean.dtype))
