"""Rules of random keys, and of random numbers from them.

Each piece has another key of the loss. Numbers for rows are independent in the whole batch and in
the pieces, so they are split. Numbers for all rows are `drawn`: each piece has others.

A key that is used twice gives equal numbers. If they belong to rows, a row of a piece meets them more
often than a row of the whole batch.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from shardopt.core import is_key
from shardopt.separability._elementwise import elementwise, unknown_results
from shardopt.separability._proof import ProofSettings
from shardopt.separability._relations import (
    EquationPair,
    KeyPath,
    Known,
    Relation,
    Same,
    Split,
    as_drawn,
    differing_dims,
    growth,
    is_drawn,
    is_exactly_same,
)
from shardopt.trace._primitives import IDENTITIES, library_name, words


def draw(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Draw random numbers, or new keys, from a key."""
    key = relations[0]
    dims = differing_dims(site.result_shapes())
    if isinstance(key, Split):
        return [key if key.ratio == 1 and dims == (key.dim,) else site.unknown("shape")]
    if not is_exactly_same(key):
        return [site.unknown("mixes")]
    if not dims:
        return [key]
    if not is_drawn(key):  # all pieces draw the numbers of the first rows
        return [site.unknown("position")]
    # a key that is repeated for several rows gives them the same numbers
    one_key = not differing_dims(site.operand_shapes())
    for_rows = len(dims) == 1 and growth(site.result_shapes(), dims) == site.num_pieces
    return [Split(dims[0]) if one_key and for_rows else site.unknown("shape")]


def change_key(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Make a key of its bits or of a seed, or the other way round."""
    key = relations[0]
    dims = differing_dims(site.result_shapes())
    if isinstance(key, Split) and key.ratio == 1 and dims == (key.dim,):
        return [key]
    if is_exactly_same(key) and dims == differing_dims(site.operand_shapes()):
        return [key]
    return [site.unknown("shape")]


def fold_in(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Make a new key of a key and a number.

    From the key of the loss and a known number for each row, each row makes another key.
    """
    key, number = relations
    if is_drawn(key) and isinstance(number, Known) and differing_dims(site.result_shapes()):
        num_keys = list(map(math.prod, site.result_shapes()))
        num_values = [np.unique(x).size for x in (number.whole_values, number.piece_values)]
        return draw(site, [key]) if num_keys == num_values else unknown_results(site, relations)
    results = elementwise(site, relations)
    return list(map(as_drawn, results)) if any(map(is_drawn, relations)) else results


DRAWS = words("random_bits random_split random_fold_in")
"""Primitives whose numbers, or keys, follow from the key of an operand."""
KEEPS_KEYS = IDENTITIES | words("random_wrap random_unwrap squeeze")
"""Primitives whose result is the key of the operand."""
PASSES_KEYS = KEEPS_KEYS | words(
    "broadcast_in_dim concatenate device_put dynamic_slice gather optimization_barrier random_seed"
    " reshape rev select_n slice split tile transpose unstack"
)
"""Primitives whose result is a key of an operand, or one that is made from it.

Others may lose what differs between pieces: the bits of a key times 0 are no key.
"""
DISTINCT = words("key at fold")
"""Steps that make other keys from other numbers."""
ANY = "any", None
"""The step of keys of which it is not known how they are made from another one."""
MANY = "many", None
"""The step of several keys, of which one may be made from another."""


def follow_keys(
    proof: ProofSettings,
    site: EquationPair,
    relations: Sequence[Relation],
    results: Sequence[Relation],
) -> Sequence[Relation]:
    """Return results with the paths of the keys among them.

    Unknown if a key that is used once more gives numbers for each row. To read the bits of a key as
    numbers is a use too.
    """
    keys = _keys_of(relations)
    is_draw = site.name in DRAWS
    if is_draw and is_drawn(relations[0]) and not _keys_of(relations[:1]):
        return unknown_results(site, relations, "hidden")
    if draws_together(site.whole_eqn) and isinstance(relations[0], Split):
        return unknown_results(site, relations, "keys")
    for_rows = is_draw and any(isinstance(result, Split) for result in results)
    passes_keys = is_draw or _passes_keys(site, relations)
    are_keys = [
        passes_keys and isinstance(result, Same) and _holds_keys(atom)
        for atom, result in zip(site.whole_eqn.outvars, results, strict=True)
    ]
    is_read = not is_draw and not all(are_keys)
    if site.name == "random_bits" or for_rows or is_read:
        use = tuple(map(id, (*site.callers, site.whole_eqn)))
        proof.key_uses.update({(key, use): for_rows for key in keys})
        if any(
            (for_rows or other_for_rows)
            and (other_use != (key, use) or MANY in key)
            and _may_be_equal(key, other_use[0])
            for key in keys
            for other_use, other_for_rows in proof.key_uses.items()
        ):
            return unknown_results(site, relations, "reused")
    followed = []
    for i, result in enumerate(results):
        if isinstance(result, Same):
            result_keys = keys if are_keys[i] else ()
            if site.name not in KEEPS_KEYS:
                result_keys = [(*key, _step(site, relations, key, i)) for key in result_keys]
            result = dataclasses.replace(result, keys=frozenset(result_keys))
        followed.append(result)
    return followed


def _passes_keys(site: EquationPair, relations: Sequence[Relation]) -> bool:
    """Return whether a result of an equation, if it is a key, is one of the keys of its operands.

    Else it may be a constant, or the key that is hidden in other numbers.
    """
    if site.params.get("mode") == jax.lax.GatherScatterMode.FILL_OR_DROP:
        return False
    return site.name in PASSES_KEYS and all(
        _keys_of([relation]) if _holds_keys(atom) else not is_drawn(relation)
        for atom, relation in zip(site.whole_eqn.invars, relations, strict=True)
    )


def draws_together(eqn: JaxprEqn) -> bool:
    """Return whether jax draws the numbers of several keys together, not key by key: for all
    implementations but threefry.
    """
    if library_name(eqn.primitive) not in DRAWS | {"rng_bit_generator"}:
        return False
    key_by_key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    return eqn.invars[0].aval.dtype != key_by_key  # pyright: ignore


def _step(
    site: EquationPair, relations: Sequence[Relation], key: KeyPath, i: int
) -> tuple[str, Any]:
    """Return the last step of the path of the key that is result i of an equation."""
    if site.name == "random_split":
        return "split", str(site.params)
    if site.name == "random_fold_in":
        number = relations[1]
        if isinstance(number, Known) and number.whole_values.size == 1:
            return "fold", number.whole_values.item()
        return "fold", None
    # a key of the list that one split makes
    comes_from_list = key[-1][0] == "split" and len(site.operand_shapes(0)[0]) == 1
    if site.name == "unstack" and comes_from_list:
        return "at", i
    if site.name == "slice" and comes_from_list:
        (start,), (end,) = site.params["start_indices"], site.params["limit_indices"]
        if end == start + 1:
            return "at", start
    return ANY


def _may_be_equal(key: KeyPath, other: KeyPath) -> bool:
    """Return whether two keys may be equal, or one may be made from the other."""
    for step, other_step in zip(key, other, strict=False):
        if step != other_step or step in (ANY, MANY):
            names_differ = step[0] != other_step[0] or step[0] not in DISTINCT
            return names_differ or None in (step[1], other_step[1])
    return True


def passes_on_used_key(
    proof: ProofSettings, carry: Sequence[Relation], after: Sequence[Relation]
) -> bool:
    """Return whether a turn uses a key that it passes on, or one that is made from it, or the other
    way round. The next turns would use it again.

    Args:
      proof: the settings of the proof, with the uses of a turn.
      carry: the carry before a turn.
      after: the carry after the turn.
    """
    return any(
        _may_be_equal(use[len(key) :], passed_on[len(key) :])
        for key in _keys_of(carry)
        if key[-1] == ANY  # else all turns have the same key
        for use, _ in proof.key_uses
        if use[: len(key)] == key
        for passed_on in _keys_of(after)
        if passed_on[: len(key)] == key
    )


def _keys_of(relations: Sequence[Relation]) -> frozenset[KeyPath]:
    return frozenset(
        key for relation in relations if isinstance(relation, Same) for key in relation.keys
    )


def one_of_keys(a: frozenset[KeyPath], b: frozenset[KeyPath]) -> frozenset[KeyPath]:
    """Return the keys of a value that has the keys `a` or the keys `b`, or keys made from them.

    Empty if one value may be no key, which is the same in all pieces, or a hidden one.
    """
    if a == b:
        return a
    if not a or not b:
        return frozenset()
    several = len(a) > 1 or len(b) > 1 or any(MANY in key for key in a | b)
    step = MANY if several else ANY
    shortest = min(a | b, key=len)
    is_root = all(key[: len(shortest)] == shortest for key in a | b)
    root = shortest if is_root else ()
    return frozenset([root if root[-1:] == (step,) else (*root, step)])


def _holds_keys(atom: Any) -> bool:
    """Return whether a value may be a key, or its bits."""
    return atom.aval.dtype == jnp.uint32 or is_key(atom.aval)
