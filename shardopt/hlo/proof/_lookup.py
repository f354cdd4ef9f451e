"""Lookups in a table whose rows are spread over devices: rows of other devices are masked, and the
sum is the lookup.

A device looks up `ids - start` in its rows, and puts zeros where `ids` is outside of `[start, start
+ rows)`. Both must be about the same ids and the same start, so integers carry the instruction that
made them and the number that was added to them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardopt.hlo._walk import KINDS, MIRRORED
from shardopt.hlo.proof._lines import Line, dtype_of
from shardopt.hlo.proof._value import (
    DerivedValue,
    Facts,
    Hidden,
    Positions,
    Unproved,
    merged_hidden,
    partition,
    scaled,
    unify,
    zeros,
)
from shardopt.trace._primitives import words


class Shift(NamedTuple):
    """Numbers that instruction `source` made, plus a number per device."""

    source: int
    plus: Positions


class Range(NamedTuple):
    """Whether the numbers of `source` are within (or outside of) an interval per device.

    None is no bound.
    """

    source: int
    low: Positions | None
    high: Positions | None
    inside: bool


class Rows(NamedTuple):
    """Rows that were looked up with the numbers of `source`: right where these are in an interval,
    else anything.
    """

    source: int
    low: Positions
    high: Positions
    row: Hidden


KEEP = words("broadcast reshape bitcast copy convert reduce-precision")


def noted(line: Line, operands: Sequence[DerivedValue], result: DerivedValue) -> DerivedValue:
    """Return the result of an instruction with the known facts about its numbers."""
    if result.faults or result.data is not None:
        return result
    if line.opcode not in KINDS and (sums := _sums(line, operands)) != result.sums:
        result = result._replace(sums=sums)
    if line.opcode in KEEP and operands:
        facts = operands[0].facts
        if dtype_of(line.shape) == "pred":
            return result._replace(facts=Facts(within=facts.within, rows=facts.rows))
        return result._replace(facts=Facts(shift=facts.shift, rows=facts.rows))
    if line.opcode == "transpose" and operands[0].facts.rows is not None:
        return result._replace(facts=Facts(rows=operands[0].facts.rows))
    if result.facts != Facts():  # set by `looked_up`
        return result
    return result._replace(facts=_facts(line, operands))


def _sums(line: Line, operands: Sequence[DerivedValue]) -> frozenset[Positions]:
    """Return over which groups a linear function of complete sums is a complete sum."""
    if line.opcode in _LINEAR and operands:
        return operands[0].sums
    if line.opcode in ("multiply", "dot", "convolution") and len(operands) == 2:
        return operands[0].sums | operands[1].sums
    if line.opcode in ("add", "subtract", "concatenate", "dynamic-update-slice"):
        terms = [operand.sums for operand in operands if not operand.zero]
        return frozenset.intersection(*terms) if terms else frozenset()
    return frozenset()


_LINEAR = KEEP | words("transpose slice dynamic-slice pad reverse negate divide reduce")


def _facts(line: Line, operands: Sequence[DerivedValue]) -> Facts:
    if line.opcode in ("add", "subtract") and (shift := _shifted(line, operands)):
        return Facts(shift=shift)
    if line.opcode == "compare" and (within := _compared(line, operands)):
        return Facts(within=within)
    conditions = [value.facts.within for value in operands if value.facts.within is not None]
    if line.opcode in _LOGIC and len(conditions) == len(operands):
        return Facts(within=_LOGIC[line.opcode](*conditions))
    if dtype_of(line.shape)[0] in "su" and not line.shape.startswith("("):
        return Facts(shift=Shift(line.order, zeros(line.devices)))
    return Facts()


def _shifted(line: Line, operands: Sequence[DerivedValue]) -> Shift | None:
    """Return the sum of shifted numbers and a number of each device, or their difference."""
    first, second = operands
    sign = 1 if line.opcode == "add" else -1
    pairs = [(first, second), (second, first)] if sign == 1 else [(first, second)]
    for value, other in pairs:
        shift = value.facts.shift
        plus = splat(other, line.devices)
        if shift is not None and plus is not None:
            return Shift(shift.source, Positions.of(shift.plus.array + sign * plus))
    return None


def _compared(line: Line, operands: Sequence[DerivedValue]) -> Range | None:
    """Return the interval of numbers, by their comparison with a number of each device."""
    direction = line.attributes.get("direction", "")
    for value, other, turned in (
        (*operands, direction),
        (*operands[::-1], MIRRORED.get(direction, "")),
    ):
        shift = value.facts.shift
        bound = splat(other, line.devices)
        if shift is not None and bound is not None and turned in MIRRORED:
            return _bounded(shift, bound, turned)
    return None


def splat(value: DerivedValue, devices: int) -> np.ndarray | None:
    """Return the one known number of each device."""
    if value.data is None or not value.data.array.size:
        return None
    rows = value.data.array.reshape(len(value.data.array), -1)
    if (rows != rows[:, :1]).any():
        return None
    return np.broadcast_to(rows[:, 0], (devices,)).astype(np.int64)


def _bounded(shift: Shift, bound: np.ndarray, direction: str) -> Range:
    # As an inclusive bound of the source: source + plus < bound is source <= bound - plus - 1.
    limit = bound - shift.plus.array + {"LT": -1, "GT": 1}.get(direction, 0)
    if direction in ("LT", "LE"):
        return Range(shift.source, None, Positions.of(limit), True)
    return Range(shift.source, Positions.of(limit), None, True)


def _both(first: Range, second: Range) -> Range | None:
    """Return the interval between two bounds of the same numbers; None for other conditions."""
    if first.source != second.source or not (first.inside and second.inside):
        return None
    lows = [side.low for side in (first, second) if side.low is not None]
    highs = [side.high for side in (first, second) if side.high is not None]
    if len(lows) != 1 or len(highs) != 1:
        return None
    return Range(first.source, lows[0], highs[0], True)


def _negated(condition: Range) -> Range:
    """Return the opposite condition: behind a bound, or outside of an interval."""
    source, low, high, inside = condition
    if low is None and high is not None:
        return Range(source, Positions.of(high.array + 1), None, True)
    if high is None and low is not None:
        return Range(source, None, Positions.of(low.array - 1), True)
    return Range(source, low, high, not inside)


def _either(first: Range, second: Range) -> Range | None:
    both = _both(_negated(first), _negated(second))
    return both and _negated(both)


_LOGIC = {"not": _negated, "and": _both, "or": _either}


def own_rows(
    table: DerivedValue, dim: int, indices: DerivedValue, order: int
) -> tuple[Rows, DerivedValue]:
    """Return the result of a lookup in the rows of each device, and the indices without their
    dependence on the device.
    """
    factors = table.dims[dim]
    shift = indices.facts.shift
    if len(factors) != 1 or factors[0].size <= factors[0].local or shift is None:
        raise Unproved(f"it looks up elements of dim {dim}, of which each device holds a piece.")
    (factor,) = factors
    if shift.plus is not scaled(factor.at, -1):
        raise Unproved(
            "it looks up elements by numbers that do not start where the piece of the device"
            " starts."
        )
    row = Hidden("device", scaled(factor.at, 1, factor.local), factor.size // factor.local, order)
    last = Positions.of(factor.at.array + factor.local - 1)
    return Rows(shift.source, factor.at, last, row), without(indices, row)


def without(value: DerivedValue, row: Hidden) -> DerivedValue:
    """Return a value without the dependence on the device that the start of its rows brings."""
    hidden = tuple(
        h for h in value.hidden if h.kind != "device" or partition(h.at) is not partition(row.at)
    )
    return value._replace(hidden=hidden)


def masked(line: Line, operands: Sequence[DerivedValue]) -> DerivedValue | None:
    """Return the value of a select that puts zeros where rows belong to other devices: a term of
    the lookup.
    """
    predicate, *branches = operands
    condition = predicate.facts.within
    if condition is None:
        return None
    rows, other = branches if condition.inside else branches[::-1]
    table_rows = rows.facts.rows
    if table_rows is None or not other.zero:
        return None
    if (condition.source, condition.low, condition.high) != (
        table_rows.source,
        table_rows.low,
        table_rows.high,
    ):
        # Ids and start must be the same numbers in the lookup and in the mask, or rows would be
        # lost.
        raise Unproved("it masks other rows than those that the device does not hold.")
    if table_rows.row not in rows.hidden:
        return None
    term, condition_value = unify(rows, without(predicate, table_rows.row))
    hidden = tuple(h for h in term.hidden if h != table_rows.row)
    # Each id is in the rows of one device, and the others have zeros: a sum over them is the
    # lookup.
    pending = table_rows.row._replace(kind="add", origin=line.order)
    return DerivedValue(
        line.dims,
        term.dims,
        merged_hidden([hidden, condition_value.hidden, (pending,)]),
    )


def scattered_rows(indices: DerivedValue, local: int) -> tuple[Positions, int] | None:
    """Return where the rows of each device start, and how many there are in all, if indices count
    from that start.
    """
    if indices.facts.shift is None:
        return None
    at = -indices.facts.shift.plus.array
    starts = np.unique(at)
    if len(starts) < 2 or (starts != np.arange(len(starts)) * local).any():
        return None
    return Positions.of(at), len(starts) * local
