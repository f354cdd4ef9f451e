"""Helpers of SOAP: second moments of rows and columns, and the choice of the optimizer of each leaf."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from shardopt.core import PyTree, TreeDef, calling, check_count, check_number, wide_dtype
from shardopt.optimizers._matrices import Matrices, Matrix, check_matrices, match_matrices

Number = float | jax.Array
Side = jax.Array | None
"""An array [..., m, m] for a side of length m of a matrix; None for a side that is too long."""
Pair = tuple[Side, Side]
"""The arrays of both sides of a matrix: rows, columns."""


def on_matrices(
    caller: str,
    scale: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    matrices: Matrices,
    max_dim: int,
    interval: int,
    **numbers: Number,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that applies `scale` to matrices with a side of at most `max_dim`, and
    AdamW to all other leaves.

    Invalid rules, counts and numbers ("b1", "b2", "eps", "ridge", "weight_decay") raise an error.
    Numbers that are arrays, as from `optax.inject_hyperparams`, are not checked.
    """
    with calling(caller):
        check_matrices(matrices)
        check_count("max_dim", max_dim, allow_array=False)
        check_count("interval", interval, allow_array=True)
        for name, value in numbers.items():
            if not isinstance(value, jax.Array):
                bound = {"below": 1.0} if name in ("b1", "b2") else {}
                check_number(name, value, positive=name == "ridge", **bound)

    @calling(caller)  # optax calls it later
    def labels(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, match_matrices(matrices, tree), strict=True)
        is_scaled = [
            matrix is not None and min(matrix.shape_in(leaf.shape)[-2:]) <= max_dim
            for leaf, matrix in pairs
        ]
        return treedef.unflatten(["matrices" if scaled else "others" for scaled in is_scaled])

    decay = numbers["weight_decay"]
    matrix_optimizer = optax.chain(
        scale, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(learning_rate)
    )
    other_optimizer = optax.adamw(
        learning_rate, *(numbers[name] for name in ("b1", "b2", "eps")), weight_decay=decay
    )
    return optax.partition({"matrices": matrix_optimizer, "others": other_optimizer}, labels)


def matrices_of(matrices: Matrices, tree: PyTree) -> list[Matrix]:
    """Return the `Matrix` of each leaf of a tree whose leaves all hold matrices."""
    leaf_matrices = match_matrices(matrices, tree)
    assert all(matrix is not None for matrix in leaf_matrices)
    return [matrix for matrix in leaf_matrices if matrix is not None]


def zero_sides(leaf: jax.Array, matrix: Matrix, max_dim: int) -> Pair:
    """Return zeros [..., m, m] and [..., n, n] for the matrices [..., m, n] of a leaf."""
    *batch, m, n = matrix.shape_in(leaf.shape)
    dtype = wide_dtype(leaf.dtype)
    left, right = (
        jnp.zeros((*batch, side, side), dtype) if side <= max_dim else None for side in (m, n)
    )
    return left, right


def as_trees(treedef: TreeDef, pairs: Sequence[Pair]) -> tuple[PyTree, PyTree]:
    """Return the pairs of all leaves as two trees: one of the row sides, one of the column sides."""
    return treedef.unflatten([pair[0] for pair in pairs]), treedef.unflatten(
        [pair[1] for pair in pairs]
    )


def as_pairs(treedef: TreeDef, left: PyTree, right: PyTree) -> list[Pair]:
    """Return the pairs of all leaves from two trees, the inverse of `as_trees`."""
    return list(zip(treedef.flatten_up_to(left), treedef.flatten_up_to(right), strict=True))


def second_moments(g: jax.Array, pair: Pair, decay: Number) -> Pair:
    """Return the updated moving means of G G^T and G^T G, for matrices G [..., m, n]."""
    left, right = pair
    if left is not None:
        left = moving_mean(left, product(g, g, flip_b=True), decay)
    if right is not None:
        right = moving_mean(right, product(g, g, flip_a=True), decay)
    return left, right


def multiply_sides(pair: Pair, g: jax.Array, *, into_basis: bool = False) -> jax.Array:
    """Return P G Q^T for matrices G and sides P, Q; with `into_basis` P^T G Q.

    A side that is None acts as the identity.
    """
    left, right = pair
    if left is not None:
        g = product(left, g, flip_a=into_basis)
    if right is not None:
        g = product(g, right, flip_b=not into_basis)
    return g


def moving_mean(mean: jax.Array, new_value: jax.Array, decay: Number) -> jax.Array:
    """Return decay * mean + (1 - decay) * new_value."""
    decay_array = jnp.asarray(decay, mean.dtype)
    return decay_array * mean + (1 - decay_array) * new_value


def unbiased(mean: jax.Array, decay: Number, count: jax.Array) -> jax.Array:
    """Return the bias-corrected moving mean of `count` values: divided by the sum of their weights."""
    decay_array = jnp.asarray(decay, mean.dtype)
    return mean / (1 - decay_array ** count.astype(mean.dtype))


def product(a: jax.Array, b: jax.Array, *, flip_a: bool = False, flip_b: bool = False) -> jax.Array:
    """Return A B of batches of matrices [..., m, k] and [..., k, n].

    `flip_a` and `flip_b` transpose A and B first. `jnp.matmul` and `jnp.einsum` drop batch dims of
    length 1. The update of one block would then have other equations than the update of several,
    and `opt_state="matrices"` could not separate the blocks.
    """
    batch_dims = tuple(range(a.ndim - 2))
    contracted_dims = (a.ndim - (2 if flip_a else 1),), (b.ndim - (1 if flip_b else 2),)
    return jax.lax.dot_general(
        a, b, (contracted_dims, (batch_dims, batch_dims)), precision=jax.lax.Precision.HIGHEST
    )
