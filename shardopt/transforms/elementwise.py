"""Whether a function acts element by element (or row by row), read off its traces for two sizes side by side.

One trace is that of whole leaves, the other that of a part of each: a shard, or some rows. Where both are the same
operations but for shapes, and each of these is known to act on elements in place, a part is computed as in the whole.
Whatever is not known to is refused: nothing is concluded from numbers.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardopt.transforms.primitives import (
    ELEMENT,
    OVER_AXES,
    SAME,
    SHAPE,
    Label,
    Scope,
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


def compare(whole: ClosedJaxpr, part: ClosedJaxpr, labels: Sequence[Label], scope: Scope) -> list[Label]:
    """Return the labels of the results of two traces, given those of their arguments."""
    if len(whole.jaxpr.invars) != len(part.jaxpr.invars) or len(whole.jaxpr.outvars) != len(part.jaxpr.outvars):
        return [mixed(SHAPE)] * len(whole.jaxpr.outvars)
    pairs = zip(whole.consts, part.consts, strict=False)
    consts = [Label(SAME) if _equal(a, b) else mixed(SHAPE) for a, b in pairs]
    return _Traces(whole.jaxpr, part.jaxpr, scope).follow(consts, labels)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer) or np.shape(a) != np.shape(b):
        return False
    if any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in (a, b)):
        return False
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


class _Traces:
    """Two traces, read side by side."""

    def __init__(self, whole: Jaxpr, part: Jaxpr, scope: Scope):
        self.whole, self.part, self.scope = whole, part, scope
        self.known: dict[Var, tuple[Var, Label]] = {}

    def follow(self, consts: Sequence[Label], labels: Sequence[Label]) -> list[Label]:
        """Return the labels of the results, given those of constants and arguments."""
        if len(self.whole.constvars) != len(self.part.constvars) or len(self.whole.eqns) != len(self.part.eqns):
            return [mixed(SHAPE)] * len(self.whole.outvars)
        self._bind(self.whole.constvars, self.part.constvars, consts)
        self._bind(self.whole.invars, self.part.invars, labels)
        for a, b in zip(self.whole.eqns, self.part.eqns, strict=True):
            if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
                return [mixed(SHAPE)] * len(self.whole.outvars)
            operands = [self._label(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
            self._bind(a.outvars, b.outvars, _results(a, b, operands, self.scope))
        return [self._label(x, y) for x, y in zip(self.whole.outvars, self.part.outvars, strict=True)]

    def _bind(self, whole: Sequence[Var], part: Sequence[Var], labels: Sequence[Label]) -> None:
        for a, b, label in zip(whole, part, labels, strict=True):
            self.known[a] = b, label

    def _label(self, a: Var | Literal, b: Var | Literal) -> Label:
        if isinstance(a, Literal) and isinstance(b, Literal):
            if not _equal(a.val, b.val):
                return mixed(SHAPE)
            pad = float(a.val) if np.ndim(a.val) == 0 and np.isrealobj(a.val) else None
            return Label(SAME, pad=pad, positive=pad is not None and pad >= 0)
        if isinstance(a, Var) and self.known[a][0] is b:
            return self.known[a][1]
        return mixed(SHAPE)


def _results(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> list[Label]:
    name, count = a.primitive.name, len(a.outvars)
    if name in CONTROL:
        return CONTROL[name](a, b, labels, scope)
    if name in CALLS:
        found = [bodies_of(a.params), bodies_of(b.params)]
        if all(len(bodies) == 1 and len(bodies[0].jaxpr.invars) == len(labels) for bodies in found):
            return compare(found[0][0], found[1][0], labels, scope)
    if name in OVER_AXES:
        same = same_params(a, b)
        pairs = zip(a.invars, labels, strict=True)
        return [over_axes(a, x, label, scope) if same else mixed(name) for x, label in pairs]
    if axes_of(a) & scope.names and name != "pvary":
        return [mixed(name, of=labels)] * count
    return [result_of(a, b, labels, scope)] * count


# Control flow: all parts must go the same way.


def _cond(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> list[Label]:
    if labels[0].kind != SAME or len(a.params["branches"]) != len(b.params["branches"]):
        return [mixed("cond", of=labels[:1])] * len(a.outvars)
    pairs = zip(a.params["branches"], b.params["branches"], strict=True)
    outs = [compare(x, y, labels[1:], scope) for x, y in pairs]
    found = outs[0]
    for out in outs[1:]:
        found = [join(x, y) for x, y in zip(found, out, strict=True)]
    return found


def _while(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> list[Label]:
    first = a.params["cond_nconsts"]
    second = first + a.params["body_nconsts"]
    body, cond = [(x.params["body_jaxpr"], x.params["cond_jaxpr"]) for x in (a, b)], labels[:first]
    carry, _ = _settle(body[0][0], body[1][0], labels[first:second], labels[second:], [], scope)
    decision = compare(body[0][1], body[1][1], [*cond, *carry], scope)[0]
    return carry if decision.kind == SAME else [mixed("while", of=[decision])] * len(carry)


def _scan(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> list[Label]:
    bodies = a.params["jaxpr"], b.params["jaxpr"]
    second = _num_unstacked(a.invars, bodies[0].jaxpr.invars)
    num_carry = _num_unstacked(a.outvars, bodies[0].jaxpr.outvars)
    consts, carry, stacked = labels[: second - num_carry], labels[second - num_carry : second], labels[second:]
    is_fed = any(label.kind != SAME for label in stacked)
    if is_fed or a.params["length"] != b.params["length"]:
        by_element = all(x.kind == ELEMENT and x.lead in (0, None) for x in stacked)
        if carry or scope.rows or not by_element or any(x.kind != SAME for x in consts):
            return [mixed("scan", of=labels)] * len(a.outvars)  # carried from element to element, or counts them
        return [x if x.kind == ELEMENT else mixed("scan", of=[x]) for x in compare(*bodies, labels, scope)]
    carry, outs = _settle(*bodies, consts, carry, stacked, scope)
    return [*carry, *(x if x.kind == SAME else mixed("scan", of=[x]) for x in outs)]


def _num_unstacked(outside: Sequence[Var | Literal], inside: Sequence[Var | Literal]) -> int:
    """Return how many operands of a scan its body sees as they are: releases of jax name them differently."""
    return sum(len(shape_of(x)) == len(shape_of(y)) for x, y in zip(outside, inside, strict=True))


def _settle(
    whole: ClosedJaxpr, part: ClosedJaxpr, consts: list[Label], carry: list[Label], rest: list[Label], scope: Scope
) -> tuple[list[Label], list[Label]]:
    """Return the labels of what a loop carries, and of its other results, once another round changes nothing."""
    while True:
        outs = compare(whole, part, [*consts, *carry, *rest], scope)
        merged = [join(*pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
        if merged == carry:
            return carry, outs[len(carry) :]
        carry = merged


CONTROL = {"cond": _cond, "while": _while, "scan": _scan}
