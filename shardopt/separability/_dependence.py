"""Finds which leaves the results of a trace follow from, and the first operation that uses each leaf."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardopt.core._jaxprs import called, scan_carry

EXPERTS = "shardopt_experts"
"""Prefix of the names of jitted functions that combine the experts of all devices, so that their results are complete."""

UsedLeaves = Mapping[int, JaxprEqn | None]
"""Leaf -> the first operation that computes with it; None if only calls and loops have passed the leaf on."""


def leaves_used(
    jaxpr: Jaxpr | ClosedJaxpr,
    arguments: Sequence[UsedLeaves],
    *,
    except_through: str = "",
    differentiated: bool = False,
) -> list[UsedLeaves]:
    """Return which leaves each result of a trace follows from.

    Args:
      jaxpr: the trace.
      arguments: the leaves that each argument follows from: `{i: None}` for leaf i, `{}` for any other argument.
      except_through: prefix of names of jitted functions. The results of such a function count as following from no leaf. "" for none.
      differentiated: whether only differentiable uses count. Then integers and results of `stop_gradient` follow from no leaf.
    """
    opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    used_by: dict[Any, UsedLeaves] = dict(zip(opened.invars, arguments, strict=True))
    read = lambda atom: {} if isinstance(atom, Literal) else used_by.get(atom, {})  # noqa: E731
    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if not any(operands) or (except_through and str(eqn.params.get("name")).startswith(except_through)):
            continue
        if differentiated and eqn.primitive.name == "stop_gradient":
            continue
        options = {"except_through": except_through, "differentiated": differentiated}
        results = _results(eqn, operands, options)
        for var, used in zip(eqn.outvars, results, strict=True):
            used_by[var] = (
                {} if differentiated and not jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact) else used
            )
    return [read(atom) for atom in opened.outvars]


def _results(eqn: JaxprEqn, operands: list[UsedLeaves], options: dict[str, Any]) -> list[UsedLeaves]:
    name, inner = eqn.primitive.name, called(eqn)
    if name == "scan":
        return _scan(eqn, inner[0], operands, options)
    if name == "cond":
        branches = [leaves_used(branch, operands[1:], **options) for branch in inner]
        return [_union([operands[0], *results]) for results in zip(*branches, strict=True)]
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return leaves_used(inner[0], operands, **options)
    first_uses = {leaf: eqn if use is None else use for leaf, use in _union(operands).items()}
    return [first_uses] * len(eqn.outvars)


def _scan(eqn: JaxprEqn, body: Jaxpr, operands: list[UsedLeaves], options: dict[str, Any]) -> list[UsedLeaves]:
    """Follow the body of a scan until another turn adds no leaf to its carry."""
    num_carry, first = scan_carry(eqn, body)
    consts, carry, scanned = operands[:first], operands[first : first + num_carry], operands[first + num_carry :]
    while True:
        results = leaves_used(body, [*consts, *carry, *scanned], **options)
        after = [_union(pair) for pair in zip(carry, results[:num_carry], strict=True)]
        if all(set(before) == set(later) for before, later in zip(carry, after, strict=True)):
            return after + results[num_carry:]
        carry = after


def _union(operands: Sequence[UsedLeaves]) -> UsedLeaves:
    """Return all leaves of several operands, each with the operation of the first operand that has one."""
    union: dict[int, JaxprEqn | None] = {}
    for used in operands:
        for leaf, use in used.items():
            if union.get(leaf) is None:
                union[leaf] = use
    return union
