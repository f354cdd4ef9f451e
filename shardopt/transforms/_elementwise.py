"""Decide whether a function acts element by element (or row by row), by comparing two traces of it.

One trace is for whole leaves, the other for a part of each leaf: a shard, or some rows. The function acts element by
element if two conditions hold:

- Both traces have the same operations except for shapes.
- Each operation is known to act on elements in place. An unknown operation counts as mixing elements.

The decision never depends on the values of arrays.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardopt.transforms._primitives import (
    ELEMENT,
    OVER_AXES,
    SAME,
    SHAPE,
    Label,
    LeafSplit,
    axes_of,
    bodies_of,
    join,
    mixed,
    over_axes,
    result_of,
    same_params,
    shape_of,
)

CALLS = frozenset(["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"])


def compare(
    whole_trace: ClosedJaxpr, part_trace: ClosedJaxpr, labels: Sequence[Label], split: LeafSplit
) -> list[Label]:
    """Return the labels of the results of two traces of one function.

    Args:
      whole_trace: the trace for whole leaves.
      part_trace: the trace for parts of the leaves.
      labels: the labels of the arguments.
      split: how the parts were cut from the leaves.
    """
    if len(whole_trace.jaxpr.invars) != len(part_trace.jaxpr.invars) or len(whole_trace.jaxpr.outvars) != len(
        part_trace.jaxpr.outvars
    ):
        return [mixed(SHAPE)] * len(whole_trace.jaxpr.outvars)
    pairs = zip(whole_trace.consts, part_trace.consts, strict=False)
    const_labels = [Label(SAME) if _is_equal(a, b) else mixed(SHAPE) for a, b in pairs]
    return _TracePair(whole_trace.jaxpr, part_trace.jaxpr, split).follow(const_labels, labels)


def _is_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer) or np.shape(a) != np.shape(b):
        return False
    if any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in (a, b)):
        return False
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


class _TracePair:
    """Two traces of one function, compared equation by equation.

    Attributes:
      known: for each variable of the whole trace, the variable of the part trace and the label of both.
    """

    def __init__(self, whole_jaxpr: Jaxpr, part_jaxpr: Jaxpr, split: LeafSplit):
        self.whole_jaxpr, self.part_jaxpr, self.split = whole_jaxpr, part_jaxpr, split
        self.known: dict[Var, tuple[Var, Label]] = {}

    def follow(self, const_labels: Sequence[Label], labels: Sequence[Label]) -> list[Label]:
        """Return the labels of the results, given the labels of constants and arguments."""
        if len(self.whole_jaxpr.constvars) != len(self.part_jaxpr.constvars) or len(self.whole_jaxpr.eqns) != len(
            self.part_jaxpr.eqns
        ):
            return [mixed(SHAPE)] * len(self.whole_jaxpr.outvars)
        self._bind(self.whole_jaxpr.constvars, self.part_jaxpr.constvars, const_labels)
        self._bind(self.whole_jaxpr.invars, self.part_jaxpr.invars, labels)
        for whole_eqn, part_eqn in zip(self.whole_jaxpr.eqns, self.part_jaxpr.eqns, strict=True):
            if (
                whole_eqn.primitive is not part_eqn.primitive
                or len(whole_eqn.invars) != len(part_eqn.invars)
                or len(whole_eqn.outvars) != len(part_eqn.outvars)
            ):
                return [mixed(SHAPE)] * len(self.whole_jaxpr.outvars)
            operand_labels = [self._label(x, y) for x, y in zip(whole_eqn.invars, part_eqn.invars, strict=True)]
            self._bind(
                whole_eqn.outvars, part_eqn.outvars, _result_labels(whole_eqn, part_eqn, operand_labels, self.split)
            )
        return [self._label(x, y) for x, y in zip(self.whole_jaxpr.outvars, self.part_jaxpr.outvars, strict=True)]

    def _bind(self, whole_vars: Sequence[Var], part_vars: Sequence[Var], labels: Sequence[Label]) -> None:
        for whole_var, part_var, label in zip(whole_vars, part_vars, labels, strict=True):
            self.known[whole_var] = part_var, label

    def _label(self, whole_atom: Var | Literal, part_atom: Var | Literal) -> Label:
        if isinstance(whole_atom, Literal) and isinstance(part_atom, Literal):
            if not _is_equal(whole_atom.val, part_atom.val):
                return mixed(SHAPE)
            pad_value = float(whole_atom.val) if np.ndim(whole_atom.val) == 0 and np.isrealobj(whole_atom.val) else None
            return Label(SAME, pad_value=pad_value, nonnegative=pad_value is not None and pad_value >= 0)
        if isinstance(whole_atom, Var) and self.known[whole_atom][0] is part_atom:
            return self.known[whole_atom][1]
        return mixed(SHAPE)


def _result_labels(whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit) -> list[Label]:
    name, num_results = whole_eqn.primitive.name, len(whole_eqn.outvars)
    if name in CONTROL:
        return CONTROL[name](whole_eqn, part_eqn, labels, split)
    if name in CALLS:
        called = [bodies_of(whole_eqn.params), bodies_of(part_eqn.params)]
        if all(len(bodies) == 1 and len(bodies[0].jaxpr.invars) == len(labels) for bodies in called):
            return compare(called[0][0], called[1][0], labels, split)
    if name in OVER_AXES:
        is_same = same_params(whole_eqn, part_eqn)
        pairs = zip(whole_eqn.invars, labels, strict=True)
        return [over_axes(whole_eqn, atom, label, split) if is_same else mixed(name) for atom, label in pairs]
    if axes_of(whole_eqn) & split.axis_names and name != "pvary":
        return [mixed(name, of=labels)] * num_results
    return [result_of(whole_eqn, part_eqn, labels, split)] * num_results


# Control flow: all parts must take the same branches, and the same number of iterations.


def _cond(whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit) -> list[Label]:
    if labels[0].kind != SAME or len(whole_eqn.params["branches"]) != len(part_eqn.params["branches"]):
        return [mixed("cond", of=labels[:1])] * len(whole_eqn.outvars)
    pairs = zip(whole_eqn.params["branches"], part_eqn.params["branches"], strict=True)
    branch_labels = [compare(whole, part, labels[1:], split) for whole, part in pairs]
    joined_labels = branch_labels[0]
    for result_labels in branch_labels[1:]:
        joined_labels = [join(x, y) for x, y in zip(joined_labels, result_labels, strict=True)]
    return joined_labels


def _while(whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit) -> list[Label]:
    body_start = whole_eqn.params["cond_nconsts"]
    carry_start = body_start + whole_eqn.params["body_nconsts"]
    jaxprs = [(eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]) for eqn in (whole_eqn, part_eqn)]
    cond_consts = labels[:body_start]
    carry, _ = _loop_labels(jaxprs[0][0], jaxprs[1][0], labels[body_start:carry_start], labels[carry_start:], [], split)
    predicate = compare(jaxprs[0][1], jaxprs[1][1], [*cond_consts, *carry], split)[0]
    return carry if predicate.kind == SAME else [mixed("while", of=[predicate])] * len(carry)


def _scan(whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit) -> list[Label]:
    bodies = whole_eqn.params["jaxpr"], part_eqn.params["jaxpr"]
    num_unstacked = _num_unstacked(whole_eqn.invars, bodies[0].jaxpr.invars)
    num_carry = _num_unstacked(whole_eqn.outvars, bodies[0].jaxpr.outvars)
    num_consts = num_unstacked - num_carry
    consts, carry, stacked = labels[:num_consts], labels[num_consts:num_unstacked], labels[num_unstacked:]
    scans_elements = any(label.kind != SAME for label in stacked)
    if scans_elements or whole_eqn.params["length"] != part_eqn.params["length"]:
        by_element = all(label.kind == ELEMENT and label.leading_dims in (0, None) for label in stacked)
        if carry or split.by_rows or not by_element or any(x.kind != SAME for x in consts):
            # The scan carries values from element to element, or counts elements.
            return [mixed("scan", of=labels)] * len(whole_eqn.outvars)
        return [x if x.kind == ELEMENT else mixed("scan", of=[x]) for x in compare(*bodies, labels, split)]
    carry, results = _loop_labels(*bodies, consts, carry, stacked, split)
    return [*carry, *(x if x.kind == SAME else mixed("scan", of=[x]) for x in results)]


def _num_unstacked(outside: Sequence[Var | Literal], inside: Sequence[Var | Literal]) -> int:
    """Return the number of operands of a scan that are not scanned over: consts and carry.

    They are counted by shapes, because releases of JAX name the parameters of scan differently.
    """
    return sum(len(shape_of(x)) == len(shape_of(y)) for x, y in zip(outside, inside, strict=True))


def _loop_labels(
    whole_trace: ClosedJaxpr,
    part_trace: ClosedJaxpr,
    consts: list[Label],
    carry: list[Label],
    stacked: list[Label],
    split: LeafSplit,
) -> tuple[list[Label], list[Label]]:
    """Return the labels of the carry of a loop, and of its other results, that hold for every iteration."""
    while True:
        results = compare(whole_trace, part_trace, [*consts, *carry, *stacked], split)
        joined = [join(*pair) for pair in zip(carry, results[: len(carry)], strict=True)]
        if joined == carry:
            return carry, results[len(carry) :]
        carry = joined


CONTROL = {"cond": _cond, "while": _while, "scan": _scan}
