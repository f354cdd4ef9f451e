"""Walking through a jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

CHECKPOINTS = ("remat2", "checkpoint")
"""The names of `jax.checkpoint`, whose equations stand in its parameter `jaxpr`."""


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation in the order of the trace, each followed by those of what it calls."""
    for eqn in jaxpr.eqns:
        yield from within(eqn)


def within(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield an equation, and those of what it calls."""
    yield eqn
    for inner in called(eqn):
        yield from equations(inner)


def called(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return what an equation calls: the body of a function or loop, the branches of a choice."""
    inner = (getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(eqn.params))
    return [one for one in inner if hasattr(one, "eqns")]


def scan_carry(eqn: JaxprEqn, body: Jaxpr) -> tuple[int, int]:
    """Return how many values a scan carries, and the place of the first among its arguments; those after them are scanned.

    Versions of jax write it down differently: what is scanned, or stacked, has a dim more than in the body.
    """
    more = [
        sum(_ndim(outer) != _ndim(inner) for outer, inner in zip(*both, strict=True))
        for both in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    ]
    num_carry = len(eqn.outvars) - more[1]
    return num_carry, len(eqn.invars) - more[0] - num_carry


def _ndim(var: Var | Literal) -> int:
    return len(getattr(var.aval, "shape", ()))
