"""Rules for which dims of a leaf are the rows and columns of matrices.

The other dims count matrices.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax

from shardopt.core import PyTree, leaves_with_paths, plural, type_error, value_error

Dims = int | tuple[int, ...]


class Matrix(NamedTuple):
    """The matrices within a leaf: one or more dims together are the rows, others are the columns.

    All other dims count matrices. Take a leaf [L, D, 3, H, K] with D as rows and with H, K together
    as columns: it holds 3 L matrices [D, H K].

    Attributes:
      rows: the dim, or the dims in order, of the row index.
      columns: the dim, or the dims in order, of the column index. Negative dims count from the
        last.

    Example:
      >>> Matrix(rows=1, columns=(3, 4)).shape_in((2, 64, 3, 4, 16))  # 2 blocks of fused queries, keys, values
      (2, 3, 64, 64)
    """

    rows: Dims = -2
    columns: Dims = -1

    def order(self, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return three tuples of dims of a leaf with `ndim` dims: dims that count matrices, row
        dims and column dims.
        """
        rows, columns = (_nonnegative_dims(dims, ndim) for dims in self)
        return tuple(dim for dim in range(ndim) if dim not in rows + columns), rows, columns

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [..., m, n] of the matrices of a leaf."""
        batch, rows, columns = self.order(len(shape))
        sides = [math.prod(shape[dim] for dim in dims) for dims in (rows, columns)]
        return (*(shape[dim] for dim in batch), *sides)

    def of(self, leaf: jax.Array) -> jax.Array:
        """Reshape a leaf to its matrices [..., m, n]."""
        batch, rows, columns = self.order(leaf.ndim)
        return leaf.transpose(batch + rows + columns).reshape(self.shape_in(leaf.shape))

    def leaf(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshape matrices [..., m, n] to the leaf of this shape, the inverse of `of`."""
        batch, rows, columns = self.order(len(shape))
        order = batch + rows + columns
        inverse_order = sorted(range(len(shape)), key=lambda dim: order[dim])
        return matrices.reshape([shape[dim] for dim in order]).transpose(inverse_order)


Matrices = Sequence[tuple[str | re.Pattern[str], Matrix | None]] | None
"""Rules `[(regex, Matrix), ...]`. The regex is searched in the key path, and the first match wins.

None as rules makes each leaf of two dims a matrix. None as the `Matrix` of a rule marks leaves that
are not matrices. """


def match_matrices(matrices: Matrices, params: PyTree) -> list[Matrix | None]:
    """Return the `Matrix` of each leaf; None for a leaf without matrices.

    A rule may match a path without a leaf, since `optax.masked` and frozen parameters leave holes
    in the tree.

    Raises:
      TypeError: if `matrices` is not a sequence of (regex, Matrix or None).
      ValueError: if a rule matches no path, names a dim that its leaf does not have, or names a dim
        twice.
    """
    rules = check_matrices(matrices)
    if rules is None:
        return [Matrix() if leaf.ndim == 2 else None for leaf in jax.tree.leaves(params)]

    def is_hole(x):
        return x is None or isinstance(x, optax.MaskedNode)

    paths_and_leaves = leaves_with_paths(params, is_leaf=is_hole)
    leaf_matrices = []
    misfits = []
    for path, leaf in paths_and_leaves:
        if is_hole(leaf):
            continue
        matrix = next((matrix for pattern, matrix in rules if pattern.search(path)), None)
        leaf_matrices.append(matrix)
        if matrix is not None and (misfit := _misfit(matrix, leaf.ndim)):
            misfits.append(f"{path}: shape {leaf.shape}, {matrix} {misfit}")
    if misfits:
        fix = "name each dim once, as it stands in the whole leaf, counting that of stacked blocks."
        raise value_error(f"matrices= does not fit {plural(len(misfits), 'leaf')}.", misfits, fix)
    _check_all_match([pattern for pattern, _ in rules], [path for path, _ in paths_and_leaves])
    return leaf_matrices


def _check_all_match(patterns: Sequence[re.Pattern[str]], paths: Sequence[str]) -> None:
    unused = [repr(pattern.pattern) for pattern in patterns if not any(map(pattern.search, paths))]
    if unused:
        examples = ", ".join([*paths[:8], *(["..."] if len(paths) > 8 else [])])
        problem = f"{plural(len(unused), 'rule')} of matrices= matched no parameter."
        raise value_error(problem, unused, f"match a key path, such as: {examples}.")


def check_matrices(matrices: Matrices) -> list[tuple[re.Pattern[str], Matrix | None]] | None:
    """Return the rules with compiled regexes; None if there are no rules.

    Raises:
      TypeError: if `matrices` is not a sequence of (regex, Matrix or None).
      ValueError: if a regex does not compile.
    """
    if matrices is None:
        return None
    expected = "matrices must be [(regex, so.optimizers.Matrix or None), ...]"
    if isinstance(matrices, str | dict) or not isinstance(matrices, Sequence):
        raise type_error(f"{expected}, got {type(matrices).__name__}.")
    rules = []
    for rule in matrices:
        if (
            not isinstance(rule, tuple | list)
            or len(rule) != 2
            or not isinstance(rule[1], Matrix | None)
        ):
            raise type_error(f"{expected}; got the rule {rule!r}.")
        try:
            rules.append((re.compile(rule[0]), rule[1]))
        except (re.error, TypeError) as error:
            problem = f"matrices: {rule[0]!r} is not a regular expression: {error}."
            raise value_error(problem, fix="give a regex that is searched in key paths.") from error
    return rules


def _nonnegative_dims(dims: Dims, ndim: int) -> tuple[int, ...]:
    return tuple(dim % ndim for dim in ((dims,) if isinstance(dims, int) else dims))


def _misfit(matrix: Matrix, ndim: int) -> str:
    """Return why a rule does not fit a leaf with `ndim` dims; "" if it fits."""
    named_dims = [dim for dims in matrix for dim in ((dims,) if isinstance(dims, int) else dims)]
    outside = [dim for dim in named_dims if not -ndim <= dim < ndim]
    if outside:
        return f"names dim {outside[0]}, there are {ndim}"
    _, rows, columns = matrix.order(ndim)
    if not rows or not columns:
        return "has no rows" if not rows else "has no columns"
    return "names a dim twice" if len({*rows, *columns}) < len(rows + columns) else ""
