"""What equations that work entry by entry do to rows, to sums over rows, and to numbers that grow with the rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardopt.core.primitives import ELEMENTWISE, IDENTITIES
from shardopt.separability.values import (
    Const,
    Degree,
    Mixed,
    Rows,
    Site,
    Sum,
    Value,
    add,
    degree_of,
    first_mixed,
    growth,
    odd,
    same,
    scaled,
    times,
)

LINEAR = IDENTITIES | {"neg", "convert_element_type", "real", "imag", "conj", "reduce_precision"}
SUMS = frozenset(["add", "sub", "add_any"])
SAME = SUMS | frozenset(["max", "min", "nextafter", "complex", "clamp", "rem", "select_n", "abs"]) | LINEAR
COMPARE = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "sign", "is_finite", "atan2"])
POWERS: dict[str, Callable[[dict[str, Any]], float]] = {
    "sqrt": lambda params: 0.5,
    "rsqrt": lambda params: -0.5,
    "cbrt": lambda params: 1 / 3,
    "square": lambda params: 2.0,
    "integer_pow": lambda params: params["y"],
}
ENTRYWISE = ELEMENTWISE | {"threefry2x32", "random_fold_in"}
"""A counter makes its own bits, and a key with a number its own key: those of a row are that row's."""


def elementwise(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return the results of an equation that works entry by entry."""
    return [_elementwise(site, values)] * site.num_outs


def _elementwise(site: Site, values: Sequence[Value]) -> Value:
    if mixed := first_mixed(values):
        return mixed
    if any(isinstance(value, Sum) or (isinstance(value, Rows) and value.plus) for value in values):
        return _with_sums(site, values)
    rows = [value for value in values if isinstance(value, Rows)]
    consts = [value for value in values if isinstance(value, Const)]
    degree = _degree(site, values)
    if not rows:
        return const(site, consts, degree)
    own = frozenset[int]().union(*(row.own for row in rows))
    if len({row.place for row in rows}) > 1 or (own and site.name not in LINEAR):
        return site.mixed()
    if varying := [one for one in consts if one.varies and not one.anywhere]:
        return Mixed(varying[0].op or site.op, why="position")
    return site.mixed("count") if odd(degree) else rows[0]._replace(degree=degree, own=own)


def const(site: Site, consts: Sequence[Const], degree: Degree, out: int = 0) -> Const:
    """Return what follows from constants, entry by entry."""
    anywhere = any(one.anywhere for one in consts)
    varies = frozenset[int]().union(*(one.varies for one in consts))
    op = next((one.op for one in consts if one.varies and one.op), site.op)
    return Const(degree, frozenset() if anywhere else varies, anywhere, None, op)


def known(site: Site, values: tuple[np.ndarray, ...], op: Any = None) -> Const:
    """Return a constant whose numbers are known in every trace."""
    shapes = site.outs()
    values = tuple(_compact(value) for value in values)
    varies = frozenset(dim for dim in scaled(shapes) if any(value.shape[dim] > 1 for value in values))
    degree = site.none if varies else degree_of(values, len(values) - 1)
    return Const(degree, varies, False, values, op or site.op)


def _compact(value: np.ndarray) -> np.ndarray:
    for dim, size in enumerate(value.shape):
        if size > 1:
            first = value.take([0], dim)
            if (value == first).all():
                value = first
    return value


def _degree(site: Site, values: Sequence[Value]) -> Degree:
    """Return how the result grows, if operands do."""
    nan: Degree = (math.nan,) * len(site.none)
    operands = values[1:] if site.name == "select_n" else values
    degrees = [value.degree for value in operands if not isinstance(value, Mixed) and not _zero(value)]
    if site.name == "select_n" and not same(_of(values[0]), site.none):
        return nan
    if not degrees or all(same(degree, site.none) for degree in degrees):
        return site.none
    if site.name == "mul":
        return add(*degrees) if len(degrees) == 2 else site.none  # or 0
    if site.name == "div":
        return add(_of(values[0]), times(_of(values[1]), -1.0))
    if site.name in POWERS:
        return times(degrees[0], POWERS[site.name](site.params))
    if site.name == "convert_element_type" and not np.issubdtype(site.params["new_dtype"], np.inexact):
        return nan if np.dtype(site.params["new_dtype"]).kind in "biu" else degrees[0]
    if site.name in SAME or site.name in COMPARE:
        if not same(*degrees):
            return nan
        return degrees[0] if site.name in SAME else site.none
    return nan


def _of(value: Value) -> Degree:
    assert not isinstance(value, Mixed)
    return value.degree


def _zero(value: Value) -> bool:
    return isinstance(value, Const) and value.zero


def as_sum(site: Site, value: Sum | Const) -> Sum | None:
    """Return a constant as the sum over rows that it is: of equal parts; None for 0."""
    if isinstance(value, Sum):
        return value
    return None if value.zero else Sum(part_degree(site.num_rows, value), site.op)


def part_degree(num_rows: Sequence[int], value: Sum | Const) -> Degree:
    """Return how the part of a row grows."""
    if isinstance(value, Sum):
        return value.degree
    return add(value.degree, tuple(-math.log2(rows / num_rows[0]) for rows in num_rows[1:]))


def joined(site: Site, values: Sequence[Value]) -> Value:
    """Return sums and constants added up: a sum if all grow alike."""
    real = [one for one in values if isinstance(one, Sum)]
    parts = [part for one in values if isinstance(one, Sum | Const) and (part := as_sum(site, one)) is not None]
    if same(*[part.degree for part in parts]) and not odd(parts[0].degree):
        return real[0]
    return Mixed(real[0].op, site.op, "count")


def not_linear(site: Site, values: Sequence[Value]) -> Mixed:
    """Return that a sum over rows goes into what is not linear in it."""
    sums = [one if isinstance(one, Sum) else one.plus for one in values if isinstance(one, Sum | Rows)]
    return Mixed(next(one for one in sums if one is not None).op, site.op)


def _with_sums(site: Site, values: Sequence[Value]) -> Value:
    """Return what comes of sums over rows, alone or added to rows: linear equations leave them sums."""
    if site.name in LINEAR and (value := values[0]) is not None:
        if site.name == "convert_element_type" and np.dtype(site.params["new_dtype"]).kind in "biu":
            return not_linear(site, values)
        return value
    if site.name == "mul" or site.name == "div":
        others = [one for one in values[1 if site.name == "div" else 0 :] if isinstance(one, Const)]
        linear = [one for one in values if not isinstance(one, Const)]
        if len(linear) != 1 or len(others) != 1 or (site.name == "div" and linear[0] is not values[0]):
            return not_linear(site, values)
        if isinstance(linear[0], Rows) and others[0].varies and not others[0].anywhere:
            return Mixed(others[0].op or site.op, why="position")
        by = others[0].degree if site.name == "mul" else times(others[0].degree, -1.0)
        return site.mixed("count") if odd(by) else _scaled(linear[0], by)
    if site.name == "select_n":
        if not isinstance(values[0], Const):
            return not_linear(site, values)
        values = values[1:]
    elif site.name not in SUMS:
        return not_linear(site, values)
    rows = [one for one in values if isinstance(one, Rows)]
    sums = [one for one in values if isinstance(one, Sum)] + [one.plus for one in rows if one.plus is not None]
    if not rows:
        return joined(site, values)
    consts = [one for one in values if isinstance(one, Const)]
    if rows[0].loop is not None and all(one.loop is rows[0].loop for one in (*rows, *sums)) and not consts:
        alike = same(*[one.degree for one in (*rows, *sums)])
        return sums[0] if alike else Mixed(sums[0].op, site.op, "count")
    total = joined(site, sums)
    found = _elementwise(site, [one._replace(plus=None) for one in rows] + consts)
    if not isinstance(found, Rows) or isinstance(total, Mixed):
        return total if isinstance(total, Mixed) else found
    assert isinstance(total, Sum)
    return found._replace(plus=total)


def _scaled(value: Value, by: Degree) -> Value:
    if isinstance(value, Sum):
        return value._replace(degree=add(value.degree, by))
    assert isinstance(value, Rows)
    plus = value.plus and value.plus._replace(degree=add(value.plus.degree, by))
    return value._replace(degree=add(value.degree, by), plus=plus)


def summed(site: Site, value: Value, dims: Sequence[int]) -> Value:
    """Return a value summed over dims; `dims` are those of operand 0."""
    if isinstance(value, Mixed):
        return value
    shapes = site.ins()
    if not isinstance(value, Rows):
        grown = add(value.degree, growth(shapes, [dim for dim in dims if dim in scaled(shapes)]))
        if isinstance(value, Sum):
            return value._replace(degree=grown)
        left = {dim: dim - sum(one < dim for one in dims) for dim in value.varies if dim not in dims}
        if not value.anywhere and any(dim in value.varies for dim in dims):
            grown = (math.nan,) * len(grown)
        return Const(grown, frozenset(left.values()), value.anywhere, None, value.op)
    others = add(value.degree, growth(shapes, [dim for dim in dims if dim in scaled(shapes) and dim != value.dim]))
    if value.own:
        return site.mixed()
    if value.dim in dims:
        total = Sum(others, site.op)
        if value.plus is None:
            return total
        grown = growth(shapes, [dim for dim in dims if dim in scaled(shapes)])
        return joined(site, [total, value.plus._replace(degree=add(value.plus.degree, grown))])
    dim = None if value.dim is None else value.dim - sum(one < value.dim for one in dims)
    return value._replace(dim=dim, degree=others)
