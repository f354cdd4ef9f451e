"""Cases of pieces of one row, for which jax writes some operations in another way.

The function of a piece is what jax writes, or something that only looks like it.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardopt.separability._relations import Relation, Same, Shapes, Split
from support.relation_meaning import Operand, RuleCase, indices_below

SIZE = 2
"""The size of all dims but rows, so that dims can be taken for each other."""


Contracted = tuple[tuple[int, ...], tuple[int, ...]]


def _of_all_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))


def _of_all_pairs(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the product of each row with each row: no dim is a batch dim."""
    return lax.dot_general(x, y, (((2,), (1,)), ((), ())))


def _of_row(
    x: jax.Array, y: jax.Array, contracted: Contracted = ((1,), (0,)), **options: Any
) -> jax.Array:
    row_x, row_y = (lax.squeeze(matrix, [0]) for matrix in (x, y))
    return lax.dot_general(row_x, row_y, (contracted, ((), ())), **options)


def _restored(product: jax.Array, dim: int) -> jax.Array:
    ndim = product.ndim + 1
    shape = [1 if i == dim else SIZE for i in range(ndim)]
    return lax.broadcast_in_dim(product, shape, [i for i in range(ndim) if i != dim])


OF_ONE_ROW: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    lambda x, y: _restored(_of_row(x, y), 0),
    lambda x, y: _restored(_of_row(x, y), 0),
    lambda x, y: _restored(_of_row(y, x), 0),
    lambda x, y: _restored(_of_row(x, x), 0),
    lambda x, y: _restored(_of_row(x, y, ((0,), (0,))), 0),
    lambda x, y: _restored(_of_row(x, y, ((1,), (1,))), 0),
    lambda x, y: _restored(_of_row(x, y, preferred_element_type=jnp.float32), 0),
    lambda x, y: _restored(_of_row(x, y, precision="highest"), 0),
    lambda x, y: _restored(_of_row(x, y), 1),
    _of_all_rows,
]


def _relation(rng: np.random.Generator, dim: int) -> Relation:
    choices: list[Relation] = [Split(dim), Split(dim), Same(), Split(dim, ratio=Fraction(2))]
    return choices[rng.integers(4)]


def product_of_one_row(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product for each row, of which a piece has one."""
    num_pieces = int(rng.choice([2, 3]))
    functions = _of_all_rows, OF_ONE_ROW[rng.integers(len(OF_ONE_ROW))]
    if rng.random() < 0.2:
        functions = jnp.matmul, jnp.matmul
    if rng.random() < 0.1:
        functions = _of_all_pairs, functions[1]
    sizes: Shapes = (num_pieces, SIZE, SIZE), (1, SIZE, SIZE)
    operands = [Operand(_relation(rng, 0), sizes) for _ in range(2)]
    return RuleCase(operands, functions, num_pieces)


def broadcast_of_one_row(rng: np.random.Generator) -> RuleCase:
    """Return a case of one row that is repeated for all rows, or of rows that stay as they are."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 3))
    is_shared = rng.random() < 0.6
    sizes: Shapes = (1, SIZE), (1, SIZE)
    relation: Relation = [Same(), Same(Fraction(2))][rng.integers(2)]
    if not is_shared:
        sizes = ((num_pieces * rows, SIZE), (rows, SIZE))
        relation = Split(0)
    others: list[Callable[[Any], Any]] = [
        lambda x: x,
        lambda x: x,
        lambda x: jnp.tanh(x),
        lambda x: x.T if x.shape[0] == SIZE else x,
        lambda x: x[:1],
    ]
    other = others[rng.integers(len(others))]

    def whole(x: jax.Array) -> jax.Array:
        shape = (num_pieces * rows, SIZE)
        return jnp.sin(lax.broadcast_in_dim(x, shape, (0, 1)))

    return RuleCase([Operand(relation, sizes)], (whole, lambda x: jnp.sin(other(x))), num_pieces)


def looked_up_in_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of `jnp.take_along_axis`, whose dims of size 1 are broadcast."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.choice([1, 1, 2]))
    dim = int(rng.integers(2))
    entries = 3 * int(rng.choice([1, 1, num_pieces]))
    sizes: Shapes = (num_pieces * rows, entries), (rows, 3)
    widths = (sizes[0][0], 1), (rows, 1)
    if rng.random() < 0.2:
        widths = (1, 1), (1, 1)
    relation = Split(0) if widths[0][0] != widths[1][0] and rng.random() < 0.8 else Same()
    labels = Operand(relation, widths, np.int32, indices_below(int(rng.choice([3, 6]))))
    mode = str(rng.choice(["fill", "clip"]))
    others: list[Callable[[Any, Any], Any]] = [
        lambda x, i: jnp.take_along_axis(x, i, 1 - dim, mode=mode),
        lambda x, i: jnp.take_along_axis(x, i, 1, mode="clip"),
    ]

    def run(x: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, i, dim, mode=mode)

    piece = run if rng.random() < 0.8 else others[rng.integers(2)]
    rows_of_entries = Operand(_relation(rng, 0), sizes)
    return RuleCase([rows_of_entries, labels], (run, piece), num_pieces)


CASES = {
    "dot_general": [product_of_one_row],
    "broadcast_in_dim": [broadcast_of_one_row],
    "jit": [looked_up_in_rows],
}
