"""Decide whether a function acts element by element (or row by row), by comparing two traces of it.

One trace is for whole leaves, the other for a part of each leaf: a shard, or some rows. The
function acts element by element if two conditions hold:

- Both traces have the same operations except for shapes.
- Each operation is known to act on elements in place. An unknown operation counts as mixing
  elements.

The decision never depends on the values of arrays.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from shardopt.trace._jaxprs import axes_of
from shardopt.trace._walk import Equations, Walk, scan_parts, while_parts
from shardopt.transforms._primitives import (
    ELEMENT,
    OVER_AXES,
    SAME,
    SHAPE,
    Label,
    LeafSplit,
    mixed,
    over_axes,
    result_of,
    same_params,
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
    walk = Walk(
        equation=functools.partial(_result_labels, split=split),
        constant=lambda values: Label(SAME) if _is_equal(*values) else mixed(SHAPE),
        literal=_label_of_literal,
        different=mixed(SHAPE),
        join=Label.join,
    )
    return walk.follow((whole_trace, part_trace), labels)


def _is_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer) or np.shape(a) != np.shape(b):
        return False
    if any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in (a, b)):
        return False
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


def _label_of_literal(values: Sequence[Any]) -> Label:
    if not _is_equal(*values):
        return mixed(SHAPE)
    pad_value = float(values[0]) if np.ndim(values[0]) == 0 and np.isrealobj(values[0]) else None
    return Label(SAME, pad_value=pad_value, nonnegative=pad_value is not None and pad_value >= 0)


def _result_labels(
    walk: Walk[Label], eqns: Equations, labels: list[Label], *, split: LeafSplit
) -> list[Label]:
    whole_eqn, part_eqn = eqns
    name, num_results = whole_eqn.primitive.name, len(whole_eqn.outvars)
    if name in CONTROL:
        return CONTROL[name](walk, eqns, labels, split)
    if name in CALLS and (results := walk.call(eqns, labels)) is not None:
        return results
    if name in OVER_AXES:
        is_same = same_params(whole_eqn, part_eqn)
        pairs = zip(whole_eqn.invars, labels, strict=True)
        return [
            over_axes(whole_eqn, atom, label, split) if is_same else mixed(name)
            for atom, label in pairs
        ]
    if axes_of(whole_eqn) & split.axis_names and name != "pvary":
        return [mixed(name, of=labels)] * num_results
    return [result_of(whole_eqn, part_eqn, labels, split)] * num_results


# Control flow: all parts must take the same branches, and the same number of iterations.


def _cond(walk: Walk[Label], eqns: Equations, labels: list[Label], _: LeafSplit) -> list[Label]:
    if labels[0].kind != SAME or len({len(eqn.params["branches"]) for eqn in eqns}) > 1:
        return [mixed("cond", of=labels[:1])] * len(eqns[0].outvars)
    return walk.branches(eqns, labels[1:])


def _while(walk: Walk[Label], eqns: Equations, labels: list[Label], _: LeafSplit) -> list[Label]:
    cond_consts, body_consts, carry = while_parts(eqns[0], labels)
    carry = walk.loop([eqn.params["body_jaxpr"] for eqn in eqns], body_consts, carry)[0]
    (predicate,) = walk.follow([eqn.params["cond_jaxpr"] for eqn in eqns], [*cond_consts, *carry])
    return carry if predicate.kind == SAME else [mixed("while", of=[predicate])] * len(carry)


def _scan(walk: Walk[Label], eqns: Equations, labels: list[Label], split: LeafSplit) -> list[Label]:
    bodies = [eqn.params["jaxpr"] for eqn in eqns]
    consts, carry, stacked = scan_parts(eqns[0], labels)
    if (
        any(label.kind != SAME for label in stacked)
        or len({eqn.params["length"] for eqn in eqns}) > 1
    ):
        by_element = all(
            label.kind == ELEMENT and label.leading_dims in (0, None) for label in stacked
        )
        if carry or split.by_rows or not by_element or any(x.kind != SAME for x in consts):
            # The scan carries values from element to element, or counts elements.
            return [mixed("scan", of=labels)] * len(eqns[0].outvars)
        return [
            x if x.kind == ELEMENT else mixed("scan", of=[x]) for x in walk.follow(bodies, labels)
        ]
    carry, results = walk.loop(bodies, consts, carry, stacked)
    return [*carry, *(x if x.kind == SAME else mixed("scan", of=[x]) for x in results)]


CONTROL = {"cond": _cond, "while": _while, "scan": _scan}
