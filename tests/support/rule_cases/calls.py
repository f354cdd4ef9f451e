"""Cases of functions that an equation calls: with and without a derivative rule, and collectives."""

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
from support.relation_meaning import (
    AXIS,
    OTHER_AXIS,
    Operand,
    RuleCase,
    draw_operands,
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
        ][i]
        for i in rng.integers(0, 7, 2)
    ]
    shapes: Shapes = (rows, features), (rows, features)
    if any(isinstance(relation, Split) for relation in relations):
        shapes = (rows * num_pieces, features), (rows, features)
        relations = [x if isinstance(x, Split) else Split(0) for x in relations]
    return [Operand(relation, shapes) for relation in relations]


def called(transform: Callable[[Function], Function], rng: np.random.Generator) -> RuleCase:
    """Return a case of a call of one of the plain functions."""
    num_pieces, function = int(rng.choice([2, 3])), transform(PLAIN[rng.integers(len(PLAIN))])
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
]
"""What a backward rule of x * y makes of the cotangent: in part not its derivative."""


def custom_vjp(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product with one of the backward rules."""
    rule, num_pieces = BACKWARD[rng.integers(len(BACKWARD))], int(rng.choice([2, 3]))
    product = jax.custom_vjp(lambda x, y: x * y)
    product.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, ct: rule(*saved, ct))
    return _trained(rows_or_shared(rng, num_pieces), product, num_pieces)


def custom_vjp_with_symbolic_zeros(rng: np.random.Generator) -> RuleCase:
    """Return a case of a product whose rule depends on what is differentiated."""
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
    num_pieces, size, rows = int(rng.choice([2, 3])), 2, int(rng.integers(1, 3))
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


def collective(function: Function, rng: np.random.Generator) -> RuleCase:
    """Return a case of a collective over the axis of the pieces."""
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 3)), most_uneven=1)
    kinds = (Same, Split, Total, Extreme)
    operands = draw_operands(rng, shapes, np.float64, num_pieces, 1, kinds)
    settings = {"row_axes": frozenset([AXIS])}
    return RuleCase(operands, (function, function), num_pieces, settings, axis=True)


def collective_over_other_axis(function: Function, rng: np.random.Generator) -> RuleCase:
    """Return a case of a collective over an axis that has no pieces."""
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(1, 3)), most_uneven=1)
    kinds = (Same, Split, Total, Extreme)
    operands = draw_operands(rng, shapes, np.float64, num_pieces, 1, kinds)
    settings = {"row_axes": frozenset([AXIS]), "other_axes": frozenset([OTHER_AXIS])}
    return RuleCase(operands, (function, function), num_pieces, settings, other_axis=True)


def exchanged(x: jax.Array) -> jax.Array:
    """Return the value of the other device."""
    return lax.ppermute(x, OTHER_AXIS, [(0, 1), (1, 0)])


def _collectives(names: dict[str, Function]) -> dict[str, list[Any]]:
    return {name: [functools.partial(collective, function)] for name, function in names.items()}


CASES: dict[str, list[Callable[[np.random.Generator], RuleCase]]] = {
    "jit": [functools.partial(called, jax.jit)],
    "remat2": [functools.partial(called, jax.checkpoint)],
    "custom_vjp_call": [custom_vjp, custom_vjp_with_symbolic_zeros],
    "custom_jvp_call": [custom_jvp],
    "custom_linear_solve": [linear_solve],
    **_collectives(
        {
            "psum": lambda x: lax.psum(x, AXIS),
            "pmax": lambda x: lax.pmax(x, AXIS),
            "pmin": lambda x: lax.pmin(x, AXIS),
            "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
        }
    ),
    "ppermute": [functools.partial(collective_over_other_axis, exchanged)],
}
CASES["psum"].append(
    functools.partial(collective_over_other_axis, lambda x: lax.psum(x, OTHER_AXIS))
)
