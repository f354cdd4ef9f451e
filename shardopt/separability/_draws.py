"""Rules of random keys, and of random numbers from them.

Each piece has another key of the loss. Numbers for rows are independent in the whole batch and in
the pieces, so they are split. Numbers for all rows are `drawn`: each piece has others.

A key that is used twice gives equal numbers. If they belong to rows, a row of a piece meets them more
often than a row of the whole batch.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.separability._elementwise import elementwise, unknown_results
from shardopt.separability._proof import ProofSettings
from shardopt.separability._relations import (
    EquationPair,
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


def draw(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Draw random numbers, or new keys, from a key."""
    key, dims = relations[0], differing_dims(site.result_shapes())
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
    key, dims = relations[0], differing_dims(site.result_shapes())
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
        num_keys = [int(np.prod(shape)) for shape in site.result_shapes()]
        num_values = [np.unique(x).size for x in (number.whole_values, number.piece_values)]
        return draw(site, [key]) if num_keys == num_values else unknown_results(site, relations)
    results = elementwise(site, relations)
    return list(map(as_drawn, results)) if any(map(is_drawn, relations)) else results


DRAWS = frozenset(["random_bits", "random_split", "random_fold_in"])
"""Primitives whose numbers, or keys, follow from the key of an operand."""


def follow_keys(
    proof: ProofSettings,
    site: EquationPair,
    relations: Sequence[Relation],
    results: Sequence[Relation],
) -> Sequence[Relation]:
    """Return results with the numbers of the keys among them.

    Unknown if a key that is used once more gives numbers for each row.
    """
    numbers = [relation.key if isinstance(relation, Same) else None for relation in relations]
    key = next((number for number in numbers if number is not None), None)
    if key is None:
        return results
    operands = [
        (known.whole_values.tobytes(), known.piece_values.tobytes())
        if isinstance(known, Known)
        else number
        for known, number in zip(relations, numbers, strict=True)
    ]
    use = site.name, str(site.params), *operands
    if site.name in DRAWS:
        uses = proof.key_uses.setdefault(key, {})
        uses[use] = any(isinstance(result, Split) for result in results)
        if len(uses) > 1 and any(uses.values()):
            return unknown_results(site, relations, "reused")
    return [
        dataclasses.replace(result, key=_number_of_key(proof, site, i, use))
        if isinstance(result, Same)
        else result
        for i, result in enumerate(results)
    ]


def _number_of_key(proof: ProofSettings, site: EquationPair, i: int, use: object) -> int | None:
    """Return the number of the key that a result is; None if it is no key."""
    dtype = site.whole_eqn.outvars[i].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    if dtype != jnp.uint32 and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return proof.keys.setdefault((use, i), len(proof.keys))
