"""Checks the derivative rules of `jax.custom_jvp` and `jax.custom_vjp`, which decide the gradient
of a function.

A rule is traced on the whole batch and on a piece, and followed like the loss. A function without
such a rule needs no check: if W follows from the P_i for all parameters, its derivative follows
from their derivatives.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from shardopt.core._trace_context import RowContext, within_rows, within_trace
from shardopt.separability._elementwise import is_zero, resolve_numbers, unknown_results
from shardopt.separability._proof import DifferentTracesError, ProofSettings
from shardopt.separability._relations import (
    EquationPair,
    Known,
    Relation,
    Same,
    Shapes,
    Split,
    Total,
    Unrelated,
    differing_dims,
    is_drawn,
)
from shardopt.trace._parts import abstract_value

SCALE = Fraction(7390851332151607, 10**16)
"""An arbitrary positive factor s between the derivative of the whole batch's loss and the
derivative of a piece's loss.

A strategy scales the loss of a piece: by the number of pieces, or by a weight that only all pieces
together know. It corrects the gradient afterwards. This is right only if rules scale with the
cotangents, as derivatives do. Rules that add to the cotangents, clip them or take their sign cannot
give back this factor: it follows from no size in a program. It is positive, because 8-bit products
divide a gradient by its largest magnitude. Weights that add up to less than 0 are outside the claim.
"""

ROWS_OF_A_RULE = RowContext(
    (),
    1,
    refused=("a rule of jax.custom_vjp sees the rows of its device", "call it in the loss itself"),
)
"""The rows while a derivative rule is traced: they are not distributed there as in the loss."""


def _as_function(
    eqn: JaxprEqn, operands: Sequence[jax.Array], indices: Sequence[int]
) -> Callable[..., list[Any]]:
    """Return the function that an equation calls, as a function of the operands at `indices`."""

    def call(*differentiated: jax.Array) -> list[Any]:
        filled = list(operands)
        for i, operand in zip(indices, differentiated, strict=True):
            filled[i] = operand
        # without it, messages would name this line
        with source_info_util.user_context(eqn.source_info.traceback):
            return eqn.primitive.bind(*filled, **eqn.primitive.get_bind_params(eqn.params))

    return call


def follow_jvp(
    proof: ProofSettings, site: EquationPair, relations: list[Relation], results: list[Relation]
) -> list[Relation]:
    """Return the relations of the results if the jvp rule agrees with them; else `Unrelated`.

    The rule maps (operands, tangents) to (results, their tangents). A tangent is a difference of
    two values, so it has the relation of the values. A rule that gives other relations is not the
    derivative of the function on the whole batch.
    """
    inputs = floating(site.whole_eqn.invars)
    outputs = floating(site.whole_eqn.outvars)

    def trace(eqn: JaxprEqn) -> ClosedJaxpr:
        def run(
            operands: list[jax.Array], tangents: list[jax.Array]
        ) -> tuple[list[Any], list[Any]]:
            function = _as_function(eqn, operands, inputs)
            primals_out, tangents_out = jax.jvp(function, [operands[i] for i in inputs], tangents)
            return primals_out, [tangents_out[i] for i in outputs]

        return jax.make_jaxpr(run)(
            [abstract_value(var) for var in eqn.invars],
            [abstract_value(eqn.invars[i]) for i in inputs],
        )

    operands = resolve_numbers(site, relations)
    tangents = [Same() if is_zero(relations[i]) else operands[i] for i in inputs]
    rule_relations = _follow_rule(proof, site, trace, [*relations, *tangents])
    # the tangent of known numbers is 0
    expected = [
        site.unknown("backward") if isinstance(results[i], Known) else results[i] for i in outputs
    ]
    agree = _all_agree(site, rule_relations, results, expected)
    return results if agree else unknown_results(site, results, "backward")


def follow_vjp(
    proof: ProofSettings, site: EquationPair, relations: list[Relation], results: list[Relation]
) -> list[Relation]:
    """Return the relations of the results if the vjp rule agrees with them; else `Unrelated`.

    The rule maps (operands, cotangents of the results) to (results, cotangents of the operands).
    The loss of the whole batch is the sum of the losses of the pieces, times a factor s (see
    `SCALE`): L_W = s sum L_i. Its derivative with respect to a value depends on the relation of the
    value:

        Split(r)   L_W' = s/r concat(L_i')     Same(r)   L_W' = s/r sum L_i'     Total(c)   L_i' = c/s L_W'

    The proof gives these relations to the cotangents of the results. The cotangents of the operands
    must have them too.
    """
    # the constants that the rule closes over have no cotangents
    inputs = [i for i in floating(site.whole_eqn.invars) if i >= site.params.get("num_consts", 0)]
    outputs = floating(site.whole_eqn.outvars)

    def trace(eqn: JaxprEqn) -> ClosedJaxpr:
        def run(
            operands: list[jax.Array], cotangents: list[jax.Array]
        ) -> tuple[list[Any], list[Any]]:
            function = _as_function(eqn, operands, inputs)

            def forward(*operands: jax.Array) -> tuple[list[Any], list[Any]]:
                all_results = function(*operands)
                return [all_results[i] for i in outputs], all_results

            _, pull_back, all_results = jax.vjp(
                forward, *[operands[i] for i in inputs], has_aux=True
            )
            return all_results, list(pull_back(cotangents))

        return jax.make_jaxpr(run)(
            [abstract_value(var) for var in eqn.invars],
            [abstract_value(eqn.outvars[i]) for i in outputs],
        )

    operands = resolve_numbers(site, relations)
    cotangents = [derivative_relation(site, results[i], site.result_shapes(i)) for i in outputs]
    rule_relations = _follow_rule(proof, site, trace, [*relations, *cotangents])
    # a known number has no gradient
    expected = [
        None
        if isinstance(relations[i], Known)
        else derivative_relation(site, operands[i], site.operand_shapes(i))
        for i in inputs
    ]
    agree = _all_agree(site, rule_relations, results, expected)
    return results if agree else unknown_results(site, results, "backward")


def derivative_relation(site: EquationPair, relation: Relation, shapes: Shapes) -> Relation:
    """Return the relation of the loss's derivative with respect to a value, see `follow_vjp`."""
    if isinstance(relation, Split) and differing_dims(shapes) == (relation.dim,):
        return Split(relation.dim, relation.blocks, SCALE / relation.ratio)
    if isinstance(relation, Same) and not differing_dims(shapes):
        return Total(SCALE / relation.ratio, site.op)
    if isinstance(relation, Total) and not differing_dims(shapes):
        return Same(SCALE / relation.ratio)
    return site.unknown("backward")


def _all_agree(
    site: EquationPair,
    rule_relations: Sequence[Relation],
    results: Sequence[Relation],
    expected: Sequence[Relation | None],
) -> bool:
    """Return whether a rule gives the results of its function, and derivatives with the expected
    relations; None expects nothing.

    0 has every relation, but is no other number.
    """
    if len(rule_relations) != len(results) + len(expected):
        return False
    drawn = list(map(is_drawn, results))
    # a value that is not drawn may go through a sum over devices, whose derivative would multiply the
    # draws of two devices
    may_be_drawn = drawn + [all(drawn)] * len(expected)
    return all(
        (may_draw or not is_drawn(a))
        and (b is None or (is_zero(a) and not isinstance(b, Known)) or implies(site, a, b))
        for a, b, may_draw in zip(rule_relations, [*results, *expected], may_be_drawn, strict=True)
    )


def implies(site: EquationPair, a: Relation, b: Relation) -> bool:
    """Return whether relation `a` implies relation `b`, up to rounding of the ratios."""
    if isinstance(b, Known):
        return isinstance(a, Known) and a.equals(b)
    # W = r P_i in all pieces is W = (r/n) (P_0 + ...)
    if isinstance(a, Same) and isinstance(b, Total):
        a = Total(a.ratio / site.num_pieces)
    if isinstance(a, Same | Split | Total) and isinstance(b, type(a)):
        places = [getattr(relation, "place", None) for relation in (a, b)]
        return places[0] == places[1] and a.ratio == b.ratio  # pyright: ignore[reportAttributeAccessIssue]
    return a == b and not isinstance(a, Unrelated)


def _follow_rule(
    proof: ProofSettings,
    site: EquationPair,
    trace: Callable[[JaxprEqn], ClosedJaxpr],
    relations: Sequence[Relation],
) -> list[Relation]:
    """Return the relations of the results of a derivative rule.

    [] if the rule cannot be traced outside of the loss, or not to the same equations.

    Args:
      proof: the settings of the proof.
      site: the call of the function.
      trace: a function that traces the rule of an equation.
      relations: the relations of the rule's operands.
    """
    key = id(site.whole_eqn), id(site.piece_eqn)
    if key not in proof.rule_traces:
        try:
            # layers use their plain forms, as in the trace of the loss
            with within_trace(is_analysis=True), within_rows(ROWS_OF_A_RULE):
                proof.rule_traces[key] = trace(site.whole_eqn), trace(site.piece_eqn)
        except Exception:
            # a rule that works only inside the loss: it closes over tracers of the loss, or names
            # mesh axes
            proof.rule_traces[key] = None
    if proof.rule_traces[key] is None:
        return []
    try:
        # a rule is not differentiated, so derivative rules inside it do not count
        return dataclasses.replace(proof, training=False).relate(
            site, proof.rule_traces[key][0], proof.rule_traces[key][1], relations
        )
    except DifferentTracesError:
        return []


def floating(variables: Sequence[Any]) -> list[int]:
    """Return the indices of the variables that have a floating or complex dtype."""
    return [i for i, var in enumerate(variables) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]
