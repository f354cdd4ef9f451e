"""Walks over the equations of a jaxpr."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

CHECKPOINTS = ("remat2", "checkpoint")
"""The primitive names of `jax.checkpoint`; its parameter `jaxpr` holds the equations of the
function.
"""

COLLECTIVES = frozenset(
    """psum psum2 psum_invariant unreduced_psum pmax pmin all_gather all_gather_invariant all_gather_reduced reduce_scatter
    psum_scatter all_to_all ragged_all_to_all ppermute pgather pbroadcast axis_index""".split()  # noqa: SIM905
)
"""The primitive names of collectives over named axes."""

SUMS = frozenset(["psum", "psum2", "psum_invariant"])
"""The primitive names of sums over named axes."""

CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call"])
"""The primitive names of functions with a derivative rule of the user."""


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations in the order of the trace.

    After an equation, the equations of the jaxprs that it calls.
    """
    for eqn in jaxpr.eqns:
        yield from nested_equations(eqn)


def nested_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield an equation, then all equations of the jaxprs that it calls."""
    yield eqn
    for inner in called_jaxprs(eqn):
        yield from equations(inner)


def called_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs that an equation calls: the body of a function or loop, the branches of a
    `cond`.
    """
    return [open_jaxpr(jaxpr) for jaxpr in jaxpr_params(eqn)]


def jaxpr_params(eqn: JaxprEqn) -> list[ClosedJaxpr | Jaxpr]:
    """Return the jaxprs that an equation calls, closed over their constants where the equation has
    them so.
    """
    return [leaf for leaf in jax.tree.leaves(eqn.params) if hasattr(leaf, "eqns")]


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Return a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def constants_of(jaxpr: ClosedJaxpr | Jaxpr) -> Sequence[Any]:
    """Return the constants that a jaxpr is closed over."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def shape_of(var: Var | Literal) -> tuple[int, ...]:
    """Return the shape of a value; () for a token."""
    return tuple(getattr(var.aval, "shape", ()))


def cost_of(eqn: JaxprEqn, cost: Callable[[JaxprEqn], float | None]) -> float:
    """Return `cost(eqn)`.

    If it is None, return the sum of the costs of the equations of the jaxprs that the equation
    calls.

    A scan costs its length times its body, a `cond` its most expensive branch, a `while` loop of
    unknown length one turn.
    """
    known = cost(eqn)
    if known is not None:
        return known
    costs = [sum(cost_of(inner, cost) for inner in jaxpr.eqns) for jaxpr in called_jaxprs(eqn)]
    if eqn.primitive.name == "cond":
        return max(costs)
    return sum(costs) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


def scan_carry(eqn: JaxprEqn, body: Jaxpr) -> tuple[int, int]:
    """Return the number of values that a scan carries, and the index of the first among its
    arguments.

    The arguments after the carry are scanned. Versions of jax store these numbers differently, so
    they are read off the shapes: a scanned argument or a stacked result has one dim more outside of
    the body.
    """
    num_scanned, num_stacked = [
        sum(
            len(shape_of(outer)) != len(shape_of(inner))
            for outer, inner in zip(*outer_and_inner, strict=True)
        )
        for outer_and_inner in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    ]
    num_carry = len(eqn.outvars) - num_stacked
    return num_carry, len(eqn.invars) - num_scanned - num_carry
