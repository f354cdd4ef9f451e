"""Lookups in a table of which each device holds some rows: rows of other devices are masked, and
the sum is the lookup.

A device looks up `ids - start` in its rows, and puts zeros where `ids` is outside of `[start, start
+ rows)`. Both must be about the same ids and the same start, so integers carry the instruction that
made them and what was added to them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardopt.hlo._walk import KINDS
from shardopt.hlo.proof._lines import Line, dtype_of
from shardopt.hlo.proof._value import (
    Hidden,
    Positions,
    Unproved,
    Value,
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
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def noted(line: Line, operands: Sequence[Value], result: Value) -> Value:
    """Return the result of an instruction with what is known about the numbers in it."""
    if result.faults or result.data is not None:
        return result
    if line.opcode not in KINDS and (sums := _sums(line, operands)) != result.sums:
        result = result._replace(sums=sums)
    if line.opcode in KEEP and operands:
        is_mask = dtype_of(line.shape) == "pred"
        note = operands[0].note
        return result._replace(
            note=note if isinstance(note, (Rows, Range if is_mask else Shift)) else None
        )
    if line.opcode == "transpose" and isinstance(operands[0].note, Rows):
        return result._replace(note=operands[0].note)
    if result.note is not None:  # set by `looked_up`
        return result
    return result._replace(note=_note(line, operands))


def _sums(line: Line, operands: Sequence[Value]) -> frozenset[Positions]:
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


def _note(line: Line, operands: Sequence[Value]) -> Shift | Range | None:
    if line.opcode in ("add", "subtract") and len(operands) == 2:
        for value, other in (operands, operands[::-1]):
            plus = _splat(other, line.devices)
            if (
                isinstance(value.note, Shift)
                and plus is not None
                and (line.opcode == "add" or value is operands[0])
            ):
                plus = plus if line.opcode == "add" else -plus
                return Shift(value.note.source, Positions.of(value.note.plus.array + plus))
    if line.opcode == "compare":
        direction = line.attributes.get("direction", "")
        for value, other, turned in (
            (*operands, direction),
            (*operands[::-1], _MIRRORED.get(direction, "")),
        ):
            bound = _splat(other, line.devices)
            if isinstance(value.note, Shift) and bound is not None and turned in _MIRRORED:
                return _bounded(value.note, bound, turned)
    conditions = [value.note for value in operands if isinstance(value.note, Range)]
    if line.opcode == "not" and conditions:
        return _negated(conditions[0])
    if len(conditions) == 2 and line.opcode == "and":
        return _both(*conditions)
    if len(conditions) == 2 and line.opcode == "or":
        both = _both(*map(_negated, conditions))
        return both and _negated(both)
    if dtype_of(line.shape)[0] in "su" and not line.shape.startswith("("):
        return Shift(line.order, zeros(line.devices))
    return None


def _splat(value: Value, devices: int) -> np.ndarray | None:
    """Return the one known number of each device."""
    if value.data is None or not value.data.array.size:
        return None
    rows = value.data.array.reshape(len(value.data.array), -1)
    if (rows != rows[:, :1]).any():
        return None
    return np.broadcast_to(rows[:, 0], (devices,)).astype(np.int64)


def _bounded(shift: Shift, bound: np.ndarray, direction: str) -> Range:
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


def own_rows(table: Value, dim: int, indices: Value, order: int) -> tuple[Rows, Value]:
    """Return what a lookup in the rows of each device gives, and the indices without their
    dependence on the device.
    """
    factors = table.dims[dim]
    note = indices.note
    if len(factors) != 1 or factors[0].size <= factors[0].local or not isinstance(note, Shift):
        raise Unproved(f"it looks up elements of dim {dim}, of which each device holds a piece.")
    (factor,) = factors
    if note.plus is not scaled(factor.at, -1):
        raise Unproved(
            "it looks up elements by numbers that do not start where the piece of the device"
            " starts."
        )
    row = Hidden("device", scaled(factor.at, 1, factor.local), factor.size // factor.local, order)
    last = Positions.of(factor.at.array + factor.local - 1)
    return Rows(note.source, factor.at, last, row), without(indices, row)


def without(value: Value, row: Hidden) -> Value:
    """Return a value without the dependence on the device that the start of its rows brings."""
    hidden = tuple(
        h for h in value.hidden if h.kind != "device" or partition(h.at) is not partition(row.at)
    )
    return value._replace(hidden=hidden)


def masked(line: Line, operands: Sequence[Value]) -> Value | None:
    """Return the value of a select that puts zeros where rows belong to other devices: a term of
    the lookup.
    """
    predicate, *branches = operands
    condition = predicate.note
    if not isinstance(condition, Range):
        return None
    rows, other = branches if condition.inside else branches[::-1]
    note = rows.note
    if not isinstance(note, Rows) or not other.zero:
        return None
    if (condition.source, condition.low, condition.high) != (note.source, note.low, note.high):
        raise Unproved("it masks other rows than those that the device does not hold.")
    if note.row not in rows.hidden:
        return None
    frame, term, condition_value = unify(
        rows, without(predicate, note.row), [(i, i) for i in range(len(rows.shape))]
    )
    hidden = tuple(h for h in term.hidden if h != note.row)
    pending = note.row._replace(kind="add", origin=line.order)
    dims = tuple(frame[i] for i in range(len(rows.shape)))
    return Value(line.dims, dims, merged_hidden([hidden, condition_value.hidden, (pending,)]))


def scattered_rows(indices: Value, local: int) -> tuple[Positions, int] | None:
    """Return where the rows of each device start, and how many there are in all, if indices count
    from that start.
    """
    if not isinstance(indices.note, Shift):
        return None
    at = -indices.note.plus.array
    starts = np.unique(at)
    if len(starts) < 2 or (starts != np.arange(len(starts)) * local).any():
        return None
    return Positions.of(at), len(starts) * local
