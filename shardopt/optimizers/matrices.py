"""Which dims of a leaf are the rows of a matrix and which its columns; the rest count matrices."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax

from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, leaves_with_paths

Dims = int | tuple[int, ...]


class Matrix(NamedTuple):
    """What is a matrix within a leaf: some dims, taken together, are its rows, others its columns.

    All other dims count matrices: a leaf [L, D, 3, H, K] of which D is the rows and H, K together are the columns holds 3 L
    matrices [D, H K].

    Attributes:
      rows: the dim, or dims in order, that make a row index.
      columns: those that make a column index. Negative dims count from the last.

    Example:
      >>> Matrix(rows=1, columns=(3, 4)).shape_in((2, 64, 3, 4, 16))  # 2 blocks of fused queries, keys, values
      (2, 3, 64, 64)
    """

    rows: Dims = -2
    columns: Dims = -1

    def order(self, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the dims that count matrices, those of rows and those of columns, of a leaf of `ndim` dims."""
        rows, columns = (_normal(dims, ndim) for dims in self)
        return tuple(dim for dim in range(ndim) if dim not in rows + columns), rows, columns

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [..., m, n] of the matrices of a leaf."""
        batch, rows, columns = self.order(len(shape))
        sides = [math.prod(shape[dim] for dim in dims) for dims in (rows, columns)]
        return (*(shape[dim] for dim in batch), *sides)

    def of(self, leaf: jax.Array) -> jax.Array:
        """Return a leaf as matrices [..., m, n]."""
        batch, rows, columns = self.order(leaf.ndim)
        return leaf.transpose(batch + rows + columns).reshape(self.shape_in(leaf.shape))

    def leaf(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return matrices [..., m, n] as the leaf of this shape that they are: the inverse of `of`."""
        batch, rows, columns = self.order(len(shape))
        order = batch + rows + columns
        back = sorted(range(len(shape)), key=lambda dim: order[dim])
        return matrices.reshape([shape[dim] for dim in order]).transpose(back)


Matrices = Sequence[tuple[str | re.Pattern[str], Matrix | None]] | None
"""`[(regex, Matrix), ...]`, searched in the key path, first match wins; None makes matrices of the leaves of two dims."""


def match_matrices(who: str, matrices: Matrices, params: PyTree) -> list[Matrix | None]:
    """Return, for each leaf, what is a matrix in it; None where nothing is.

    A rule may match a place that holds no leaf, as `optax.masked` and frozen parameters leave them.

    Raises:
      TypeError: if `matrices` is no sequence of (regex, Matrix or None).
      ValueError: if a rule matches nothing, or names a dim that its leaf does not have, or one twice.
    """
    rules = check_matrices(who, matrices)
    if rules is None:
        return [Matrix() if leaf.ndim == 2 else None for leaf in jax.tree.leaves(params)]
    is_hole = lambda x: x is None or isinstance(x, optax.MaskedNode)  # noqa: E731
    places, found, problems = leaves_with_paths(params, is_leaf=is_hole), [], []
    for path, leaf in places:
        if is_hole(leaf):
            continue
        matrix = next((matrix for pattern, matrix in rules if pattern.search(path)), None)
        found.append(matrix)
        if matrix is not None and (problem := _problem(matrix, leaf.ndim)):
            problems.append(f"{path}: shape {leaf.shape}, {matrix} {problem}")
    if problems:
        fix = "name each dim once, as it stands in the whole leaf, counting that of stacked blocks."
        raise ValueError(format_error(who, f"matrices= does not fit {plural(len(problems), 'leaf')}.", problems, fix))
    idle = [repr(pattern.pattern) for pattern, _ in rules if not any(pattern.search(path) for path, _ in places)]
    if idle:
        known = ", ".join(path for path, _ in places[:8]) + (", ..." if len(places) > 8 else "")
        problem = f"{plural(len(idle), 'rule')} of matrices= matched no parameter."
        raise ValueError(format_error(who, problem, idle, f"match a key path, such as: {known}."))
    return found


def check_matrices(who: str, matrices: Matrices) -> list[tuple[re.Pattern[str], Matrix | None]] | None:
    """Return the rules with their regexes compiled; None if there are none.

    Raises:
      TypeError: if `matrices` is no sequence of (regex, Matrix or None).
      ValueError: if a regex does not compile.
    """
    if matrices is None:
        return None
    form = "matrices must be [(regex, so.optimizers.Matrix or None), ...]"
    if isinstance(matrices, str | dict) or not isinstance(matrices, Sequence):
        raise TypeError(f"{who}: {form}, got {type(matrices).__name__}.")
    rules = []
    for rule in matrices:
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[1], Matrix | None):
            raise TypeError(f"{who}: {form}; got the rule {rule!r}.")
        try:
            rules.append((re.compile(rule[0]), rule[1]))
        except (re.error, TypeError) as error:
            problem = f"matrices: {rule[0]!r} is not a regular expression: {error}."
            raise ValueError(format_error(who, problem, fix="give a regex that is searched in key paths.")) from error
    return rules


def _normal(dims: Dims, ndim: int) -> tuple[int, ...]:
    return tuple(dim % ndim for dim in ((dims,) if isinstance(dims, int) else dims))


def _problem(matrix: Matrix, ndim: int) -> str:
    named = [dim for dims in matrix for dim in ((dims,) if isinstance(dims, int) else dims)]
    outside = [dim for dim in named if not -ndim <= dim < ndim]
    if outside:
        return f"names dim {outside[0]}, there are {ndim}"
    _, rows, columns = matrix.order(ndim)
    if not rows or not columns:
        return "has no rows" if not rows else "has no columns"
    return "names a dim twice" if len({*rows, *columns}) < len(rows + columns) else ""
