"""Rows in the backward rule of a `jax.custom_vjp`, which says nothing about the loss but makes the gradient of it.

The rule is traced and followed like the loss. What comes into it is what a mean over rows sends back: to rows, numbers of
the size of 1/B, each of its own row; to what all rows share, a sum over rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from shardopt.separability.values import Const, Mixed, Rows, Site, Sum, Value, add, same, times


def trace_backward(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the trace of (operands, cotangents of floating results) -> cotangents of floating operands."""
    given, out = _differentiated(eqn), _floating(eqn.outvars)

    def run(operands: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        def forward(floating: list[jax.Array]) -> list[jax.Array]:
            filled = list(operands)
            for i, one in zip(given, floating, strict=True):
                filled[i] = one
            with source_info_util.user_context(eqn.source_info.traceback):  # or messages would name this line
                found = eqn.primitive.bind(*filled, **eqn.primitive.get_bind_params(eqn.params))
            return [found[i] for i in out]

        (back,) = jax.vjp(forward, [operands[i] for i in given])[1](cotangents)
        return back

    return jax.make_jaxpr(run)([_like(var) for var in eqn.invars], [_like(eqn.outvars[i]) for i in out])


def cotangents(site: Site, results: Sequence[Value]) -> list[Value] | None:
    """Return what comes back to the floating results of an equation; None where that is not known."""
    sent: list[Value] = []
    for i in _floating(site.eqns[0].outvars):
        value = results[i]
        if isinstance(value, Mixed) or (isinstance(value, Const) and value.anywhere):
            return None
        if (isinstance(value, Rows) and (value.plus or value.own)) or (isinstance(value, Sum) and value.loop):
            return None
        degree = add((-1.0,) * len(site.none), times(value.degree, -1))
        if isinstance(value, Rows):
            sent.append(value._replace(degree=degree))
        else:
            sent.append(Const(degree) if isinstance(value, Sum) else Sum(degree, site.op))
    return sent


def mixing(site: Site, operands: Sequence[Value], back: Sequence[Value]) -> Mixed | None:
    """Return where a rule certainly mixes rows: in a nonlinear way, or into the gradient of a row."""
    for i, found in zip(_differentiated(site.eqns[0]), back, strict=True):
        if isinstance(found, Mixed) and found.why != "unknown":
            return found._replace(why="backward")
        operand, total = operands[i], found.plus if isinstance(found, Rows) else found
        if isinstance(operand, Mixed) or isinstance(found, Mixed) or (isinstance(found, Const) and found.zero):
            continue
        if isinstance(operand, Rows) and isinstance(total, Sum):
            return Mixed(total.op, why="backward")
        sent = add((-1.0,) * len(site.none), times(operand.degree, -1))
        if isinstance(operand, Rows) != isinstance(found, Const) and not same(found.degree, sent):
            return Mixed(site.op, why="backward")  # as the sign of what comes back: no part of a mean any more
    return None


def _differentiated(eqn: JaxprEqn) -> list[int]:
    return [i for i in _floating(eqn.invars) if i >= eqn.params["num_consts"]]


def _like(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _floating(variables: Sequence[Any]) -> list[int]:
    return [i for i, var in enumerate(variables) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]
