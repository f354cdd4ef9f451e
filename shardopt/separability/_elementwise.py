"""Rules of equations that work entry by entry."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from shardopt.separability._numbers import relation_of_numbers
from shardopt.separability._relations import (
    Columns,
    EquationPair,
    Extreme,
    Known,
    Relation,
    Same,
    Shifted,
    Split,
    Total,
    Unrelated,
    is_drawn,
    is_exactly_same,
    scaled,
    sizes_of_dim,
)
from shardopt.trace._primitives import IDENTITIES, words

LINEAR = IDENTITIES | {"neg", "real", "imag", "conj"}
"""f(r a) = r f(a), and f(a + b) = f(a) + f(b)."""
ADDITIVE = words("add sub add_any complex")
"""f(a + c, b + d) = f(a, b) + f(c, d), and f(r a, r b) = r f(a, b)."""
SELECT = "select_n"


def elementwise(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Return the relations of the results of an equation that works entry by entry."""
    return [_elementwise(site, relations)] * site.num_results


def first_unknown(relations: Sequence[Relation]) -> Unrelated | None:
    """Return the first `Unrelated` among relations; None if there is none."""
    return next((relation for relation in relations if isinstance(relation, Unrelated)), None)


def unknown_results(
    site: EquationPair, relations: Sequence[Relation], reason: str = "mixes"
) -> list[Relation]:
    """Return `Unrelated` for each result: the first `Unrelated` of the operands, or else this equation."""
    return [first_unknown(relations) or site.unknown(reason)] * site.num_results


def resolve_numbers(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Return the relations of operands.

    Known numbers are replaced by the relation that follows from them.
    """
    return [
        (
            relation_of_numbers(
                relation, site.operand_shapes(i), site.num_pieces, site.operand_dtype(i)
            )
            if isinstance(relation, Known)
            else relation
        )
        for i, relation in enumerate(relations)
    ]


def is_zero(relation: Relation) -> bool:
    """Return whether the trace says that a value is 0, in the whole batch and in every piece."""
    return isinstance(relation, Known) and relation.all_zero


def not_linear(site: EquationPair, relation: Relation) -> Unrelated:
    """Return `Unrelated` for an equation that cannot take a total or an extreme."""
    relation = relation.total if isinstance(relation, Shifted) else relation
    op = relation.op if isinstance(relation, Total | Extreme) else None
    return Unrelated("mixes", op or site.op, site.op)


def join(site: EquationPair, relations: Sequence[Relation]) -> Relation:
    """Return the relation of a result whose entries are taken from the operands, or are their sums."""
    return unify(
        site, resolve_numbers(site, relations), [is_zero(relation) for relation in relations]
    )


def unify(
    site: EquationPair, relations: Sequence[Relation], zeros: Sequence[bool] | None = None
) -> Relation:
    """Return the relation that all of several values have.

    Zeros have every relation: 0 = r 0, and zeros concatenated or added are 0. A value S that is the
    same in all pieces is also the total (1/n) (S + ... + S).

    Args:
      site: the equation.
      relations: the relations of the values, without `Known`.
      zeros: whether each value is zero; by default none is.
    """
    drawn = any(map(is_drawn, relations))
    zeros = [False] * len(relations) if zeros is None else zeros
    operands = [relation for relation, zero in zip(relations, zeros, strict=True) if not zero]
    unknown = first_unknown(operands)
    if unknown:
        return unknown
    for operand in operands:
        if not isinstance(operand, Same | Split | Total):
            return not_linear(site, operand)
    terms = [term for term in operands if isinstance(term, Same | Split | Total)]
    totals = [term for term in terms if isinstance(term, Total)]
    splits = [term for term in terms if isinstance(term, Split)]
    if len({term.place for term in splits}) > 1:
        return site.unknown("mixes")
    if totals and splits:
        return _add_rows_and_totals(site, operands)
    ratios = [
        term.ratio / site.num_pieces if totals and isinstance(term, Same) else term.ratio
        for term in terms
    ]
    if len(set(ratios)) > 1:
        return Unrelated(
            "count", totals[0].op or site.op if totals else site.op, site.op if totals else None
        )
    joined = (totals or splits or [Same(ratios[0] if ratios else Fraction(1))])[0]
    return dataclasses.replace(joined, drawn=drawn)


def _add_rows_and_totals(site: EquationPair, operands: Sequence[Relation]) -> Relation:
    """Return the relation of rows plus totals.

    Terms that are the same in all pieces count as rows.
    """
    if site.name not in ADDITIVE:
        return not_linear(site, next(operand for operand in operands if isinstance(operand, Total)))
    total = unify(site, [operand for operand in operands if isinstance(operand, Total)])
    split = unify(site, [operand for operand in operands if not isinstance(operand, Total)])
    if isinstance(total, Total) and isinstance(split, Split):
        return Shifted(split, total)
    return total if isinstance(total, Unrelated) else split


def _elementwise(site: EquationPair, relations: Sequence[Relation]) -> Relation:
    # a piece of one row must not be broadcast to several rows
    for i, relation in enumerate(relations):
        if isinstance(relation, Split) and sizes_of_dim(
            site.operand_shapes(i), relation.dim
        ) != sizes_of_dim(site.result_shapes(), relation.dim):
            return site.unknown("position")
    name = site.name
    # numbers of rows are below 2^31
    keeps_numbers = name == "copy" or (
        name == "convert_element_type" and site.dtype.kind in "iu" and site.dtype.itemsize >= 4
    )
    if len(relations) == 1 and isinstance(relations[0], Columns) and keeps_numbers:
        return relations[0]
    if name in ADDITIVE:
        return join(site, relations)
    operands = resolve_numbers(site, relations)
    # the same choice in the whole trace and in the pieces
    if name == SELECT and isinstance(operands[0], Same):
        if operands[0].ratio != 1:
            return site.unknown("count")
        return unify(site, operands[1:], [is_zero(case) for case in relations[1:]])
    unknown = first_unknown(operands)
    if unknown:
        return unknown
    for operand in operands:
        if isinstance(operand, Columns | Shifted):
            return not_linear(site, operand)
        if isinstance(operand, Extreme):
            return _apply_to_extreme(site, operands)
        if isinstance(operand, Total):
            return _apply_to_total(site, operand, operands)
    terms = [operand for operand in operands if isinstance(operand, Same | Split)]
    ratio = _result_ratio(site, terms, [is_zero(relation) for relation in relations])
    if ratio is None:
        return site.unknown("count")
    splits = [operand for operand in terms if isinstance(operand, Split)]
    if len({operand.place for operand in splits}) > 1:
        return site.unknown("mixes")
    if splits:
        return dataclasses.replace(splits[0], ratio=ratio)
    return Same(ratio)


def _result_ratio(
    site: EquationPair, operands: Sequence[Same | Split], zeros: Sequence[bool]
) -> Fraction | None:
    """Return the ratio of the result in the whole trace to the result in a piece.

    None if there is no fixed ratio.

    Args:
      site: the equation.
      operands: the relations of the operands.
      zeros: whether each operand is zero, so that any ratio is right for it.
    """
    ratios = [operand.ratio for operand in operands]
    if all(ratio == 1 for ratio in ratios):
        return Fraction(1)
    if site.name == "mul":
        return ratios[0] * ratios[1]
    if site.name == "div" and np.issubdtype(site.dtype, np.inexact):
        return ratios[0] / ratios[1]
    # 8-bit products take the largest magnitude of a gradient
    if _is_linear(site) or site.name == "abs":
        return ratios[0]
    # finite up to overflow, which rounding does not promise; a multiple has the sign of the number
    compares = site.name in ("eq", "ne", "lt", "le", "gt", "ge")
    if site.name == "is_finite" or (compares and zeros[1]):
        return Fraction(1)
    if site.name == SELECT and ratios[0] == 1:
        nonzero = {ratio for ratio, zero in zip(ratios[1:], zeros[1:], strict=True) if not zero}
        if len(nonzero) < 2:
            return next(iter(nonzero), Fraction(1))
    return None


def _is_linear(site: EquationPair) -> bool:
    """Return whether f(r a) = r f(a) and f(a + b) = f(a) + f(b), up to the rounding of the dtype.

    A cast to integers is, if no integer is cut off. A rounding to fewer bits than the dtype has is
    not.
    """
    if site.name == "reduce_precision":
        bits = jnp.finfo(site.dtype)
        return (
            site.params["mantissa_bits"] >= bits.nmant and site.params["exponent_bits"] >= bits.nexp
        )
    if site.name != "convert_element_type":
        return site.name in LINEAR
    target = site.params["new_dtype"]
    source = site.operand_dtype()
    if jnp.issubdtype(target, jnp.inexact):
        return True
    return np.can_cast(source, target) and jnp.issubdtype(target, jnp.integer)


def _apply_to_total(site: EquationPair, total: Total, operands: Sequence[Relation]) -> Relation:
    """Return the relation of f(total): f(c sum P_i) = c sum f(P_i) if f is linear.

    A product is linear in one factor if the other factor is the same in all pieces. So is a
    quotient in its numerator.
    """
    if _is_linear(site):
        return total
    if site.name == "mul":
        other_factors = [operand for operand in operands if operand is not total]
        if len(other_factors) == 1 and isinstance(other_factors[0], Same):
            return scaled(total, other_factors[0].ratio)
    if site.name == "div" and operands[0] is total and np.issubdtype(site.dtype, np.inexact):
        divisor = operands[1]
        if isinstance(divisor, Same):
            return scaled(total, 1 / divisor.ratio)
    return not_linear(site, total)


def _keeps_order(site: EquationPair) -> bool:
    """Return whether an equation is a conversion that changes no order, and wraps nothing."""
    if site.name != "convert_element_type":
        return False
    target = site.params["new_dtype"]
    source = site.operand_dtype()
    if jnp.issubdtype(target, jnp.inexact):
        return target.itemsize > 1  # a float of 8 bits may have no infinity, so it is NaN
    return np.can_cast(source, target)


def _apply_to_extreme(site: EquationPair, operands: Sequence[Relation]) -> Relation:
    """Return the relation of f(extreme): f must preserve the order of numbers, or be a minus, which
    reverses it.
    """
    extreme = next(operand for operand in operands if isinstance(operand, Extreme))
    if len(operands) == 1:
        if site.name == "neg" and jnp.issubdtype(site.dtype, jnp.inexact):
            return Extreme("min" if extreme.kind == "max" else "max", extreme.op)
        if site.name in IDENTITIES or site.name == "reduce_precision" or _keeps_order(site):
            return extreme
        return not_linear(site, extreme)
    kinds = {"or": "max", "and": "min"} if site.dtype == bool else {}
    kind = kinds.get(site.name, site.name)
    is_combined = kind == extreme.kind and all(
        operand == extreme or is_exactly_same(operand) for operand in operands
    )
    return extreme if is_combined else not_linear(site, extreme)
