"""Which leaves the results of a trace follow from, and through which operation first."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardopt.core.jaxprs import called, scan_carry

EXPERTS = "shardopt_experts"
"""How the name of a jitted function begins whose results are complete, although each device has a part of the experts."""

Marks = Mapping[int, JaxprEqn | None]
"""Leaf -> the operation that first did something with it, None if only calls and loops have passed it on."""


def leaves_used(
    jaxpr: Jaxpr | ClosedJaxpr, marks: Sequence[Marks], *, but: str = "", differentiated: bool = False
) -> list[Marks]:
    """Return which leaves each result of a trace follows from.

    Args:
      jaxpr: the trace.
      marks: for each argument the leaves that it follows from: of leaf i `{i: None}`, of anything else nothing.
      but: what comes through a jitted function whose name begins so is left out; "" for none.
      differentiated: whether only what a derivative sees counts: neither integers nor what is behind `stop_gradient`.
    """
    opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    known: dict[Any, Marks] = dict(zip(opened.invars, marks, strict=True))
    read = lambda atom: {} if isinstance(atom, Literal) else known.get(atom, {})  # noqa: E731
    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if not any(operands) or (but and str(eqn.params.get("name")).startswith(but)):
            continue
        if differentiated and eqn.primitive.name == "stop_gradient":
            continue
        results = _results(eqn, operands, {"but": but, "differentiated": differentiated})
        for var, used in zip(eqn.outvars, results, strict=True):
            known[var] = (
                {} if differentiated and not jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact) else used
            )
    return [read(atom) for atom in opened.outvars]


def _results(eqn: JaxprEqn, operands: list[Marks], how: dict[str, Any]) -> list[Marks]:
    name, inner = eqn.primitive.name, called(eqn)
    if name == "scan":
        return _scan(eqn, inner[0], operands, how)
    if name == "cond":
        branches = [leaves_used(branch, operands[1:], **how) for branch in inner]
        return [_joined([operands[0], *outs]) for outs in zip(*branches, strict=True)]
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return leaves_used(inner[0], operands, **how)
    together = _joined(operands)
    return [{leaf: eqn if at is None else at for leaf, at in together.items()}] * len(eqn.outvars)


def _scan(eqn: JaxprEqn, body: Jaxpr, operands: list[Marks], how: dict[str, Any]) -> list[Marks]:
    """Return the results of a body once what it carries from turn to turn follows from no more leaves."""
    num_carry, first = scan_carry(eqn, body)
    consts, carry, scanned = operands[:first], operands[first : first + num_carry], operands[first + num_carry :]
    while True:
        results = leaves_used(body, [*consts, *carry, *scanned], **how)
        after = [_joined(pair) for pair in zip(carry, results[:num_carry], strict=True)]
        if all(set(before) == set(later) for before, later in zip(carry, after, strict=True)):
            return after + results[num_carry:]
        carry = after


def _joined(several: Sequence[Marks]) -> Marks:
    joined: dict[int, JaxprEqn | None] = {}
    for marks in several:
        for leaf, at in marks.items():
            if joined.get(leaf) is None:
                joined[leaf] = at
    return joined
