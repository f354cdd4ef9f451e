"""Cases of random keys, and of draws from them.

Operands are the bits of keys. Rows of a fresh draw have numbers of their own. The check is that no
two rows of the whole or of the pieces have the same numbers.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.separability._relations import (
    Extreme,
    Known,
    Relation,
    Same,
    Split,
    Total,
    Unrelated,
    is_drawn,
)
from support.relation_meaning import Operand, RuleCase, violation

BITS = np.uint32
FEATURES = 3


def bits(keys: jax.Array, shape: tuple[int, ...] = (FEATURES,)) -> jax.Array:
    """Return random bits from the bits of a key, or of keys [rows]."""
    draw: Callable[[jax.Array], jax.Array] = lambda key: jax.random.bits(  # noqa: E731
        jax.random.wrap_key_data(key), shape
    )
    return draw(keys) if keys.ndim == 1 else jax.vmap(draw)(keys)


def fresh_violation(relation: Relation, whole_value: Any, pieces: Sequence[Any]) -> str | None:
    """Return why rows of a fresh draw share numbers."""
    if not isinstance(relation, Split) or is_drawn(relation):
        return violation(relation, whole_value, pieces)
    for value in (whole_value, *pieces):
        rows = np.moveaxis(np.asarray(value), relation.dim, 0).reshape(
            value.shape[relation.dim], -1
        )
        if len(np.unique(rows, axis=0)) < len(rows):
            return "two rows have the same numbers"
    sizes = whole_value.shape[relation.dim], pieces[0].shape[relation.dim]
    return None if sizes[0] == sizes[1] * len(pieces) else f"it has {sizes} rows"


def one_key(rng: np.random.Generator) -> Relation:
    """Return the relation of a key that each piece has for itself, or that all pieces share."""
    drawn = bool(rng.random() < 0.8)
    return Same(drawn=drawn, keys=frozenset([(("key", 0),)]) if drawn else frozenset())


def shared_key(rng: np.random.Generator) -> RuleCase:
    """Return a case of one key, which each piece has for itself or all pieces share."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    kind = int(rng.integers(8))

    def function(rows: int) -> Callable[[jax.Array], jax.Array]:
        return [
            lambda key: bits(key, (rows, FEATURES)),
            lambda key: bits(key),
            lambda key: bits(key, (FEATURES, rows)),
            lambda key: bits(jnp.broadcast_to(key, (rows, 2))),
            lambda key: bits(
                jax.random.key_data(jax.random.split(jax.random.wrap_key_data(key), rows))
            ),
            lambda key: jnp.broadcast_to(bits(key), (rows, FEATURES)),
            lambda key: bits(key, (rows - 1, FEATURES)),
            lambda key: bits(key, (rows, rows)),
        ][kind]

    key = Operand(one_key(rng), ((2,), (2,)), BITS)
    functions = function(rows * num_pieces), function(rows)
    check = fresh_violation if is_drawn(key.relation) else None
    return RuleCase([key], functions, num_pieces, violation=check)


def keys_of_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of a key for each row."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    relation = [Split(0), Split(0), Split(0, drawn=True), Split(0, ratio=Fraction(2))][
        rng.integers(4)
    ]
    keys = Operand(relation, ((rows * num_pieces, 2), (rows, 2)), BITS)

    def second(keys: jax.Array) -> jax.Array:
        wrapped = jax.random.wrap_key_data(keys)
        return jax.random.key_data(jax.vmap(lambda key: jax.random.split(key)[1])(wrapped))

    function = [
        bits,
        second,
        lambda keys: bits(keys, ()),
        lambda keys: bits(keys, keys.shape[:1]),
    ][rng.integers(4)]
    return RuleCase([keys], (function, function), num_pieces)


def cloned(rng: np.random.Generator) -> RuleCase:
    """Return a case of clones of the keys of rows."""
    case = keys_of_rows(rng)

    def of_clones(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
        def run(keys: jax.Array) -> Any:
            return function(jax.random.key_data(jax.random.clone(jax.random.wrap_key_data(keys))))

        return run

    whole, piece = map(of_clones, case.functions)
    return dataclasses.replace(case, functions=(whole, piece))


def folded(rng: np.random.Generator) -> RuleCase:
    """Return a case of a number that is folded into a key."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    sizes = rows * num_pieces, rows
    numbers = [
        Known(np.arange(sizes[0]), np.arange(sizes[1])),
        Known(np.zeros(1, int), np.zeros(1, int)),
        Known(np.arange(sizes[0]) // 2, np.arange(sizes[1]) // 2),
        Known(np.arange(sizes[0]) % rows, np.arange(sizes[1])),
        Split(0),
        Same(),
    ][rng.integers(6)]
    key = Operand(one_key(rng), ((2,), (2,)), BITS)
    number = Operand(numbers, ((sizes[0],), (sizes[1],)), np.int32)

    def function(key: jax.Array, number: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.wrap_key_data(key), number)
        return jax.random.key_data(keys)

    check = fresh_violation if isinstance(numbers, Known) and is_drawn(key.relation) else None
    return RuleCase([key, number], (function, function), num_pieces, violation=check)


def folded_and_drawn(rng: np.random.Generator) -> RuleCase:
    """Return a case of a draw for rows from a key with a number in it, which all pieces share or not."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    drawn = bool(rng.random() < 0.5)

    def function(rows: int) -> Callable[[jax.Array], jax.Array]:
        return lambda key: jax.random.bits(
            jax.random.fold_in(jax.random.wrap_key_data(key), 1), (rows, FEATURES)
        )

    keys = frozenset([(("key", 0),)]) if drawn else frozenset()
    key = Operand(Same(drawn=drawn, keys=keys), ((2,), (2,)), BITS)
    check = fresh_violation if drawn else None
    functions = function(rows * num_pieces), function(rows)
    return RuleCase([key], functions, num_pieces, violation=check)


def seeded(rng: np.random.Generator) -> RuleCase:
    """Return a case of seeds."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    relation = [
        Split(0),
        Split(0, ratio=Fraction(2)),
        Split(0, drawn=True),
        Total(Fraction(1)),
        Extreme("max"),
    ][rng.integers(5)]
    seeds = Operand(relation, ((rows * num_pieces,), (rows,)), np.int32)

    def function(seeds: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.vmap(jax.random.key)(seeds))

    return RuleCase([seeds], (function, function), num_pieces)


MADE: list[Callable[[jax.Array], jax.Array]] = [
    lambda key: key,
    lambda key: jax.random.split(key)[0],
    lambda key: jax.random.split(key)[1],
    lambda key: jax.random.split(key, 3)[1],
    lambda key: jax.random.split(key, (2, 2))[0, 1],
    lambda key: jax.random.fold_in(key, 0),
    lambda key: jax.random.fold_in(key, 1),
    lambda key: jax.random.fold_in(key, jax.random.bits(jax.random.key(3)) % 2),
    lambda key: jax.random.wrap_key_data(
        jax.random.key_data(key).astype(np.int32).astype(np.uint32)  # hidden in other numbers
    ),
]
"""Ways to make a key of another one."""


def _makers(rng: np.random.Generator) -> Callable[[jax.Array], jax.Array]:
    """Return a way to make a key in up to two steps."""
    first, second = (MADE[i] for i in rng.integers(0, len(MADE), 2))
    return (lambda key: second(first(key))) if rng.random() < 0.7 else first


def shared_numbers(
    relations: Sequence[Relation], whole_results: Sequence[Any], pieces: Sequence[Any]
) -> str | None:
    """Return why two draws share numbers, if one draw is for rows: (draws, draws, keys, keys)."""
    if any(isinstance(relation, Unrelated) for relation in relations[:2]):
        return None
    if not any(isinstance(relation, Split) for relation in relations[:2]):
        return None
    for draws, other_draws, keys, other_keys in (whole_results, *pieces):
        keys = keys.reshape(-1, 2)
        other_keys = other_keys.reshape(-1, 2)
        if len(np.unique(keys, axis=0)) < len(keys):
            return "turns share a key"
        is_one_draw = len(keys) == 1 and draws.shape == other_draws.shape
        if not is_one_draw and (keys[:, None] == other_keys[None]).all(-1).any():
            return "two draws share a key"
    return None


def two_draws(rng: np.random.Generator) -> RuleCase:
    """Return a case of two draws, with keys that are made of one."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    makers = (_makers(rng), _makers(rng))
    shapes = rng.integers(0, 5, 2)
    all_rows = rows * num_pieces

    def function(rows: int) -> Callable[[jax.Array], Any]:
        def run(key_bits: jax.Array) -> Any:
            keys = [maker(jax.random.wrap_key_data(key_bits)) for maker in makers]
            choices = [(rows, FEATURES), (rows,), (FEATURES,), (all_rows,), (all_rows, FEATURES)]
            sizes = [choices[i] for i in shapes]
            draws = [jax.random.bits(key, size) for key, size in zip(keys, sizes, strict=True)]
            return *draws, *map(jax.random.key_data, keys)

        return run

    return _of_keys(function, rows, num_pieces)


def draws_in_turns(rng: np.random.Generator) -> RuleCase:
    """Return a case of draws in turns, whose keys a carry passes on, and of a draw outside."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    used = _makers(rng)
    passed_on = _makers(rng)
    outside = _makers(rng)
    counts = bool(rng.random() < 0.3)
    draws_after = bool(rng.random() < 0.5)

    def function(rows: int) -> Callable[[jax.Array], Any]:
        def turn(key: jax.Array, i: jax.Array) -> Any:
            own_key = jax.random.fold_in(key, i) if counts else used(key)
            draws = jax.random.bits(own_key, (rows, FEATURES))
            return passed_on(key), (draws, jax.random.key_data(own_key))

        def run(key_bits: jax.Array) -> Any:
            key = jax.random.wrap_key_data(key_bits)
            last, (draws, keys) = jax.lax.scan(turn, key, jnp.arange(3))
            other = outside(last if draws_after else key)
            return draws, jax.random.bits(other, (rows,)), keys, jax.random.key_data(other)

        return run

    return _of_keys(function, rows, num_pieces)


def keys_of_rows_in_turns(rng: np.random.Generator) -> RuleCase:
    """Return a case of two draws for rows in turns, by keys that are made of keys of rows. A carry passes
    on a key.
    """
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    first, second, passed_on, used = (_makers(rng) for _ in range(4))
    if rng.random() < 0.4:  # the next turn has the key of the first row
        first, second, passed_on, used = MADE[0], MADE[1], MADE[1], MADE[0]

    def function(rows: int) -> Callable[[jax.Array], Any]:
        def turn(key: jax.Array, _: Any) -> Any:
            keys = jax.random.split(used(key), rows)
            both = jax.vmap(first)(keys), jax.vmap(second)(keys)
            draws = [jax.vmap(jax.random.bits)(keys) for keys in both]
            return passed_on(key), (*draws, *map(jax.random.key_data, both))

        def run(key_bits: jax.Array) -> Any:
            return jax.lax.scan(turn, jax.random.wrap_key_data(key_bits), length=3)[1]

        return run

    def some_equal(relations: Sequence[Relation], whole_results: Any, pieces: Any) -> str | None:
        if any(isinstance(relation, Unrelated) for relation in relations):
            return None
        for results in (whole_results, *pieces):
            lists = np.concatenate(results[2:])  # [draws and turns, rows, 2]
            for keys, others in itertools.product(lists, lists):
                equal = (keys[:, None] == others[None]).all(-1)
                if equal.any() and not np.array_equal(equal, np.eye(len(equal))):
                    return "a key of a row is one of other rows, or of some rows only"
        return None

    case = _of_keys(function, rows, num_pieces)
    return dataclasses.replace(case, joint_violation=some_equal)


def bits_of_keys(rng: np.random.Generator) -> RuleCase:
    """Return a case of bits of keys of rows. One of them may have the bits of another key."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(2, 4))
    maker = _makers(rng)

    def function(rows: int) -> Callable[[jax.Array], jax.Array]:
        def run(key_bits: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(key_bits)
            other = jax.random.key_data(maker(key))
            return jax.random.key_data(jax.random.split(key, rows)) ^ other

        return run

    def shows_bits(relations: Sequence[Relation], whole_results: Any, pieces: Any) -> str | None:
        if isinstance(relations[0], Unrelated):
            return None
        equal = any((results[0] == 0).all(-1).any() for results in (whole_results, *pieces))
        return "the bits of a row's key are those of another key" if equal else None

    case = _of_keys(function, rows, num_pieces)
    return dataclasses.replace(case, joint_violation=shows_bits)


def _of_keys(
    function: Callable[[int], Callable[[jax.Array], Any]], rows: int, num_pieces: int
) -> RuleCase:
    key = Operand(Same(drawn=True, keys=frozenset([(("key", 0),)])), ((2,), (2,)), BITS)
    return RuleCase(
        [key],
        (function(rows * num_pieces), function(rows)),
        num_pieces,
        violation=lambda *_: None,
        joint_violation=shared_numbers,
    )


CASES = {
    "random_bits": [shared_key, keys_of_rows, two_draws, draws_in_turns],
    "random_split": [keys_of_rows_in_turns, bits_of_keys, shared_key, two_draws],
    "random_wrap": [keys_of_rows],
    "random_clone": [cloned],
    "random_unwrap": [folded],
    "random_fold_in": [folded_and_drawn, folded],
    "random_seed": [seeded],
}
