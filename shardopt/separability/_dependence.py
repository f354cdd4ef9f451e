"""Finds which leaves the results of a trace follow from, and the first operation that uses each
leaf.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from shardopt.trace._jaxprs import COLLECTIVES, CUSTOM
from shardopt.trace._marks import has_mark
from shardopt.trace._primitives import library_name
from shardopt.trace._walk import Equations, Walk, scan_parts, while_parts

LOOP = -1
"""Stands among the leaves for a `while` loop whose number of turns follows from leaves."""

UsedLeaves = Mapping[int, JaxprEqn | None]
"""Leaf -> the first operation that computes with it; None if only calls and loops have passed the
leaf on.
"""


def leaves_used(
    jaxpr: Jaxpr | ClosedJaxpr,
    arguments: Sequence[UsedLeaves],
    *,
    except_through: str | None = None,
    differentiated: bool = False,
    mark_loops: bool = False,
) -> list[UsedLeaves]:
    """Return which leaves each result of a trace follows from.

    Args:
      jaxpr: the trace.
      arguments: the leaves that each argument follows from: `{i: None}` for leaf i, `{}` for any
        other argument.
      except_through: kind of marked functions. The results of such a function count as following
        from no leaf.
      differentiated: whether only differentiable uses count. Then integers and results of
        `stop_gradient` follow from no leaf.
      mark_loops: whether results of a `while` loop follow from `LOOP` too, if its condition follows
        from a leaf and it is not vmapped. Then results of collectives count as following from no leaf.
    """

    def no_leaf(_):
        return {}

    rule = functools.partial(_results, _CountedUses(except_through, differentiated, mark_loops))

    def join(a, b):
        return _union([a, b])

    def same(a, b):
        return a.keys() == b.keys()

    return Walk[UsedLeaves](rule, no_leaf, no_leaf, {}, join, same).follow([jaxpr], arguments)


class _CountedUses(NamedTuple):
    """The uses that count, see `leaves_used`."""

    except_through: str | None
    differentiated: bool
    mark_loops: bool

    def end_at(self, eqn: JaxprEqn) -> bool:
        """Return whether the results of an equation count as following from no leaf."""
        if self.differentiated and library_name(eqn.primitive) == "stop_gradient":
            return True
        return has_mark(eqn, self.except_through) or (
            self.mark_loops and library_name(eqn.primitive) in COLLECTIVES
        )


def _results(
    uses: _CountedUses, walk: Walk[UsedLeaves], eqns: Equations, operands: list[UsedLeaves]
) -> list[UsedLeaves]:
    (eqn,) = eqns
    if not any(operands) or uses.end_at(eqn):
        return [{}] * len(eqn.outvars)
    if uses.differentiated and library_name(eqn.primitive) in CUSTOM:
        # a rule may send a gradient past integers, as a straight-through estimator does
        results = [_union(operands)] * len(eqn.outvars)
    else:
        results = _followed(uses, walk, eqn, operands)
    if uses.differentiated:
        has_gradient = [
            jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact) for var in eqn.outvars
        ]
        results = [
            used if inexact else {} for used, inexact in zip(results, has_gradient, strict=True)
        ]
    return results


def _followed(
    uses: _CountedUses, walk: Walk[UsedLeaves], eqn: JaxprEqn, operands: list[UsedLeaves]
) -> list[UsedLeaves]:
    name = library_name(eqn.primitive)
    if name == "scan":
        carry, stacked = walk.loop([eqn.params["jaxpr"]], *scan_parts(eqn, operands))
        return [*carry, *stacked]
    if name == "while":
        condition_consts, body_consts, start = while_parts(eqn, operands)
        carry = walk.loop([eqn.params["body_jaxpr"]], body_consts, start)[0]
        (condition,) = walk.follow([eqn.params["cond_jaxpr"]], [*condition_consts, *carry])
        is_vmapped = eqn.params["cond_jaxpr"].out_avals[0].shape
        if uses.mark_loops and condition and not is_vmapped:
            condition = {LOOP: eqn, **condition}
        return [_union([result, condition]) for result in carry]
    if name == "cond":
        return [_union([operands[0], result]) for result in walk.branches((eqn,), operands[1:])]
    results = walk.call((eqn,), operands)
    if results is not None:
        return results
    first_uses = {leaf: eqn if use is None else use for leaf, use in _union(operands).items()}
    return [first_uses] * len(eqn.outvars)


def _union(operands: Sequence[UsedLeaves]) -> UsedLeaves:
    """Return all leaves of several operands, each with the operation of the first operand that has
    one.
    """
    union: dict[int, JaxprEqn | None] = {}
    for used in operands:
        for leaf, use in used.items():
            if union.get(leaf) is None:
                union[leaf] = use
    return union
