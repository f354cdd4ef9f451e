"""Derivative rules of `jax.custom_jvp` and `jax.custom_vjp`, which say nothing about a function but make its gradient.

A rule is traced, on the whole and on a piece, and followed like the loss. Where the derivative is that of the function there is
nothing to follow: if W follows from the P_i for all parameters, so do the derivatives.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from shardopt.separability.elementwise import first_unknown, is_zero, related
from shardopt.separability.relations import Known, Same, Shapes, Site, Split, Total, Unknown, Value, differing
from shardopt.separability.scope import DifferentTracesError, Scope

SCALE = 0.7390851332151607
"""Stands for any positive factor between the derivatives that a piece and the whole batch meet.

A strategy divides the loss of a piece by the number of pieces, or by a weight which is known only to all of them, and makes up
for it afterwards. That is right for a rule that scales with the cotangents, as derivatives do. A rule that adds to them, clips
them or takes their sign does not. It cannot give back this factor, which no size in a program makes.
"""


def follow_jvp(scope: Scope, site: Site, values: list[Value], results: list[Value]) -> list[Value]:
    """Follow a rule (operands, tangents) -> (results, their tangents).

    A tangent is a difference of values, so it is related as they are; a rule that gives other relations than the function's is
    no derivative of the whole.
    """
    floating = _floating(site.whole.invars)

    def trace(eqn: JaxprEqn) -> ClosedJaxpr:
        def run(operands: list[jax.Array], tangents: list[jax.Array]) -> tuple[list[Any], list[Any]]:
            zeros = [jnp.zeros_like(one) if i in floating else _no_tangent(one) for i, one in enumerate(operands)]
            for i, tangent in zip(floating, tangents, strict=True):
                zeros[i] = tangent
            found, changes = jax.jvp(_called(eqn), operands, zeros)
            return found, [changes[i] for i in _floating(eqn.outvars)]

        return jax.make_jaxpr(run)([_like(var) for var in eqn.invars], [_like(eqn.invars[i]) for i in floating])

    operands = related(site, values)
    tangents = [Same() if is_zero(values[i]) else operands[i] for i in floating]
    found = _followed(scope, site, trace, [*values, *tangents])
    if found is None:
        return [first_unknown(results) or site.unknown("backward")] * len(results)
    own, changes = found[: len(results)], found[len(results) :]
    wrong = any(not _agree(site, a, b) for a, b in zip(own, results, strict=True))
    expected = [results[i] for i in _floating(site.whole.outvars)]
    wrong |= any(not is_zero(a) and not _agree(site, a, b) for a, b in zip(changes, expected, strict=True))
    return _or_unknown(site, results, wrong)


def follow_vjp(scope: Scope, site: Site, values: list[Value], results: list[Value]) -> list[Value]:
    """Follow a rule (operands, cotangents of the results) -> (results, cotangents of the operands).

    A loss is the sum of what the pieces differentiate, times a factor s: L_W = s sum L_i. Its derivative with respect to a value
    is, if the value is

        Split(r)   L_W' = s/r concat(L_i')     Same(r)   L_W' = s/r sum L_i'     Total(c)   L_i' = c/s L_W'

    These go in at the results, and must come out at the operands. For s, see `SCALE`.
    """
    out = _floating(site.whole.outvars)
    given = [i for i in _floating(site.whole.invars) if i >= site.params.get("num_consts", 0)]

    def trace(eqn: JaxprEqn) -> ClosedJaxpr:
        def run(operands: list[jax.Array], cotangents: list[jax.Array]) -> tuple[list[Any], list[Any]]:
            def forward(floating: list[jax.Array]) -> tuple[list[Any], list[Any]]:
                filled = list(operands)
                for i, one in zip(given, floating, strict=True):
                    filled[i] = one
                found = _called(eqn)(*filled)
                return [found[i] for i in out], found

            _, backward, found = jax.vjp(forward, [operands[i] for i in given], has_aux=True)
            return found, backward(cotangents)[0]

        return jax.make_jaxpr(run)([_like(var) for var in eqn.invars], [_like(eqn.outvars[i]) for i in out])

    shapes = [site.operand(i) for i in given], [site.result(i) for i in out]
    operands = related(site, values)
    sent = [_dual(site, results[i], shape) for i, shape in zip(out, shapes[1], strict=True)]
    expected = [_dual(site, operands[i], shape) for i, shape in zip(given, shapes[0], strict=True)]
    if any(one is None for one in sent):
        return [first_unknown(results) or site.unknown("backward")] * len(results)
    found = _followed(scope, site, trace, [*values, *[one for one in sent if one is not None]])
    if found is None:
        return [first_unknown(results) or site.unknown("backward")] * len(results)
    own, back = found[: len(results)], found[len(results) :]
    wrong = any(not _agree(site, a, b) for a, b in zip(own, results, strict=True))
    for i, a, b in zip(given, back, expected, strict=True):
        if isinstance(values[i], Known) or is_zero(a):  # nobody asks the gradient of a number
            continue
        wrong |= b is None or not _agree(site, a, b)
    return _or_unknown(site, results, wrong)


def _or_unknown(site: Site, results: list[Value], wrong: bool) -> list[Value]:
    return [first_unknown(results) or site.unknown("backward")] * len(results) if wrong else results


def _dual(site: Site, value: Value, shapes: Shapes) -> Value | None:
    """Return the relation of the derivative of a mean over pieces; None if it is not known."""
    if isinstance(value, Split) and differing(shapes) == (value.dim,) and value.order is None:
        return Split(value.dim, value.blocks, SCALE / value.ratio)
    if isinstance(value, Same) and not differing(shapes):
        return Total(SCALE / value.ratio, site.op)
    if isinstance(value, Total) and not differing(shapes):
        return Same(SCALE / value.ratio)
    return None


def _agree(site: Site, a: Value, b: Value) -> bool:
    """Return whether two relations are the same, up to rounding; numbers agree with what follows from them."""
    if isinstance(b, Known):
        return isinstance(a, Known)
    if isinstance(a, Known):
        a = Same() if a.equal else Unknown("count")
    if isinstance(a, Same) and isinstance(b, Total):  # what is the same everywhere is a share of its sum
        a = Total(a.ratio / site.pieces)
    if isinstance(a, Same | Split | Total) and isinstance(b, type(a)):
        places = [one.place if isinstance(one, Split) else None for one in (a, b)]
        return places[0] == places[1] and site.equal(a.ratio, b.ratio)  # pyright: ignore[reportAttributeAccessIssue]
    return a == b and not isinstance(a, Unknown)


def _followed(
    scope: Scope, site: Site, trace: Callable[[JaxprEqn], ClosedJaxpr], values: Sequence[Value]
) -> list[Value] | None:
    """Return the relations of what a rule gives; None if it cannot be traced by itself."""
    at = id(site.whole), id(site.piece)
    if at not in scope.rules:
        try:
            scope.rules[at] = trace(site.whole), trace(site.piece)
        except Exception:  # a rule that works only inside the loss: it closes over its tracers, or names mesh axes
            scope.rules[at] = None
    if scope.rules[at] is None:
        return None
    try:
        # a rule is not differentiated again, so rules within it do not count
        return dataclasses.replace(scope, training=False).relate(site, scope.rules[at][0], scope.rules[at][1], values)
    except DifferentTracesError:
        return None


def _called(eqn: JaxprEqn) -> Callable[..., Any]:
    def call(*operands: jax.Array) -> Any:
        with source_info_util.user_context(eqn.source_info.traceback):  # or messages would name this line
            return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    return call


def _no_tangent(operand: Any) -> Any:
    return jnp.zeros(jnp.shape(operand), jax.dtypes.float0)


def _like(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _floating(variables: Sequence[Any]) -> list[int]:
    return [i for i, var in enumerate(variables) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]
