"""Loops and choices: a relation that holds before every turn, and loops that take one row a turn."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from shardopt.core.jaxprs import scan_carry
from shardopt.separability.elementwise import first_unknown, is_zero, related, unify
from shardopt.separability.relations import Columns, Known, OfOperand, Same, Shifted, Site, Split, Total, Unknown, Value
from shardopt.separability.scope import Scope, opened

MOST_ROUNDS = 8
"""Rounds after which no relation is looked for any more that holds before every turn."""


def scan(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow a scan of as many turns in the whole as in a piece; or one that takes the next row every turn."""
    bodies = site.params_of("jaxpr")
    num_carry, first = scan_carry(site.whole, opened(bodies[0]))
    lengths = site.params_of("length")
    if site.params["reverse"] != site.piece.params["reverse"]:
        return [site.unknown("traces")] * site.num_results
    if lengths[0] != lengths[1]:
        return _over_rows(scope, site, values, num_carry, first)
    consts, carry, scanned = values[:first], values[first : first + num_carry], values[first + num_carry :]
    turns = [_of_turn(site, value, first + num_carry + i) for i, value in enumerate(scanned)]
    carry, stacked = _fixed_point(scope, site, bodies, consts, carry, turns)
    return [*carry, *[_stacked(site, value) for value in stacked]]


def _of_turn(site: Site, value: Value, i: int) -> Value:
    """Return the relation of what a turn takes of a scanned operand."""
    if isinstance(value, Known):
        (value,) = related(OfOperand(site, i), [value])
    if isinstance(value, Split):  # the dim that is scanned is as long in a piece, so it is not this one
        return value.at(value.dim - 1)
    return site.unknown("shape") if isinstance(value, Columns | Shifted) else value


def _stacked(site: Site, value: Value) -> Value:
    """Return the relation of the results of all turns: each turn's holds, whatever number it gave."""
    if isinstance(value, Split):
        return value.at(value.dim + 1)
    if isinstance(value, Known):
        return Same() if value.equal else Unknown("count", value.op)
    return site.unknown("shape") if isinstance(value, Columns | Shifted) else value


def _fixed_point(
    scope: Scope, site: Site, bodies: Sequence[Any], consts: list[Value], carry: list[Value], turns: list[Value]
) -> tuple[list[Value], list[Value]]:
    """Return relations of the carry that hold before every turn, and those of the other results of a turn.

    They hold before the first turn, and if they hold before a turn, they hold after it.
    """
    for _ in range(MOST_ROUNDS):
        results = scope.relate(site, bodies[0], bodies[1], [*consts, *carry, *turns])
        after = [_either(site, *pair) for pair in zip(carry, results[: len(carry)], strict=True)]
        if all(a is b or (a == b and not isinstance(a, Known)) for a, b in zip(carry, after, strict=True)):
            return after, results[len(carry) :]
        carry = after
    unknown = site.unknown("loop")
    return [unknown] * len(carry), [unknown] * (site.num_results - len(carry))


def _either(site: Site, before: Value, after: Value) -> Value:
    """Return a relation that both values have; of two different numbers, what follows from each."""
    if before is after or (before == after and not isinstance(before, Known)):
        return before
    if unknown := first_unknown([before, after]):
        return unknown
    values = []
    for value in (before, after):
        if isinstance(value, Known):
            if not value.equal:
                return Unknown("count", value.op)
            value = Same()
        values.append(value)
    if not all(isinstance(value, Same | Split | Total) for value in values):
        return values[0] if values[0] == values[1] else site.unknown("loop")
    return unify(site, values, [is_zero(before), is_zero(after)])


def while_loop(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow a loop that goes on for as many turns in the whole as in a piece, because its condition is the same."""
    in_cond, in_body = site.params["cond_nconsts"], site.params["body_nconsts"]
    of_cond, of_body, start = values[:in_cond], values[in_cond : in_cond + in_body], values[in_cond + in_body :]
    carry, _ = _fixed_point(scope, site, site.params_of("body_jaxpr"), of_body, start, [])
    (goes_on,) = scope.relate(site, *site.params_of("cond_jaxpr"), [*of_cond, *carry])
    if isinstance(goes_on, Same) and goes_on.ratio == 1.0:
        return carry
    if isinstance(goes_on, Known) and goes_on.equal:
        return carry
    why = goes_on if isinstance(goes_on, Unknown) else site.unknown("loop")
    return [why] * site.num_results


def cond(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow all branches; which is taken must be the same in the whole and in every piece."""
    which, operands = values[0], values[1:]
    branches = list(zip(*site.params_of("branches"), strict=True))
    if isinstance(which, Known) and which.equal and which.whole.size == 1:
        return scope.relate(site, *branches[int(np.clip(which.whole.item(), 0, len(branches) - 1))], operands)
    going_on = [branch for branch in branches if not _raises(branch[0])]
    if len(going_on) == 1 < len(branches):  # the others end the run, whichever piece takes them
        return scope.relate(site, *going_on[0], operands)
    taken = related(site, values)[0]
    if not (isinstance(taken, Same) and taken.ratio == 1.0):
        return [first_unknown([taken]) or site.unknown("mixes")] * site.num_results
    found = [scope.relate(site, *branch, operands) for branch in branches]
    results = []
    for alternatives in zip(*found, strict=True):
        value = alternatives[0]
        for other in alternatives[1:]:
            value = _either(site, value, other)
        if isinstance(value, Known):  # of one branch only: another number may come out
            value = Same() if value.equal else Unknown("count", value.op)
        results.append(value)
    return results


def _raises(branch: Any) -> bool:
    """Return whether a branch is that of `equinox.error_if` which raises an error."""
    callbacks = [eqn.params.get("callback") for eqn in opened(branch).eqns if eqn.primitive.name == "pure_callback"]
    functions = [getattr(callback, "callback_func", None) for callback in callbacks]
    return any(getattr(function, "__module__", "") == "equinox._errors" for function in functions)


# --- one row a turn ---------------------------------------------------------------------------------------------------

ADDING = frozenset(["add", "add_any", "sub", "scatter-add", "scatter_add"])


def _over_rows(scope: Scope, site: Site, values: list[Value], num_carry: int, first: int) -> list[Value]:
    """Follow a loop that takes one row a turn, with as many turns as there are rows.

    If a turn does the same in the whole as in a piece, and does not look at what other turns carry on, its result is that of its
    row. A carry to which each turn adds something of its row is, begun at 0, the sum of those of the pieces.
    """
    bodies = site.params_of("jaxpr")
    consts, start, scanned = values[:first], values[first : first + num_carry], values[first + num_carry :]
    unknown = first_unknown([*consts, *scanned]) or site.unknown("loop")
    shared = [related(OfOperand(site, i), [value])[0] for i, value in enumerate(consts)]
    rows = [related(OfOperand(site, first + num_carry + i), [value])[0] for i, value in enumerate(scanned)]
    plain = all(isinstance(value, Same) and value.ratio == 1.0 for value in shared)
    plain &= all(value == Split(0) or (isinstance(value, Same) and value.ratio == 1.0) for value in rows)
    body = opened(bodies[0])
    if not plain or not all(map(_is_same, scope.relate(site, *bodies, [Same()] * len(body.invars)))):
        return [unknown] * site.num_results
    carried = body.invars[first : first + num_carry]
    sums = [_is_sum(body, var, out) for var, out in zip(carried, body.outvars, strict=False)]
    begun = [related(OfOperand(site, first + i), [value])[0] for i, value in enumerate(start)]
    changed = {
        var for var, out, value in zip(carried, body.outvars, begun, strict=False) if var is not out or value != Same()
    }
    tainted = _following_from(body, changed)
    results: list[Value] = []
    for value, var, out, is_sum in zip(start, carried, body.outvars, sums, strict=False):
        if var is out:
            results.append(value)
        elif (
            is_sum is not None
            and is_zero(value)
            and not (is_sum & tainted)
            and len(set(site.result(len(results)))) == 1
        ):
            results.append(Total(1.0, site.op))
        else:
            results.append(unknown)
    for i, out in enumerate(body.outvars[num_carry:]):
        own = not isinstance(out, Literal) and out not in tainted
        shapes = site.result(num_carry + i)
        fine = shapes[0][0] == shapes[1][0] * site.pieces and shapes[0][1:] == shapes[1][1:]
        results.append(Split(0) if own and fine else unknown)
    return results


def _is_same(value: Value) -> bool:
    return value == Same() or (isinstance(value, Known) and value.equal)


def _is_sum(body: Jaxpr, var: Any, out: Any) -> set[Any] | None:
    """Return what else goes into the addition that a carry goes into, and into nothing else; None if it is not so."""
    if sum(one is out for one in body.outvars) > 1:
        return None
    while True:
        uses = [eqn for eqn in body.eqns if any(atom is var for atom in eqn.invars)]
        if len(uses) != 1 or any(one is var for one in body.outvars):
            return None
        eqn = uses[0]
        if eqn.primitive.name != "convert_element_type" or eqn.params["new_dtype"] != var.aval.dtype:
            break
        var = eqn.outvars[0]  # jax forgets where a dtype came from, which changes no number
    at = [i for i, atom in enumerate(eqn.invars) if atom is var]
    name = eqn.primitive.name
    if (
        name not in ADDING
        or eqn.outvars[0] is not out
        or len(at) != 1
        or (at[0] != 0 and name not in ("add", "add_any"))
    ):
        return None
    return {atom for i, atom in enumerate(eqn.invars) if i != at[0] and not isinstance(atom, Literal)}


def _following_from(body: Jaxpr, variables: set[Any]) -> set[Any]:
    """Return all variables that something follows from."""
    tainted = set(variables)
    for eqn in body.eqns:
        if any(not isinstance(atom, Literal) and atom in tainted for atom in eqn.invars):
            tainted.update(eqn.outvars)
    return tainted
