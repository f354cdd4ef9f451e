"""Cases of `scan`, `while` and `cond`."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardopt.separability._relations import (
    Known,
    Relation,
    Same,
    Shapes,
    Split,
    Total,
    Unrelated,
)
from support.relation_meaning import (
    AXIS,
    Operand,
    RuleCase,
    draw_operands,
    draw_relation,
    draw_shapes,
    indices_below,
)

TURNS: list[Callable[..., tuple[Any, Any]]] = [
    lambda k, c, x: (c + x, c),
    lambda k, c, x: (c + x, x),
    lambda k, c, x: (c - x * k, x * k),
    lambda k, c, x: (x - c, c),
    lambda k, c, x: (c * x, x),
    lambda k, c, x: (c + k, x + k),
    lambda k, c, x: (c, jnp.sin(x) * k),
    lambda k, c, x: (x, c),
    lambda k, c, x: (c + jnp.tanh(x), jnp.tanh(c)),
    lambda k, c, x: (jnp.maximum(c, x), x),
    lambda k, c, x: (c + jnp.tanh(x + c), x),
    lambda k, c, x: (c + c, x),
    lambda k, c, x: (c + x + 1.0, k),
    lambda k, c, x: (k, c * k),
    lambda k, c, x: (x, c + x),
    lambda k, c, x: (x * k, c + x),
    lambda k, c, x: (k - c, x),
]
"""What a turn makes of a constant, the carry and the scanned value: (carry, result)."""
ADDING: list[Callable[..., tuple[Any, Any]]] = [
    lambda k, c, x: (c + x, x),
    lambda k, c, x: (c - x * k, jnp.sin(x)),
    lambda k, c, x: (jnp.sin(x) + c, k),
    lambda k, c, x: (x - c, x),
    lambda k, c, x: (c.astype(jnp.int8).astype(c.dtype) + x, x),
    lambda k, c, x: (jnp.reshape(c, c.shape) + x, x),
    lambda k, c, x: (c.at[..., :1].add(x[..., :1]) if c.ndim else c + x, x),
]
"""Turns that add to the carry, in part something else than a term of their row."""


def scan(rng: np.random.Generator) -> RuleCase:
    """Return a case of a scan that has as many turns in the whole as in a piece."""
    num_pieces = int(rng.choice([2, 3]))
    turn = TURNS[rng.integers(len(TURNS))]
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)))
    length = int(rng.integers(1, 4))
    const, start, scanned = draw_operands(rng, shapes, np.float64, num_pieces, 3)
    whole_shape, piece = ((length, *shape) for shape in shapes)
    relation = scanned.relation
    if isinstance(relation, Split):
        relation = relation.moved_to(relation.dim + 1)
    elif not isinstance(relation, Same | Total):
        relation = draw_relation(rng, (whole_shape, piece), np.float64, num_pieces)
    return _scan(
        rng, turn, [const, _start(rng, start), Operand(relation, (whole_shape, piece))], num_pieces
    )


def scan_over_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of a scan that has about n times as many turns in the whole."""
    num_pieces = int(rng.choice([2, 3]))
    turns = ADDING if rng.random() < 0.6 else TURNS
    turn = turns[rng.integers(len(turns))]
    shape = tuple(int(rng.integers(1, 4)) for _ in range(rng.integers(0, 2)))
    # equal entries may be as many as rows
    whole_shape = tuple(size * num_pieces for size in shape) if rng.random() < 0.2 else shape
    of_turn: Shapes = whole_shape, shape
    _, start, _ = draw_operands(rng, of_turn, np.float64, num_pieces, 3, (Same,))
    const = Operand(Same(drawn=bool(rng.random() < 0.2)), of_turn)
    length = int(rng.integers(1, 4))
    whole_length = length * num_pieces + int(rng.choice([0, 0, 0, 1, -1, 2]))
    shapes = (whole_length, *whole_shape), (length, *shape)
    relation = Split(0) if rng.random() < 0.5 else Same(drawn=bool(rng.random() < 0.3))
    if rng.random() < 0.3:
        relation = draw_relation(rng, shapes, np.float64, num_pieces, (Split, Total))
    if whole_length != length * num_pieces:
        relation = Same()
    divisors = (whole_length, length) if rng.random() < 0.15 else (1, 1)
    operands = [const, _start(rng, start), Operand(relation, shapes)]
    return _scan(rng, turn, operands, num_pieces, divisors)


def _start(rng: np.random.Generator, start: Operand) -> Operand:
    zero = np.zeros([1] * len(start.shapes[0]))
    return Operand(Known(zero, zero), start.shapes) if rng.random() < 0.5 else start


def _scan(
    rng: np.random.Generator,
    turn: Callable[..., Any],
    operands: list[Operand],
    num_pieces: int,
    divisors: tuple[int, int] = (1, 1),
) -> RuleCase:
    """Return a case of a scan whose turns divide the scanned value, in the whole and in a piece."""
    reverse = bool(rng.random() < 0.3)
    called = [lambda f: f, jax.jit, jax.checkpoint][rng.integers(3)]
    turn = called(turn)

    def function(divisor: int) -> Callable[..., Any]:
        def run(const: jax.Array, start: jax.Array, scanned: jax.Array) -> Any:
            return lax.scan(
                lambda c, x: turn(const, c, x / divisor), start, scanned, reverse=reverse
            )

        return run

    return RuleCase(operands, (function(divisors[0]), function(divisors[1])), num_pieces)


def counted_turns(rng: np.random.Generator) -> RuleCase:
    """Return a case of a loop whose number of turns is another function of the rows."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    turns = [
        lambda rows: rows,
        lambda rows: rows - 1,
        lambda rows: rows + 1,
        lambda rows: 2 * rows,
        lambda rows: rows * rows,
        lambda rows: (rows + 1) // 2,
        lambda rows: 3,
    ][rng.integers(7)]
    added = [lambda i, k: k, lambda i, k: k * k, lambda i, k: k * i, lambda i, k: 1.0][
        rng.integers(4)
    ]

    def function(rows: int) -> Callable[..., Any]:
        return lambda k: lax.fori_loop(0, turns(rows), lambda i, c: c + added(i, k), jnp.zeros(()))

    functions = function(rows * num_pieces), function(rows)
    return RuleCase([Operand(Same(), ((), ()))], functions, num_pieces)


def while_loop(rng: np.random.Generator) -> RuleCase:
    """Return a case of a loop that runs as often as an operand says, or until a value is large."""
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)))
    step, start = draw_operands(rng, shapes, np.float64, num_pieces, 2)
    bound = Operand(
        draw_relation(rng, ((), ()), np.int64, num_pieces, (Same, Known, Total)),
        ((), ()),
        np.int64,
        indices_below(4),
    )
    turn = TURNS[rng.integers(len(TURNS))]
    by_value = rng.random() < 0.3

    def run(bound: jax.Array, step: jax.Array, start: jax.Array) -> Any:
        def goes_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            count, carry = state
            return (count < bound % 5) & ((jnp.sum(carry) < 1e3) | (not by_value))

        return lax.while_loop(
            goes_on, lambda state: (state[0] + 1, turn(step, state[1], step)[0]), (0, start)
        )

    return RuleCase([bound, step, start], (run, run), num_pieces)


def while_loop_of_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of a vmapped loop: each row has its own number of turns."""
    num_pieces = int(rng.choice([2, 3]))
    turn = TURNS[rng.integers(len(TURNS))]
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 3)))
    step, start = draw_operands(rng, shapes, np.float64, num_pieces, 2)
    of_rows: Shapes = (shapes[0][:1], shapes[1][:1])
    relation = draw_relation(rng, of_rows, np.int64, num_pieces, (Same, Split, Split, Known, Total))
    if rng.random() < 0.5 and isinstance(start.relation, Split) and start.relation.dim == 0:
        relation = Split(0, start.relation.blocks)
    bound = Operand(relation, of_rows, np.int64, indices_below(4))

    def of_row(bound: jax.Array, step: jax.Array, start: jax.Array) -> Any:
        return lax.while_loop(
            lambda state: state[0] < bound % 5,
            lambda state: (state[0] + 1, turn(step, state[1], step)[0]),
            (0, start),
        )

    run = jax.vmap(of_row)
    return RuleCase([bound, step, start], (run, run), num_pieces)


def cond(rng: np.random.Generator) -> RuleCase:
    """Return a case of two or three branches of two operands."""
    num_pieces = int(rng.choice([2, 3]))
    shapes: Shapes = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)))
    operands = draw_operands(rng, shapes, np.float64, num_pieces, 2)
    if rng.random() < 0.3:  # rows in one branch, and what all share in another
        operands[1] = Operand(Same(), shapes)
    branches = [
        [
            lambda x, y: (x + y, x),
            lambda x, y: (x - y, x),
            lambda x, y: (y, x),
            lambda x, y: (x * 2.0, jnp.sin(x)),
            lambda x, y: (x * 0.0, x * 1.0),
            lambda x, y: (jnp.zeros_like(x), x),
        ][i]
        for i in rng.integers(0, 6, int(rng.integers(2, 4)))
    ]
    kinds = (Same, Same, Known, Total)
    index_relation = draw_relation(rng, ((), ()), np.int32, num_pieces, kinds)
    if rng.random() < 0.2:
        index_relation = Same(drawn=True)
    index = Operand(index_relation, ((), ()), np.int32, indices_below(3))

    def run(index: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return lax.switch(index, branches, x, y)

    return RuleCase([index, *operands], (run, run), num_pieces)


def cond_that_devices_do_not_share(rng: np.random.Generator) -> RuleCase:
    """Return a case of a collective in a branch. A branch that is drawn is another on each device,
    so the collective would wait for ever.
    """
    num_pieces = int(rng.choice([2, 3]))
    drawn = bool(rng.random() < 0.5)
    index = Operand(Same(drawn=drawn), ((), ()), np.int32, indices_below(2))

    def run(index: jax.Array, x: jax.Array) -> Any:
        return lax.switch(index, [lambda x: lax.psum(x, AXIS), lambda x: lax.psum(x, AXIS) * 2], x)

    def waits(relations: Sequence[Relation], *_: Any) -> str | None:
        known = any(not isinstance(relation, Unrelated) for relation in relations)
        return "a collective in a drawn branch" if drawn and known else None

    return RuleCase(
        [index, Operand(Total(Fraction(1)), ((), ()))],
        (run, run),
        num_pieces,
        {"row_axes": (AXIS,)},
        axis=True,
        joint_violation=waits,
    )


CASES = {
    "scan": [scan, scan_over_rows, counted_turns],
    "while": [while_loop, while_loop_of_rows],
    "cond": [cond, cond_that_devices_do_not_share],
}
