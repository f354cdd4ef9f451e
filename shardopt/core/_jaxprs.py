"""Walks over the equations of a jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

CHECKPOINTS = ("remat2", "checkpoint")
"""The primitive names of `jax.checkpoint`; its parameter `jaxpr` holds the equations of the function."""


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations in the order of the trace; after an equation, the equations of the jaxprs that it calls."""
    for eqn in jaxpr.eqns:
        yield from within(eqn)


def within(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield an equation, then all equations of the jaxprs that it calls."""
    yield eqn
    for inner in called(eqn):
        yield from equations(inner)


def called(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs that an equation calls: the body of a function or loop, the branches of a `cond`."""
    candidates = (getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(eqn.params))
    return [candidate for candidate in candidates if hasattr(candidate, "eqns")]


def scan_carry(eqn: JaxprEqn, body: Jaxpr) -> tuple[int, int]:
    """Return the number of values that a scan carries, and the index of the first among its arguments.

    The arguments after the carry are scanned. Versions of jax store these numbers differently, so they are read off the
    shapes: a scanned argument or a stacked result has one dim more outside of the body.
    """
    num_scanned, num_stacked = [
        sum(_ndim(outer) != _ndim(inner) for outer, inner in zip(*outer_and_inner, strict=True))
        for outer_and_inner in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    ]
    num_carry = len(eqn.outvars) - num_stacked
    return num_carry, len(eqn.invars) - num_scanned - num_carry


def _ndim(var: Var | Literal) -> int:
    return len(getattr(var.aval, "shape", ()))
