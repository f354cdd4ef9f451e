"""Rules of equations that work entry by entry: what they do to relations, and to ratios."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardopt.core.primitives import IDENTITIES
from shardopt.separability.numbers import relation_of
from shardopt.separability.relations import (
    Columns,
    Extreme,
    Known,
    OfOperand,
    Same,
    Shapes,
    Shifted,
    Site,
    Split,
    Total,
    Unknown,
    Value,
)

LINEAR = IDENTITIES | {"neg", "real", "imag", "conj", "reduce_precision", "convert_element_type"}
"""f(W) = r f(P) if W = r P, and f of a sum is the sum of f."""
ADDITIVE = frozenset(["add", "sub", "add_any", "complex"])
"""Linear in all operands together."""
HOMOGENEOUS = frozenset(["abs", "max", "min", "clamp", "rem"])
"""f(r a, r b) = r f(a, b) for r > 0."""
UNSCALED = frozenset(["sign", "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "atan2"])
"""f(r a, r b) = f(a, b) for r > 0."""
POWERS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "sqrt": lambda params: 0.5,
    "rsqrt": lambda params: -0.5,
    "cbrt": lambda params: 1 / 3,
    "square": lambda params: 2.0,
    "integer_pow": lambda params: params["y"],
}
"""f(r a) = r^k f(a) for r > 0."""
SELECT = "select_n"


def elementwise(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return the relations of the results of an equation that works entry by entry."""
    return [_elementwise(site, values)] * site.num_results


def first_unknown(values: Sequence[Value]) -> Unknown | None:
    """Return the first operand of which nothing is known."""
    return next((value for value in values if isinstance(value, Unknown)), None)


def related(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return the operands, known numbers by the relation that follows from them."""
    return [
        relation_of(value, site.operand(i), site.pieces, _dtype(site, i)) if isinstance(value, Known) else value
        for i, value in enumerate(values)
    ]


def is_zero(value: Value) -> bool:
    """Return whether a value is 0 in the whole and in every piece."""
    return isinstance(value, Known) and value.zero


def not_linear(site: Site, value: Value) -> Unknown:
    """Return that a total, or an extreme, goes into what it cannot go into."""
    op = value.total.op if isinstance(value, Shifted) else value.op if isinstance(value, Total | Extreme) else None
    return Unknown("mixes", op or site.op, site.op)


def join(site: Site, values: Sequence[Value]) -> Value:
    """Return the relation that holds of every operand, each at its entries, or of their sum."""
    return unify(site, related(site, values), [is_zero(value) for value in values])


def unify(site: Site, relations: Sequence[Value], zeros: Sequence[bool] | None = None) -> Value:
    """Return the relation that holds of several values, of which some are zeros.

    Zeros have any relation: 0 = r 0, and concatenated or added they are 0. W = S in all pieces is (1/n) (S + ... + S).
    """
    drawn = any(isinstance(value, Same) and value.drawn for value in relations)
    zeros = [False] * len(relations) if zeros is None else zeros
    operands = [value for value, zero in zip(relations, zeros, strict=True) if not zero]
    if unknown := first_unknown(operands):
        return unknown
    for operand in operands:
        if not isinstance(operand, Same | Split | Total):
            return not_linear(site, operand)
    terms = [one for one in operands if isinstance(one, Same | Split | Total)]
    totals = [one for one in terms if isinstance(one, Total)]
    splits = [one for one in terms if isinstance(one, Split)]
    if len({one.place for one in splits}) > 1:
        return site.unknown("mixes")
    if totals and splits:
        return _shifted(site, operands)
    ratios = [one.ratio / site.pieces if totals and isinstance(one, Same) else one.ratio for one in terms]
    if not all(site.equal(ratio, ratios[0]) for ratio in ratios):
        return Unknown("count", totals[0].op or site.op if totals else site.op, site.op if totals else None)
    return (totals or splits or [Same(ratios[0] if ratios else 1.0, drawn)])[0]


def _shifted(site: Site, operands: Sequence[Value]) -> Value:
    """Rows plus a total: numbers belong to the rows."""
    if site.name not in ADDITIVE:
        return not_linear(site, next(one for one in operands if isinstance(one, Total)))
    total = unify(site, [one for one in operands if isinstance(one, Total)])
    split = unify(site, [one for one in operands if not isinstance(one, Total)])
    if isinstance(total, Total) and isinstance(split, Split):
        return Shifted(split, total)
    return total if isinstance(total, Unknown) else split


def _elementwise(site: Site, values: Sequence[Value]) -> Value:
    if unknown := first_unknown(values):
        return unknown
    for i, value in enumerate(values):  # a piece of one row must not be repeated for other rows
        if isinstance(value, Split) and _dim_sizes(site.operand(i), value.dim) != _dim_sizes(site.result(), value.dim):
            return site.unknown("position")
    name = site.name
    if len(values) == 1 and isinstance(values[0], Columns) and name in ("convert_element_type", "copy"):
        return values[0]
    if name in ADDITIVE or (name == SELECT and isinstance(_related_one(site, values, 0), Same)):
        # linear, or at each entry one of the cases, the same case in the whole as in the pieces
        return _with_predicate(site, values) if name == SELECT else join(site, values)
    operands = related(site, values)
    if unknown := first_unknown(operands):
        return unknown
    for operand in operands:
        if isinstance(operand, Columns | Shifted):
            return not_linear(site, operand)
        if isinstance(operand, Extreme):
            return _of_extreme(site, operands)
        if isinstance(operand, Total):
            return _of_total(site, operand, operands)
    scaled = [one for one in operands if isinstance(one, Same | Split)]
    ratio = _ratio(site, scaled, [is_zero(value) for value in values])
    if ratio is None:
        return site.unknown("count")
    splits = [one for one in scaled if isinstance(one, Split)]
    if len({one.place for one in splits}) > 1:
        return site.unknown("mixes")
    if splits:
        split = splits[0]
        return Split(split.dim, split.blocks, ratio, split.order)
    return Same(ratio, any(isinstance(one, Same) and one.drawn for one in scaled))


def _related_one(site: Site, values: Sequence[Value], i: int) -> Value:
    value = values[i]
    return relation_of(value, site.operand(i), site.pieces, _dtype(site, i)) if isinstance(value, Known) else value


def _with_predicate(site: Site, values: Sequence[Value]) -> Value:
    predicate = _related_one(site, values, 0)
    assert isinstance(predicate, Same)
    if not site.equal(predicate.ratio, 1.0):
        return site.unknown("count")
    joined = join(OfOperand(site, 1), values[1:])
    return Same(joined.ratio, True) if predicate.drawn and isinstance(joined, Same) else joined


def _ratio(site: Site, operands: Sequence[Same | Split], zero: Sequence[bool]) -> float | None:
    """Return the ratio of the result; None if the result is no multiple of the pieces' results."""
    name, ratios = site.name, [one.ratio for one in operands]
    if name == "mul":
        return ratios[0] * ratios[1]
    if name == "div" and np.issubdtype(site.dtype, np.inexact):
        return ratios[0] / ratios[1] if ratios[1] else None
    if name in LINEAR and _stays_floating(site):
        return ratios[0]
    if all(site.equal(ratio, 1.0) for ratio in ratios):
        return 1.0
    if name in POWERS and ratios[0] > 0 and np.issubdtype(site.dtype, np.inexact):
        return ratios[0] ** POWERS[name](site.params)
    nonzero = [ratio for ratio, zeros in zip(ratios, zero, strict=True) if not zeros]
    if name == SELECT:
        nonzero = [ratio for ratio, zeros in zip(ratios[1:], zero[1:], strict=True) if not zeros]
        if not site.equal(ratios[0], 1.0):
            return None
        return _common(site, nonzero)
    if name in HOMOGENEOUS or name in UNSCALED:
        common = _common(site, nonzero)
        if common is None or not common > 0:
            return None
        return common if name in HOMOGENEOUS else 1.0
    return None


def _common(site: Site, ratios: Sequence[float]) -> float | None:
    if not ratios:
        return 1.0
    return ratios[0] if all(site.equal(ratio, ratios[0]) for ratio in ratios) else None


def _stays_floating(site: Site) -> bool:
    if site.name != "convert_element_type":
        return True
    dtype = site.params["new_dtype"]
    if jnp.issubdtype(dtype, jnp.inexact):
        return True
    source = site.whole.invars[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    integers = jnp.issubdtype(dtype, jnp.integer) and (source == jnp.bool_ or jnp.issubdtype(source, jnp.integer))
    return integers and dtype.itemsize >= source.itemsize  # none is cut off


def _of_total(site: Site, total: Total, operands: Sequence[Value]) -> Value:
    """f(c sum P_i) = c sum f(P_i) if f is linear: in its only operand, or in one factor, the other being the same everywhere."""
    if site.name in LINEAR and _stays_floating(site):
        return total
    if site.name == "mul":
        factors = [one for one in operands if one is not total]
        if len(factors) == 1 and isinstance(factors[0], Same):
            return total.scaled(factors[0].ratio)
    if site.name == "div" and operands[0] is total and np.issubdtype(site.dtype, np.inexact):
        divisor = operands[1]
        if isinstance(divisor, Same) and divisor.ratio:
            return total.scaled(1 / divisor.ratio)
    return not_linear(site, total)


def _keeps_order(site: Site) -> bool:
    if site.name != "convert_element_type":
        return False
    dtype, source = site.params["new_dtype"], site.whole.invars[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    return jnp.issubdtype(dtype, jnp.inexact) or source == jnp.bool_ or (dtype == jnp.int32 and source.kind in "iu")


def _of_extreme(site: Site, operands: Sequence[Value]) -> Value:
    """The largest of all is kept by what preserves order, and turned into the smallest by a minus."""
    extreme = next(one for one in operands if isinstance(one, Extreme))
    if len(operands) == 1:
        if site.name == "neg" and site.dtype.kind != "u":
            return Extreme("min" if extreme.kind == "max" else "max", extreme.op)
        if site.name in IDENTITIES or site.name == "reduce_precision" or _keeps_order(site):
            return extreme
        return not_linear(site, extreme)
    kind = {"max": "max", "or": "max", "min": "min", "and": "min"}.get(site.name)
    joined = kind == extreme.kind and all(
        one == extreme or (isinstance(one, Same) and one.ratio == 1.0) for one in operands
    )
    return extreme if joined else not_linear(site, extreme)


def _dim_sizes(shapes: Shapes, dim: int) -> tuple[int, int]:
    return shapes[0][dim], shapes[1][dim]


def _dtype(site: Site, i: int) -> Any:
    return getattr(site.whole.invars[i].aval, "dtype", None)
