"""Decide whether an update acts on each row of its sparse leaves by itself, by comparing two traces
of it.

One trace is for all rows of each leaf, the other for some of them. The update acts row by row if
two conditions hold:

- Both traces have the same operations except for numbers of rows.
- Each operation is known to act on rows in place. An unknown operation counts as mixing rows.

Inputs of rows outside of the part are 0, so a sum or a largest value over rows is the same in both
traces if it is 0 where the inputs are. The decision never depends on the values of arrays.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from shardopt.trace._jaxprs import shape_of
from shardopt.trace._primitives import ELEMENTWISE, IDENTITIES, words
from shardopt.trace._walk import Equations, Walk, scan_parts, while_parts

SAME, ROWS, UNIFORM, MIXED = "same", "rows", "uniform", "mixed"
SHAPE = "shape"
"""Used instead of the name of a primitive where the two traces differ."""
CALLS = frozenset(["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"])

_IN_PLACE = ELEMENTWISE - {"bitcast_convert_type"}
"""Elementwise primitives, except casts of bits: cast to another width, equal elements become
elements that differ.
"""
_COPIES = IDENTITIES | {"convert_element_type"}
_KEEPS_ZERO = _COPIES | words(
    "abs add add_any asin atan atan2 cbrt ceil complex conj erf expm1 floor imag integer_pow log1p"
    " neg or real reduce_precision round sign sin sinh sqrt square sub tan tanh xor"
)


class RowLabel(NamedTuple):
    """The known facts about a value that both traces have.

    Attributes:
      kind: one of

        - SAME: the value is equal in both traces;
        - ROWS: an array with the rows of a leaf. Each row depends only on the inputs of its row;
        - UNIFORM: an array of equal elements, as many as there are in its trace;
        - MIXED: none of these.
      primitives: the primitives that made a MIXED value.
      at_zero: the value wherever the inputs are 0, as they are in untouched rows; None if unknown.
      nonnegative: whether the value is known to be at least 0.
    """

    kind: str
    primitives: frozenset[str] = frozenset()
    at_zero: float | None = None
    nonnegative: bool = False

    def join(self, other: "RowLabel") -> "RowLabel":
        """Return the label of a value that is one of two values, if both traces choose the same
        one.
        """
        kinds = {self.kind, other.kind}
        if len(kinds) > 1 and kinds != {ROWS, UNIFORM}:
            return mixed("cond", of=[self, other])
        return RowLabel(
            self.kind if len(kinds) == 1 else ROWS,
            self.primitives | other.primitives,
            self.at_zero if self.at_zero == other.at_zero else None,
            self.nonnegative and other.nonnegative,
        )


def mixed(*names: str, of: Sequence[RowLabel] = ()) -> RowLabel:
    """Return the label MIXED, for a result of primitives that do not act row by row.

    Args:
      names: the primitives, used if no operand has primitives in its label.
      of: the labels of the operands.
    """
    primitives = frozenset[str]().union(*(label.primitives for label in of))
    return RowLabel(MIXED, primitives or frozenset(names))


def compare(
    all_rows: ClosedJaxpr, some_rows: ClosedJaxpr, labels: Sequence[RowLabel]
) -> list[RowLabel]:
    """Return the labels of the results of two traces of one function, from those of its
    arguments.
    """
    walk = Walk(
        equation=_result_labels,
        constant=lambda values: RowLabel(SAME) if _is_equal(*values) else mixed(SHAPE),
        literal=_label_of_literal,
        different=mixed(SHAPE),
        join=RowLabel.join,
    )
    return walk.follow((all_rows, some_rows), labels)


def _is_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer) or np.shape(a) != np.shape(b):
        return False
    if any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in (a, b)):
        return False
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


def _label_of_literal(values: Sequence[Any]) -> RowLabel:
    if not _is_equal(*values):
        return mixed(SHAPE)
    number = float(values[0]) if np.ndim(values[0]) == 0 and np.isrealobj(values[0]) else None
    return RowLabel(SAME, at_zero=number, nonnegative=number is not None and number >= 0)


def _result_labels(walk: Walk[RowLabel], eqns: Equations, labels: list[RowLabel]) -> list[RowLabel]:
    name, num_results = eqns[0].primitive.name, len(eqns[0].outvars)
    if name in _CONTROL:
        return _CONTROL[name](walk, eqns, labels)
    if name in CALLS and (results := walk.call(eqns, labels)) is not None:
        return results
    return [_result_label(eqns, labels)] * num_results


# Control flow: all rows must take the same branches, and the same number of iterations.


def _cond(walk: Walk[RowLabel], eqns: Equations, labels: list[RowLabel]) -> list[RowLabel]:
    if labels[0].kind != SAME or len({len(eqn.params["branches"]) for eqn in eqns}) > 1:
        return [mixed("cond", of=labels[:1])] * len(eqns[0].outvars)
    return walk.branches(eqns, labels[1:])


def _while(walk: Walk[RowLabel], eqns: Equations, labels: list[RowLabel]) -> list[RowLabel]:
    cond_consts, body_consts, carry = while_parts(eqns[0], labels)
    carry = walk.loop([eqn.params["body_jaxpr"] for eqn in eqns], body_consts, carry)[0]
    (predicate,) = walk.follow([eqn.params["cond_jaxpr"] for eqn in eqns], [*cond_consts, *carry])
    return carry if predicate.kind == SAME else [mixed("while", of=[predicate])] * len(carry)


def _scan(walk: Walk[RowLabel], eqns: Equations, labels: list[RowLabel]) -> list[RowLabel]:
    consts, carry, stacked = scan_parts(eqns[0], labels)
    is_same = all(label.kind == SAME for label in stacked)
    if not is_same or len({eqn.params["length"] for eqn in eqns}) > 1:
        # the scan carries values from row to row, or counts rows
        return [mixed("scan", of=labels)] * len(eqns[0].outvars)
    carry, results = walk.loop([eqn.params["jaxpr"] for eqn in eqns], consts, carry, stacked)
    return [*carry, *(x if x.kind == SAME else mixed("scan", of=[x]) for x in results)]


_CONTROL = {"cond": _cond, "while": _while, "scan": _scan}


def _result_label(eqns: Equations, labels: list[RowLabel]) -> RowLabel:
    """Return the label of the result of one primitive, given the labels of its operands."""
    name, kinds = eqns[0].primitive.name, {label.kind for label in labels}
    if MIXED in kinds:
        return mixed(name, of=labels)
    if name == "broadcast_in_dim" or (name in _MOVES and kinds != {SAME}):
        return _MOVES[name](eqns, labels) or mixed(name)
    kind = _kind_of_same(eqns) if kinds <= {SAME} else _kind_in_place(eqns, labels)
    if kind == MIXED or not _same_params(eqns):
        return mixed(name)
    at_zero = _at_zero(eqns[0], labels) if name in _IN_PLACE else None
    return RowLabel(kind, at_zero=at_zero, nonnegative=_is_nonnegative(eqns[0], labels))


def _kind_of_same(eqns: Equations) -> str:
    """Return the kind of a result whose operands are equal in both traces."""
    first, second = ([shape_of(x) for x in (*eqn.invars, *eqn.outvars)] for eqn in eqns)
    return SAME if first == second else MIXED


def _kind_in_place(eqns: Equations, labels: list[RowLabel]) -> str:
    """Return the kind of a result if the primitive acts on rows in place."""
    is_in_place = all(_is_in_place(eqn, i, label) for eqn in eqns for i, label in enumerate(labels))
    if not is_in_place or eqns[0].primitive.name not in _IN_PLACE:
        return MIXED
    is_uniform = all(
        label.kind == UNIFORM or (label.kind == SAME and math.prod(shape_of(x)) == 1)
        for x, label in zip(eqns[0].invars, labels, strict=True)
    )
    return UNIFORM if is_uniform else ROWS


def _is_in_place(eqn: JaxprEqn, i: int, label: RowLabel) -> bool:
    """Return whether each row of the result depends only on the row of operand i at its index.

    An operand with the same value for all rows counts too.
    """
    shape, result = shape_of(eqn.invars[i]), shape_of(eqn.outvars[0])
    if label.kind == SAME:
        return math.prod(shape) == 1 or shape == result or shape[0] == 1
    return label.kind == UNIFORM or shape[:1] == result[:1]


# Rules of primitives that move or join elements. A rule takes the equations of both traces and the
# labels of the operands, and returns the label of the result; None for MIXED.


def _broadcast(eqns: Equations, labels: list[RowLabel]) -> RowLabel | None:
    label, dims = labels[0], eqns[0].params["broadcast_dimensions"]
    old, new = ([shape_of(x.invars[0]) for x in eqns], [shape_of(x.outvars[0]) for x in eqns])
    if dims != eqns[1].params["broadcast_dimensions"]:
        return None
    if label.kind == ROWS:
        keeps_rows = dims[:1] == (0,) and all(a[:1] == b[:1] for a, b in zip(old, new, strict=True))
        return label if keeps_rows else None
    if label.kind == UNIFORM or (old[0] == old[1] and new[0] == new[1]):
        return label
    if old[0] == ():
        return label._replace(kind=UNIFORM)
    by_row = 0 not in dims and new[0][1:] == new[1][1:]
    return label._replace(kind=ROWS) if by_row else None


def _reshape(eqns: Equations, labels: list[RowLabel]) -> RowLabel | None:
    keeps_rows = all(shape_of(x.invars[0])[:1] == shape_of(x.outvars[0])[:1] for x in eqns)
    in_order = eqns[0].params["dimensions"] is None
    return labels[0] if labels[0].kind == UNIFORM or (keeps_rows and in_order) else None


def _squeeze(eqns: Equations, labels: list[RowLabel]) -> RowLabel | None:
    dims = eqns[0].params["dimensions"]
    if dims != eqns[1].params["dimensions"]:
        return None
    return labels[0] if labels[0].kind == UNIFORM or 0 not in dims else None


def _reduce(eqns: Equations, labels: list[RowLabel]) -> RowLabel | None:
    label, name, axes = labels[0], eqns[0].primitive.name, eqns[0].params["axes"]
    if not _same_params(eqns) or not _same_sizes(eqns, axes):
        return None
    if 0 not in axes:
        counts = name.startswith("arg")
        at_zero = 0.0 if label.at_zero == 0 and not counts else None
        return label._replace(at_zero=at_zero, nonnegative=label.nonnegative and not counts)
    # rows that are missing must not change the result
    keeps = name == "reduce_sum" or (name == "reduce_max" and label.nonnegative)
    return RowLabel(SAME, nonnegative=label.nonnegative) if keeps and label.at_zero == 0 else None


def _product(eqns: Equations, labels: list[RowLabel]) -> RowLabel | None:
    """Apply to `dot_general` if it sums the product of two leaves over all elements, as a squared
    norm does.
    """
    (left_dims, right_dims), _ = eqns[0].params["dimension_numbers"]
    is_sum = (left_dims == right_dims and _same_sizes(eqns, left_dims)) and all(
        shape_of(x.outvars[0]) == () and shape_of(x.invars[0]) == shape_of(x.invars[1])
        for x in eqns
    )
    has_zeros = any(label.at_zero == 0 for label in labels)
    of_rows = all(label.kind in (ROWS, UNIFORM) for label in labels)
    return RowLabel(SAME) if is_sum and has_zeros and of_rows else None


def _same_sizes(eqns: Equations, dims: Sequence[int]) -> bool:
    """Return whether dims of the first operand, except the dim of rows, have equal sizes in both
    traces.
    """
    first, second = (shape_of(eqn.invars[0]) for eqn in eqns)
    return all(first[dim] == second[dim] for dim in dims if dim != 0)


_REDUCTIONS = words(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"
)
_MOVES: dict[str, Callable[[Equations, list[RowLabel]], RowLabel | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _product,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}


def _at_zero(eqn: JaxprEqn, labels: Sequence[RowLabel]) -> float | None:
    """Return the value of a primitive's result where the inputs are 0; None if it is unknown."""
    name, values = eqn.primitive.name, [label.at_zero for label in labels]
    if name in _COPIES and _is_inexact(eqn.outvars[0]):
        return values[0]
    if 0 in values[: _ABSORBED_BY_ZERO.get(name, 0)]:
        return 0.0
    if name == "select_n":
        return values[1] if len(set(values[1:])) == 1 else None
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if name in _EXTREMES:
        return _EXTREMES[name](known)
    return 0.0 if name in _KEEPS_ZERO and not any(known) else None


_EXTREMES = {"max": max, "min": min}
_ABSORBED_BY_ZERO = {"mul": 2, "and": 2, "div": 1, "rem": 1}
"""Primitive -> how many of its first operands make the result 0 if one of them is 0."""


def _is_nonnegative(eqn: JaxprEqn, labels: Sequence[RowLabel]) -> bool:
    name = eqn.primitive.name
    if name in ("abs", "square", "sqrt", "exp"):
        return True
    if name == "integer_pow" and eqn.params["y"] % 2 == 0:
        return True
    return name in _COPIES | {"max"} and all(label.nonnegative for label in labels)


def _same_params(eqns: Equations) -> bool:
    """Return whether two equations of one primitive have the same parameters."""
    first, second = (eqn.params for eqn in eqns)
    values = [*first.values(), *second.values()]
    bodies = [value for value in values if isinstance(value, ClosedJaxpr)]
    if first.keys() != second.keys() or any(body.consts for body in bodies):
        return False
    return all(
        value is second[key] or str(value) == str(second[key]) for key, value in first.items()
    )


def _is_inexact(atom: Var | Literal) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.float32), jnp.inexact)
