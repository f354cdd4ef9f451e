"""Cases of functions that an equation calls: with and without a derivative rule, and collectives."""

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from shardopt.separability._relations import Extreme, Same, Shapes, Split, Total
from shardopt.trace._marks import ATTENTION, POSITIONS, ROW_MAXIMUM, marked
from support.relation_meaning import (
    AXIS,
    KINDS,
    OTHER_AXIS,
    Operand,
    RuleCase,
    draw_operands,
    draw_relation,
    draw_shapes,
)

Function = Callable[..., Any]
PLAIN: list[Function] = [
    lambda x, y: x * y,
    lambda x, y: x + y,
    lambda x, y: jnp.sin(x) * y,
    lambda x, y: x.sum(0),
    lambda x, y: (x * y).sum(-1),
    lambda x, y: x - x.sum(0) / x.shape[0],
    lambda x, y: x.sum() * 2.0,
    lambda x, y: lax.approx_max_k(x, 1)[0],  # no rule knows it
]


def rows_or_shared(rng: np.random.Generator, num_pieces: int) -> list[Operand]:
    """Return two operands of one shape [rows, features]: rows, a value of all, or a total."""
    features = int(rng.integers(1, 3))
    rows = int(rng.integers(1, 4))
    relations = [
        [
            Split(0),
            Split(0),
            Same(),
            Total(Fraction(1)),
            Split(0, ratio=Fraction(2)),
            Same(Fraction(2)),
            Same(drawn=True),
            Total(Fraction(1, num_pieces)),
            Total(Fraction(num_pieces)),
        ][i]
        for i in rng.integers(0, 9, 2)
    ]
    shapes: Shapes = (rows, features), (rows, features)
    if any(isinstance(relation, Split) for relation in relations):
        shapes = (rows * num_pieces, features), (rows, features)
        relations = [x if isinstance(x, Split) else Split(0) for x in relations]
    return [Operand(relation, shapes) for relation in relations]


def called(transform: Callable[[Function], Function], rng: np.random.Generator) -> RuleCase:
    """Return a case of a call of one of the plain functions."""
    num_pieces = int(rng.choice([2, 3]))
    function = transform(PLAIN[rng.integers(len(PLAIN))])
    shapes = draw_shapes(rng, num_pieces, 2)
    operands = draw_operands(rng, shapes, np.float64, num_pieces, 2)
    return RuleCase(operands, (function, function), num_pieces)


BACKWARD: list[Callable[..., tuple[Any, Any]]] = [
    lambda x, y, ct: (ct * y, ct * x),
    lambda x, y, ct: (ct * y, ct * x),
    lambda x, y, ct: (ct * 2.0, ct * jnp.tanh(x)),
    lambda x, y, ct: (jnp.zeros_like(x), ct),
    lambda x, y, ct: (ct - ct.mean(0), ct),
    lambda x, y, ct: (jnp.sign(ct), ct),
    lambda x, y, ct: (ct, jnp.clip(ct, -0.1, 0.1)),
    lambda x, y, ct: (ct / ct.shape[0], ct),
    lambda x, y, ct: (ct + 1.0, ct),
    lambda x, y, ct: (ct[::-1], ct),
    lambda x, y, ct: (ct * x.sum(0), ct),
    lambda x, y, ct: (ct * jnp.abs(ct), ct),
    lambda x, y, ct: (jnp.where(ct > 0, ct, 0.1 * ct), ct),
    lambda x, y, ct: (jnp.abs(ct), ct),
    lambda x, y, ct: (jnp.broadcast_to(ct.max(-1, keepdims=True), ct.shape), ct),
]
"""What a backward rule of x * y makes of the cotangent: in part not its derivative."""


def custom_vjp(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product with one of the backward rules."""
    rule = BACKWARD[rng.integers(len(BACKWARD))]
    num_pieces = int(rng.choice([2, 3]))
    product = jax.custom_vjp(lambda x, y: x * y)
    product.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, ct: rule(*saved, ct))
    return _trained(rows_or_shared(rng, num_pieces), product, num_pieces)


def reordered_cotangents(rng: np.random.Generator) -> RuleCase:
    """Return a case of rows in two blocks, whose backward rule may put rows in another order."""
    num_pieces = int(rng.choice([2, 3]))
    rows = 2 * int(rng.integers(1, 3))
    blocks = [
        lambda ct: ct,
        lambda ct: ct.reshape(2, -1).T.reshape(-1),
        lambda ct: ct.reshape(-1, 2).T.reshape(-1),
    ][rng.integers(3)]
    scaled = jax.custom_vjp(lambda x: 2.0 * x)
    scaled.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * blocks(ct),))
    operand = Operand(Split(0, int(rng.integers(1, 3))), ((rows * num_pieces,), (rows,)))
    return _trained([operand], scaled, num_pieces)


def drawn_by_a_rule(rng: np.random.Generator) -> RuleCase:
    """Return a case of two results, into which the forward rule may put a number that is drawn."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    draws = rng.random(2) < 0.5
    copies = jax.custom_vjp(lambda x, u: (x, 2.0 * x))
    copies.defvjp(
        lambda x, u: ((x + u if draws[0] else x, 2.0 * x + u if draws[1] else 2.0 * x), u),
        lambda u, cts: (cts[0] + 2.0 * cts[1], jnp.zeros_like(u)),
    )
    operands = [
        Operand(Split(0), ((rows * num_pieces,), (rows,))),
        Operand(Same(drawn=True), ((), ())),
    ]
    return _trained(operands, copies, num_pieces)


def equal_entries_for_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of a rule for numbers that are repeated as often as there are rows."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    factor = [lambda count: 1.0, lambda count: count, lambda count: 1.0 / count][rng.integers(3)]
    added = jax.custom_vjp(lambda x: x.sum(1))
    added.defvjp(
        lambda x: (x.sum(1), x),
        lambda x, ct: (jnp.broadcast_to(ct[:, None] * factor(x.shape[1]), x.shape),),
    )

    def run(x: jax.Array) -> jax.Array:
        return added(jnp.broadcast_to(x[:, None], (x.shape[0], x.shape[0])))

    ratio = [Fraction(1), Fraction(1, num_pieces)][rng.integers(2)]
    operand = Operand(Split(0, ratio=ratio), ((rows * num_pieces,), (rows,)))
    return _trained([operand], run, num_pieces)


def mean_of_equal_entries(rng: np.random.Generator) -> RuleCase:
    """Return a case of a rule for the mean of one number that stands for each row."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    factor = [lambda count: 1.0, lambda count: count, lambda count: 1.0 / count][rng.integers(3)]
    mean = jax.custom_vjp(lambda x: x.mean())
    mean.defvjp(
        lambda x: (x.mean(), x), lambda x, ct: (jnp.broadcast_to(ct * factor(len(x)), x.shape),)
    )
    operands = [
        Operand(Same(), ((), ())),
        Operand(Split(0), ((rows * num_pieces,), (rows,))),
    ]
    return _trained(operands, lambda p, x: mean(jnp.broadcast_to(p, x.shape)), num_pieces)


OF_WEIGHTS: list[Callable[..., tuple[Any, Any]]] = [
    lambda w, x, ct: ((ct * x).sum(0), ct * w),
    lambda w, x, ct: ((ct * x).sum(0), ct * w),
    lambda w, x, ct: (ct.sum(0), ct),
    lambda w, x, ct: ((ct * x).mean(0), ct * w),
    lambda w, x, ct: (ct.sum(0) * x.sum(0), ct * w),
    lambda w, x, ct: ((ct * x).sum(0) * x.shape[0], ct * w),
    lambda w, x, ct: (ct.sum(0) + w, ct * w),
    lambda w, x, ct: (jnp.tanh(ct.sum(0)), ct * w),
    lambda w, x, ct: (ct.max(0), ct * w),
    lambda w, x, ct: ((ct * x).sum(0), ct * w + ct.mean(0)),
    lambda w, x, ct: (jnp.zeros_like(w), jnp.zeros_like(x)),
]
"""What a backward rule makes of the cotangent of weights times rows: in part not its derivative."""
FORWARD: list[Callable[..., Any]] = [
    lambda w, x: w * x,
    lambda w, x: w * x,
    lambda w, x: w * x,
    lambda w, x: jnp.full(x.shape, 2.0),
    lambda w, x: w * x + x.mean(0),
    lambda w, x: w * x * x.shape[0],
]
"""Weights times rows, and other numbers: the first four for the function, all for its rule."""


def weights_and_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of weights times rows, with one of the backward rules."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 4))
    features = 2
    rule = OF_WEIGHTS[rng.integers(len(OF_WEIGHTS))]
    forward = FORWARD[rng.integers(len(FORWARD))]
    product = jax.custom_vjp(FORWARD[rng.integers(4)])
    product.defvjp(lambda w, x: (forward(w, x), (w, x)), lambda saved, ct: rule(*saved, ct))
    shared = [Same(), Same(), Same(Fraction(1, num_pieces)), Total(Fraction(1))][rng.integers(4)]
    ratio = [Fraction(1), Fraction(1), Fraction(1, num_pieces)][rng.integers(3)]
    sizes: Shapes = (rows * num_pieces, features), (rows, features)
    operands = [
        Operand(shared, ((features,), (features,))),
        Operand(Split(0, ratio=ratio), sizes),
    ]
    return _trained(operands, product, num_pieces)


def custom_vjp_with_symbolic_zeros(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product whose rule depends on the differentiated operands."""
    num_pieces = int(rng.choice([2, 3]))
    rules = [BACKWARD[i] for i in rng.integers(0, len(BACKWARD), 2)]
    rules = [BACKWARD[0], rules[1]] if rng.random() < 0.5 else rules
    product = jax.custom_vjp(lambda x, y: (x * y, x + y))

    def forward(x: Any, y: Any) -> Any:
        values = x.value, y.value
        return (x.value * y.value, x.value + y.value), (*values, x.perturbed and y.perturbed)

    def backward(saved: Any, cotangents: Any) -> Any:
        x, y, both = saved
        by_product, by_sum = (
            jnp.zeros_like(x) if isinstance(ct, SymbolicZero) else ct for ct in cotangents
        )
        of_x, of_y = rules[0 if both else 1](x, y, by_product)
        return of_x + by_sum, of_y + by_sum

    product.defvjp(forward, backward, symbolic_zeros=True)
    return _trained(rows_or_shared(rng, num_pieces), product, num_pieces)


TANGENTS: list[Callable[..., Any]] = [
    lambda x, y, dx, dy: dx * y + x * dy,
    lambda x, y, dx, dy: dx * y + x * dy,
    lambda x, y, dx, dy: dx * 3.0 + jnp.cos(x) * dy,
    lambda x, y, dx, dy: dx,
    lambda x, y, dx, dy: jnp.zeros_like(dx),
    lambda x, y, dx, dy: dx - dx.mean(0),
    lambda x, y, dx, dy: dx / x.shape[0],
    lambda x, y, dx, dy: dx[::-1] * y,
    lambda x, y, dx, dy: dx * jnp.tanh(x).mean(0),
]


def custom_jvp(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product with one of the rules of tangents."""
    num_pieces = int(rng.choice([2, 3]))
    rules = [TANGENTS[i] for i in rng.integers(0, len(TANGENTS), 2)]
    symbolic = bool(rng.random() < 0.5)
    product = jax.custom_jvp(lambda x, y: x * y)

    def tangents(primals: Any, dots: Any) -> Any:
        some_zero = any(isinstance(dot, SymbolicZero) for dot in dots)
        filled = [
            jnp.zeros_like(x) if isinstance(dot, SymbolicZero) else dot
            for x, dot in zip(primals, dots, strict=True)
        ]
        return primals[0] * primals[1], rules[some_zero](*primals, *filled)

    product.defjvp(tangents, symbolic_zeros=symbolic)
    return _trained(rows_or_shared(rng, num_pieces), product, num_pieces)


def _trained(operands: list[Operand], function: Function, num_pieces: int) -> RuleCase:
    return RuleCase(operands, (function, function), num_pieces, {"training": True})


def linear_solve(rng: np.random.Generator) -> RuleCase:
    """Return a case of a solver, which may mix the right sides."""
    num_pieces = int(rng.choice([2, 3]))
    size = 2
    rows = int(rng.integers(1, 3))
    relation = [Split(0), Same(), Total(Fraction(1)), Split(0, ratio=Fraction(2))][rng.integers(4)]
    times = num_pieces if isinstance(relation, Split) else 1
    right = Operand(relation, ((rows * times, size), (rows, size)))
    matrix = Operand(
        [Same(), Same(), Same(Fraction(2))][rng.integers(3)], ((size, size), (size, size))
    )
    solve = [
        lambda a, b: b @ jnp.linalg.inv(a),
        lambda a, b: b @ a,
        lambda a, b: b - b.mean(0),
        lambda a, b: jnp.tanh(b),
    ][rng.integers(4)]

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        def solver(_: Any, b: jax.Array) -> jax.Array:
            return solve(a, b)

        return lax.custom_linear_solve(lambda x: x @ a, b, solver, transpose_solve=solver)

    return RuleCase([matrix, right], (function, function), num_pieces)


def scaled_solution(rng: np.random.Generator) -> RuleCase:
    """Return a case of a division by a number, whose transposed solver may not divide."""
    num_pieces = int(rng.choice([2, 3]))
    divisor = Operand([Same(), Same(Fraction(2)), Same(Fraction(2))][rng.integers(3)], ((), ()))
    right = Operand([Same(), Total(Fraction(1)), Total(Fraction(2))][rng.integers(3)], ((2,), (2,)))
    divides = bool(rng.random() < 0.5)

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(
            lambda x: x * a,
            b,
            lambda _, b: b / a,
            transpose_solve=lambda _, ct: ct / a if divides else ct * 0.5,
        )

    return _trained([divisor, right], function, num_pieces)


def solved_rows(rng: np.random.Generator) -> RuleCase:
    """Return a case of a system for each row, whose solver and transposed solver may mix rows."""
    num_pieces = int(rng.choice([2, 3]))
    rows = int(rng.integers(1, 3))
    size = 2
    sizes: Shapes = (rows * num_pieces, size), (rows, size)
    squares: Shapes = (*sizes[0], size), (*sizes[1], size)
    matrices = Operand([Split(0), Split(0), Same()][rng.integers(3)], squares)
    right = Operand(
        [Split(0), Same(), Split(0, ratio=Fraction(2)), Total(Fraction(1))][rng.integers(4)], sizes
    )
    solvers: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
        lambda a, b: jnp.einsum("rij,rj->ri", jnp.linalg.inv(a), b),
        lambda a, b: jnp.einsum("rij,rj->ri", a, b),
        lambda a, b: b - b.mean(0),
        lambda a, b: b / b.shape[0],
        lambda a, b: b[::-1],
    ]
    solve, solve_transposed = (solvers[i] for i in rng.choice([0, 0, 0, 1, 2, 3, 4], 2))
    has_transpose = bool(rng.random() < 0.8)

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        a = jnp.tanh(a) + 3 * jnp.eye(size)
        return lax.custom_linear_solve(
            lambda x: jnp.einsum("rij,rj->ri", a, x),
            b,
            lambda _, b: solve(a, b),
            transpose_solve=(
                (lambda _, b: solve_transposed(a.swapaxes(1, 2), b)) if has_transpose else None
            ),
        )

    case = _trained([matrices, right], function, num_pieces)
    return case if has_transpose else dataclasses.replace(case, settings={})


# --- functions with a mark, on pieces of sequences ------------------------------------------------


OF_POSITIONS: list[Callable[[jax.Array, int], jax.Array]] = [
    lambda x, count: x,
    lambda x, count: x,
    lambda x, count: x,
    lambda x, count: x / count,
    lambda x, count: lax.cumsum(x, 0, reverse=count % 2 == 0),
    lambda x, count: lax.abs(x) if count % 2 else lax.neg(x),
]
"""What a marked function makes of numbers, in part by the number of positions of a device: by a
literal, by a parameter, by another operation. A multiple of the numbers gives a multiple.
"""


def _marked_case(
    operands: list[Operand], function: Function, num_pieces: int, positions: bool = True
) -> RuleCase:
    settings = {"row_axes": (AXIS,), "positions": positions}
    return RuleCase(operands, (function, function), num_pieces, settings, axis=True)


def row_maximum(rng: np.random.Generator) -> RuleCase:
    """Return a case of the largest number over positions: of all, or in a scan over positions."""
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, 2, most_uneven=1)
    kinds = (Same, Split, Split, *KINDS)
    operands = [Operand(draw_relation(rng, shapes, np.float64, num_pieces, kinds), shapes)]
    of_positions = OF_POSITIONS[rng.integers(len(OF_POSITIONS))]
    largest = marked(
        ROW_MAXIMUM,
        lambda x: of_positions(lax.pmax(jnp.max(jnp.abs(x), 0), AXIS), x.shape[0]),
    )

    def in_turns(x: jax.Array) -> Any:
        def turn(total: jax.Array, row: jax.Array) -> Any:
            scale = largest(row[None])
            return total + scale, row / (1 + scale)

        return lax.scan(turn, jnp.zeros(x.shape[1:]), x)

    return _marked_case(operands, in_turns if rng.random() < 0.2 else largest, num_pieces)


def attention(rng: np.random.Generator) -> RuleCase:
    """Return a case of attention over the positions of all devices."""
    num_pieces = int(rng.choice([2, 3]))
    length = int(rng.integers(1, 4))
    sequences = 2
    # `vmap` adds a dim, which the results have in front
    by_vmap = rng.random() < 0.2
    heads = (2, 1, 3) if by_vmap else (1, 3)
    sizes: Shapes = (sequences, length * num_pieces, *heads), (sequences, length, *heads)
    relations = [Split(1) if rng.random() < 0.8 else Same() for _ in range(3)]
    ratio = Fraction(2) if rng.random() < 0.2 else Fraction(1)
    relations[0] = Split(1, ratio=ratio, drawn=bool(rng.random() < 0.2))

    of_positions = OF_POSITIONS[rng.integers(len(OF_POSITIONS))]

    def gathered(x: jax.Array) -> jax.Array:
        """Return the positions of all devices, by operations without a size among parameters."""
        shape = (lax.axis_size(AXIS), *x.shape)
        is_own = lax.broadcasted_iota(np.int32, shape, 0) == lax.axis_index(AXIS)
        of_devices = lax.psum(
            jnp.where(is_own, lax.broadcast_in_dim(x, shape, (1, 2, 3, 4)), 0), AXIS
        )
        return lax.reshape(
            of_devices.transpose(1, 0, 2, 3, 4), (x.shape[0], shape[0] * x.shape[1], *x.shape[2:])
        )

    def run(*heads: jax.Array) -> jax.Array:
        query, key, value = heads
        scores = jnp.einsum("bthd,bshd->bhts", query, gathered(key))
        weights = jax.nn.softmax(of_positions(scores, query.shape[1]))
        return jnp.einsum("bhts,bshd->bthd", weights, gathered(value))

    operands = [Operand(relation, sizes) for relation in relations]
    function = marked(ATTENTION, run)
    if by_vmap:
        function = jax.vmap(function, in_axes=2, out_axes=int(rng.choice([0, 2])))
    return _marked_case(operands, function, num_pieces)


def numbers_of_positions(rng: np.random.Generator) -> RuleCase:
    """Return a case of the numbers of a piece's positions."""
    num_pieces = int(rng.choice([2, 3]))
    length = int(rng.integers(1, 4))

    count = [lambda T: T, lambda T: T, lambda T: 2 * T, lambda T: 3, lambda T: T + 1][
        rng.integers(5)
    ]

    def run(x: jax.Array) -> jax.Array:
        positions = count(x.shape[0])
        return lax.axis_index(AXIS) * positions + jnp.arange(positions)

    operands = [Operand(Split(0), ((length * num_pieces,), (length,)))]
    return _marked_case(operands, marked(POSITIONS, run), num_pieces, bool(rng.random() < 0.8))


def collective(function: Function, rng: np.random.Generator) -> RuleCase:
    """Return a case of a collective over the axis of the pieces."""
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 3)), most_uneven=1)
    kinds = (Same, Split, Total, Extreme)
    operands = draw_operands(rng, shapes, np.float64, num_pieces, 1, kinds)
    settings = {"row_axes": (AXIS,)}
    return RuleCase(operands, (function, function), num_pieces, settings, axis=True)


def collective_over_other_axis(
    function: Function, rng: np.random.Generator, on_piece: Function | None = None
) -> RuleCase:
    """Return a case of a collective over an axis that has no pieces, at times of another one on a
    piece.
    """
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 3)), most_uneven=1)
    kinds = (Same, Split, Total, Extreme)
    operands = draw_operands(rng, shapes, np.float64, num_pieces, 1, kinds)
    settings = {"row_axes": (AXIS,), "other_axes": frozenset([OTHER_AXIS])}
    other = on_piece if on_piece and rng.random() < 0.2 else function
    return RuleCase(operands, (function, other), num_pieces, settings, other_axis=True)


def exchanged(x: jax.Array) -> jax.Array:
    """Return the value of the other device."""
    return lax.ppermute(x, OTHER_AXIS, [(0, 1), (1, 0)])


def unmoved(x: jax.Array) -> jax.Array:
    """Return the value of this device."""
    return lax.ppermute(x, OTHER_AXIS, [(0, 0), (1, 1)])


def _collectives(names: dict[str, Function]) -> dict[str, list[Any]]:
    return {name: [functools.partial(collective, function)] for name, function in names.items()}


CASES: dict[str, list[Callable[[np.random.Generator], RuleCase]]] = {
    "jit": [
        functools.partial(called, jax.jit),
        row_maximum,
        attention,
        numbers_of_positions,
    ],
    "remat2": [functools.partial(called, jax.checkpoint)],
    "custom_vjp_call": [
        custom_vjp,
        custom_vjp_with_symbolic_zeros,
        weights_and_rows,
        reordered_cotangents,
        drawn_by_a_rule,
        equal_entries_for_rows,
        mean_of_equal_entries,
    ],
    "custom_jvp_call": [custom_jvp],
    "custom_linear_solve": [linear_solve, solved_rows, scaled_solution],
    **_collectives(
        {
            "psum": lambda x: lax.psum(x, AXIS),
            "pmax": lambda x: lax.pmax(x, AXIS),
            "pmin": lambda x: lax.pmin(x, AXIS),
            "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
        }
    ),
    "ppermute": [functools.partial(collective_over_other_axis, exchanged, on_piece=unmoved)],
}
CASES["psum"].append(
    functools.partial(collective_over_other_axis, lambda x: lax.psum(x, OTHER_AXIS))
)
