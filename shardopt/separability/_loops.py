"""Rules of `scan`, `while` and `cond`.

A relation of a carry must hold before every turn. A scan may also take one row a turn.
"""

import dataclasses
from collections.abc import Sequence, Set
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from shardopt.separability._draws import ANY, MANY, one_of_keys, passes_on_used_key
from shardopt.separability._elementwise import (
    first_unknown,
    is_zero,
    resolve_numbers,
    unify,
    unknown_results,
)
from shardopt.separability._moves import as_split
from shardopt.separability._proof import ProofSettings
from shardopt.separability._relations import (
    Columns,
    EquationPair,
    Known,
    Relation,
    Same,
    Shifted,
    Split,
    Total,
    as_drawn,
    is_drawn,
    is_exactly_same,
    is_unscaled,
)
from shardopt.separability._table import checked
from shardopt.trace._jaxprs import CHECKPOINTS, open_jaxpr
from shardopt.trace._parts import reached_from
from shardopt.trace._primitives import library_name, words
from shardopt.trace._walk import scan_parts, while_parts

CALLS = {"jit", *CHECKPOINTS}
"""Primitives that only call a function."""
MAX_ROUNDS = 8
"""The number of rounds after which the search for relations that hold before every turn gives up.
"""


def scan(proof: ProofSettings, site: EquationPair, relations: list[Relation]) -> list[Relation]:
    """Follow a scan that has equally many turns in both traces, or that takes one row a turn.

    A scan over rows has n times as many turns in the whole trace.
    """
    bodies = site.both_params("jaxpr")
    num_turns = site.both_params("length")
    if site.params["reverse"] != site.piece_eqn.params["reverse"]:
        return unknown_results(site, relations, "traces")
    if num_turns[0] == num_turns[1] * site.num_pieces:
        return _scan_over_rows(proof, site, relations)
    if num_turns[0] != num_turns[1]:
        return unknown_results(site, relations, "loop")
    consts, carry, _ = scan_parts(site.whole_eqn, relations)
    scanned = scan_parts(site.whole_eqn, resolve_numbers(site, relations))[2]
    turn_operands = [_with_dims(site, relation, -1) for relation in scanned]
    carry, turn_results = _fixed_point(proof, site, bodies, consts, carry, turn_operands)
    return [*carry, *[_with_dims(site, relation, 1) for relation in turn_results]]


def _with_dims(site: EquationPair, relation: Relation, added_dims: int) -> Relation:
    """Return the relation of the stacked results of all turns, which have one dim more. Or return
    the relation of the part of a scanned operand that a turn takes, which has one dim less.

    The dim of turns has one length in both traces, so it is not the split dim. A known number is
    the number of one turn only. The turns may have made one key several times.
    """
    if isinstance(relation, Same) and added_dims == 1:
        keys = frozenset((*key, MANY if ANY in key else ANY) for key in relation.keys)
        return dataclasses.replace(relation, keys=keys)
    if isinstance(relation, Split):
        return relation.moved_to(relation.dim + added_dims)
    if isinstance(relation, Known):
        return relation.as_same()
    return site.unknown("shape") if isinstance(relation, Columns | Shifted) else relation


def _fixed_point(
    proof: ProofSettings,
    site: EquationPair,
    bodies: Sequence[Any],
    consts: Sequence[Relation],
    carry: Sequence[Relation],
    turn_operands: Sequence[Relation],
) -> tuple[list[Relation], list[Relation]]:
    """Return the relations of the carry that hold before every turn, and the relations of the other
    results of a turn.

    By induction: the relations hold before the first turn, and if they hold before a turn, they
    hold after it.
    """
    reason = "loop"
    for _ in range(MAX_ROUNDS):
        key_uses = dict(proof.key_uses)
        results = proof.relate(site, bodies[0], bodies[1], [*consts, *carry, *turn_operands])
        after = [
            _common_relation(site, *pair) for pair in zip(carry, results[: len(carry)], strict=True)
        ]
        if all(a is b or a == b for a, b in zip(carry, after, strict=True)):
            if not passes_on_used_key(proof, carry, results[: len(carry)]):
                return after, results[len(carry) :]
            reason = "reused"
            break
        carry = after
        proof.key_uses.clear()
        proof.key_uses.update(key_uses)
    unknown = site.unknown(reason)
    return [unknown] * len(carry), [unknown] * (site.num_results - len(carry))


def _common_relation(site: EquationPair, before: Relation, after: Relation) -> Relation:
    """Return a relation that both values have.

    Known numbers that differ become the relation that both numbers have.
    """
    if before is after or before == after:
        return before
    relations = [
        relation.as_same() if isinstance(relation, Known) else relation
        for relation in (before, after)
    ]
    joined = unify(site, relations, [is_zero(before), is_zero(after)])
    keys = [relation.keys for relation in relations if isinstance(relation, Same)]
    if isinstance(joined, Same):
        return dataclasses.replace(joined, keys=one_of_keys(*keys))
    return joined


def while_loop(
    proof: ProofSettings, site: EquationPair, relations: list[Relation]
) -> list[Relation]:
    """Follow a loop that takes equally many turns on all pieces, or that jax has vmapped over rows.

    The condition of the first is the same in the whole trace and in every piece. The condition of
    the other has a number for each row, and a row changes no more when its number is false.
    """
    cond_consts, body_consts, start = while_parts(site.whole_eqn, relations)
    if site.params["cond_jaxpr"].out_avals[0].shape:
        # devices take different numbers of turns
        proof = dataclasses.replace(proof, alone=True)
        first = len(relations) - len(start)
        start = [
            as_split(site, relation, first + i)
            for i, relation in enumerate(resolve_numbers(site, relations)[first:])
        ]
    carry, _ = _fixed_point(proof, site, site.both_params("body_jaxpr"), body_consts, start, [])
    (condition,) = proof.relate(site, *site.both_params("cond_jaxpr"), [*cond_consts, *carry])
    if isinstance(condition, Known):
        condition = condition.as_same()
    if is_drawn(condition) and not proof.alone:
        return while_loop(dataclasses.replace(proof, alone=True), site, relations)
    if is_exactly_same(condition):
        return list(map(as_drawn, carry)) if is_drawn(condition) else carry
    if is_unscaled(condition) and isinstance(condition, Split) and not condition.drawn:
        places = {getattr(relation, "place", None) for relation in carry}
        if places == {condition.place}:
            return carry
    unknown = first_unknown([condition]) or site.unknown("loop")
    return [unknown] * site.num_results


def cond(proof: ProofSettings, site: EquationPair, relations: list[Relation]) -> list[Relation]:
    """Follow all branches.

    The index of the branch must be the same in the whole trace and in every piece.
    """
    operands = relations[1:]
    whole_branches, piece_branches = site.both_params("branches")
    if len(whole_branches) != len(piece_branches):
        return unknown_results(site, relations, "traces")
    branches = list(zip(whole_branches, piece_branches, strict=True))
    index_relation = resolve_numbers(site, relations)[0]
    if not is_exactly_same(index_relation):
        return unknown_results(site, [index_relation])
    if is_drawn(index_relation):
        proof = dataclasses.replace(proof, alone=True)
    branch_results = [proof.relate(site, *branch, operands) for branch in branches]
    results = []
    for alternatives in zip(*branch_results, strict=True):
        relation = alternatives[0]
        for alternative in alternatives[1:]:
            relation = _common_relation(site, relation, alternative)
        results.append(as_drawn(relation) if is_drawn(index_relation) else relation)
    return results


# --- scans that take one row a turn ---------------------------------------------------------------

ADDING = words("add add_any sub scatter-add")


def _scan_over_rows(
    proof: ProofSettings, site: EquationPair, relations: list[Relation]
) -> list[Relation]:
    """Follow a scan that takes one row a turn, and has as many turns as there are rows.

    Every turn must do the same in the whole trace as in a piece.

    - A result that does not depend on other turns belongs to the row of its turn, so the stacked
      results are split.
    - A carry is a sum over rows if it begins at 0, and each turn adds a term of its row to it.
    """
    bodies = site.both_params("jaxpr")
    operands = resolve_numbers(site, relations)
    start = scan_parts(site.whole_eqn, relations)[1]
    consts, _, scanned = scan_parts(site.whole_eqn, operands)
    num_consts = len(consts)
    num_carry = len(start)
    unknown = first_unknown([*consts, *scanned]) or site.unknown("loop")
    unscaled = all(map(is_exactly_same, consts))
    unscaled &= all(relation == Split(0) or is_exactly_same(relation) for relation in scanned)
    body = open_jaxpr(bodies[0])
    turn_operands = [relation if is_exactly_same(relation) else Same() for relation in operands]
    # a turn has another row on each device, which a collective would combine
    one_row = dataclasses.replace(proof, alone=True)
    if not unscaled or not all(map(_equals_piece, one_row.relate(site, *bodies, turn_operands))):
        return [unknown] * site.num_results
    carry_vars = body.invars[num_consts : num_consts + num_carry]
    turn_dependent = reached_from(body, set(carry_vars), every=False)
    results: list[Relation] = []
    for i, (relation, var) in enumerate(zip(start, carry_vars, strict=True)):
        is_sum = is_zero(relation) and _adds_row_term(body, var, body.outvars[i], turn_dependent)
        results.append(checked(site, i, Total(Fraction(1), site.op)) if is_sum else unknown)
    for out in body.outvars[num_carry:]:
        from_row = not isinstance(out, Literal) and out not in turn_dependent
        results.append(Split(0) if from_row else unknown)
    return list(map(as_drawn, results)) if any(map(is_drawn, [*consts, *scanned])) else results


def _equals_piece(relation: Relation) -> bool:
    """Return whether W = P_i, for a value that does not follow from the random key."""
    return is_exactly_same(relation) or (isinstance(relation, Known) and relation.same_numbers)


def _adds_row_term(body: Jaxpr, var: Any, out: Any, turn_dependent: Set[Any]) -> bool:
    """Return whether a turn adds to a carry what follows from its row only, and does nothing else
    with the carry.

    Args:
      body: the jaxpr of a turn, or of a function that it calls.
      var: the carry before the turn.
      out: the carry after the turn.
      turn_dependent: the variables that follow from other turns.
    """
    uses = [eqn for eqn in body.eqns if _places(var, eqn.invars)]
    if len(uses) != 1 or _places(var, body.outvars):
        return False
    (eqn,) = uses
    name = library_name(eqn.primitive)
    if name == "convert_element_type" and eqn.params["new_dtype"] == var.aval.dtype:
        # this conversion only drops the weak type, which changes no number
        return _adds_row_term(body, eqn.outvars[0], out, turn_dependent)
    operands = _places(var, eqn.invars)
    results = _places(out, eqn.outvars)
    if not len(operands) == len(results) == len(_places(out, body.outvars)) == 1:
        return False
    if name in CALLS:
        function = open_jaxpr(eqn.params["jaxpr"])
        dependent = {
            inner
            for inner, atom in zip(function.invars, eqn.invars, strict=True)
            if not isinstance(atom, Literal) and atom in turn_dependent
        }
        return _adds_row_term(
            function,
            function.invars[operands[0]],
            function.outvars[results[0]],
            reached_from(function, dependent, every=False),
        )
    wraps = name == "sub" and not jnp.issubdtype(var.aval.dtype, jnp.inexact)
    is_first = operands[0] == 0 or name in ("add", "add_any")
    others = [atom for atom in eqn.invars if atom is not var and not isinstance(atom, Literal)]
    return name in ADDING and not wraps and is_first and turn_dependent.isdisjoint(others)


def _places(var: Any, atoms: Sequence[Any]) -> list[int]:
    """Return the indices at which a variable stands."""
    return [i for i, atom in enumerate(atoms) if atom is var]
