"""Where a loss uses leaves of experts otherwise than through the layer that sends tokens to them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardopt.core.jaxprs import called, scan_carry

EXPERTS = "shardopt_experts"
"""How the name of a jitted function begins whose results are complete, although each device has a part of the experts."""

Marks = Mapping[int, JaxprEqn | None]
"""Leaf -> the operation that first did something with it, None if only calls and loops have passed it on."""


def experts_elsewhere(jaxpr: Jaxpr | ClosedJaxpr, given: Sequence[Marks]) -> list[Marks]:
    """Return which leaves each result of a trace follows from, but for what came through a function named `EXPERTS`.

    Args:
      jaxpr: the trace.
      given: for each argument the leaves that it follows from: of leaf i `{i: None}`, of anything else nothing.
    """
    opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    marks: dict[Any, Marks] = dict(zip(opened.invars, given, strict=True))
    read = lambda atom: {} if isinstance(atom, Literal) else marks.get(atom, {})  # noqa: E731
    for eqn in opened.eqns:
        marks.update(zip(eqn.outvars, _results(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in opened.outvars]


def _results(eqn: JaxprEqn, given: list[Marks]) -> list[Marks]:
    if not any(given) or str(eqn.params.get("name")).startswith(EXPERTS):
        return [{}] * len(eqn.outvars)
    name, inner = eqn.primitive.name, called(eqn)
    if name == "scan":
        return _scan(eqn, inner[0], given)
    if name == "cond":
        branches = [experts_elsewhere(branch, given[1:]) for branch in inner]
        return [_joined([given[0], *outs]) for outs in zip(*branches, strict=True)]
    if inner and len(inner[0].invars) == len(given):
        return experts_elsewhere(inner[0], given)
    together = _joined(given)
    return [{leaf: eqn if at is None else at for leaf, at in together.items()}] * len(eqn.outvars)


def _scan(eqn: JaxprEqn, body: Jaxpr, given: list[Marks]) -> list[Marks]:
    """Return the results of a body once what it carries from turn to turn follows from no more leaves."""
    num_carry, first = scan_carry(eqn, body)
    consts, carry, xs = given[:first], given[first : first + num_carry], given[first + num_carry :]
    while True:
        results = experts_elsewhere(body, [*consts, *carry, *xs])
        after = [_joined(pair) for pair in zip(carry, results[:num_carry], strict=True)]
        if all(set(one) == set(other) for one, other in zip(carry, after, strict=True)):
            return after + results[num_carry:]
        carry = after


def _joined(several: Sequence[Marks]) -> Marks:
    found: dict[int, JaxprEqn | None] = {}
    for marks in several:
        for leaf, at in marks.items():
            if found.get(leaf) is None:
                found[leaf] = at
    return found
