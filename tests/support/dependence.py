"""Programs for `leaves_used`, and what plain jax says about them.

A result must count as following from each argument that changes it. If only differentiable uses
count, it follows from each argument that it has a gradient of.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardopt.separability._dependence import LOOP, leaves_used
from shardopt.trace._marks import ATTENTION, marked
from support.piecewise import as_users_have_it

AXIS = "data"
ARGUMENTS = ("x", "y", "z")
SIZE = 3
POINTS = 6


class Program(NamedTuple):
    """A program of three vectors of floats.

    Attributes:
      function: `function(x, y, z)` returns an array, or several.
      has_loop: whether it has a `while` whose number of turns follows from an argument for all
        rows at once.
      is_rough: whether it may count arguments that change nothing.
      through: the kind of marked functions that uses are counted around.
      devices: whether it adds up over devices. Only loops are looked for on this side of a sum.
    """

    function: Callable[..., Any]
    has_loop: bool = False
    is_rough: bool = False
    through: str | None = None
    devices: bool = False


def _straight_through(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the sign of a value, whose gradient is 1."""
    rounded = jax.custom_vjp(lambda x: jnp.sign(x).astype(int).astype(x.dtype))
    rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))
    return lambda x, y, z: function(rounded(x), y, z)


@jax.custom_jvp
def _with_tangents(x: jax.Array) -> jax.Array:
    return lax.stop_gradient(x)


@_with_tangents.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0]


def _grown(x: jax.Array, bound: Any) -> jax.Array:
    """Return a value that is doubled until its sum is large."""
    return lax.while_loop(lambda s: jnp.sum(jnp.abs(s)) < bound, lambda s: 2 * s + 1, x)


def _scanned(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
    """Return a carry that a value reaches in the second turn only, and stacked results."""

    def turn(carry: Any, item: jax.Array) -> Any:
        first, second = carry
        return (first + item, second * first), second - item

    return lax.scan(turn, (x[0], y[0]), z)


def _shifted(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
    """Return carries that pass their values on, one place a turn."""

    def turn(carry: Any, _: Any) -> Any:
        first, second, third = carry
        return (0.5 * first, first * 2, jnp.sin(second)), third

    return lax.scan(turn, (x, y, z), None, length=4)


PROGRAMS: dict[str, Program] = {
    "arithmetic": Program(lambda x, y, z: (x + y, y * z, jnp.sin(z), 3.0 * jnp.ones(SIZE))),
    "a constant": Program(lambda x, y, z: jnp.arange(3.0) * 2),
    "an argument": Program(lambda x, y, z: (z, x)),
    "integers": Program(lambda x, y, z: (x.astype(int), y + x.astype(int), z * (x > 0))),
    "stop_gradient": Program(lambda x, y, z: lax.stop_gradient(x) * y + z),
    "stop_gradient in a call": Program(jax.jit(lambda x, y, z: jax.jit(lax.stop_gradient)(x) * y)),
    "a call": Program(lambda x, y, z: jax.jit(lambda a, b: (a * 2, b * 3))(y, z)),
    "a checkpoint": Program(lambda x, y, z: jax.checkpoint(lambda a, b: jnp.sin(a) * b)(x, z)),
    "a choice": Program(
        lambda x, y, z: lax.cond(x[0] > 0, lambda y, z: (y, z), lambda y, z: (z, z), y, z)
    ),
    "a choice of constants": Program(
        lambda x, y, z: lax.switch((x[0] > 0).astype(int), [lambda y: y, lambda y: 2 * y], y)
    ),
    "a scan": Program(_scanned, is_rough=True),
    "a scan that shifts": Program(_shifted, is_rough=True),
    "a loop until a value is large": Program(lambda x, y, z: _grown(x, 50 + y[0] ** 2), True, True),
    "a loop until another value is large": Program(
        lambda x, y, z: lax.while_loop(
            lambda s: jnp.abs(s[0]) + s[2] < 9, lambda s: (s[0] * 2, s[1] + 1, s[2] + 1), (x[0], y, 0)
        )[1],
        True,
        True,
    ),
    "a loop with a constant in its condition": Program(
        lambda x, y, z: lax.while_loop(
            lambda s: s[1] < 3 + jnp.sum(z > 0), lambda s: (s[0] * y, s[1] + 1), (x, 0)
        )[0],
        True,
        True,
    ),
    "a counted loop": Program(
        lambda x, y, z: lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * y, s[1] + 1), (x, 0))[0]
    ),
    "a vmapped loop": Program(
        lambda x, y, z: jax.vmap(lambda x: _grown(x, 9.0))(x + 1), is_rough=True
    ),
    "a straight-through sign": Program(
        _straight_through(lambda x, y, z: (x * y, z)), is_rough=True
    ),
    "tangents of its own": Program(lambda x, y, z: _with_tangents(x) + z, is_rough=True),
    "an entry": Program(lambda x, y, z: (x[1], jnp.concatenate([y, z])[:2]), is_rough=True),
    "a sum over devices": Program(
        lambda x, y, z: (lax.psum(x, AXIS) * y, lax.psum(z, AXIS)), devices=True
    ),
    "a marked function": Program(
        lambda x, y, z: marked(ATTENTION, lambda a, b: a * b)(x, y) + z, through=ATTENTION
    ),
}  # fmt: skip

Answers = dict[tuple[str, str], list[Mapping[int, Any]]]


def answers() -> Answers:
    """Return what `leaves_used` says of each program, for each kind of use."""
    uses: dict[str, dict[str, Any]] = {
        "any": {},
        "differentiated": {"differentiated": True},
        "loops": {"mark_loops": True},
    }
    said: Answers = {}
    with as_users_have_it():
        for name, program in PROGRAMS.items():
            jaxpr = jax.make_jaxpr(program.function, axis_env=[(AXIS, 1)])(
                *[np.ones(SIZE)] * len(ARGUMENTS)
            )
            leaves: list[dict[int, None]] = [{i: None} for i in range(len(ARGUMENTS))]
            for kind, options in uses.items():
                said[name, kind] = [dict(x) for x in leaves_used(jaxpr, leaves, **options)]
            if program.through:
                around = leaves_used(jaxpr, leaves, except_through=program.through)
                said[name, "around"] = [dict(x) for x in around]
    return said


def problems(said: Answers) -> Iterator[str]:
    """Yield why answers are wrong."""
    for (name, kind), results in said.items():
        program = PROGRAMS[name]
        if kind == "around":
            if [set(result) for result in results] != [{2}]:
                yield f"{name}: {results} without its marked function"
            continue
        has_loop = any(LOOP in result for result in results)
        if kind == "loops" and has_loop != program.has_loop:
            yield f"{name}: {'a' if has_loop else 'no'} loop follows from an argument"
        if program.devices and kind == "loops":
            if [set(result) for result in results] != [{1}, set()]:
                yield f"{name}: {results} on this side of a sum over devices"
            continue
        expected = _gradients(program) if kind == "differentiated" else _changes(program)
        if len(expected) != len(results):
            yield f"{name}: {len(results)} results"
        for k, (result, leaves) in enumerate(zip(results, expected, strict=False)):
            counted = set(result) - {LOOP}
            if not leaves <= counted or (not program.is_rough and leaves != counted):
                yield f"{name}, {kind} use: result {k} follows from {leaves}, not from {counted}"


def first_uses(said: Answers, name: str) -> list[dict[int, str | None]]:
    """Return the primitive that first computes with each argument, for each result of a program."""
    return [
        {leaf: None if eqn is None else eqn.primitive.name for leaf, eqn in result.items()}
        for result in said[name, "any"]
    ]


_FACTS: dict[tuple[str, int], list[set[int]]] = {}


def _points() -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.normal(size=SIZE) for _ in ARGUMENTS] for _ in range(POINTS)]


@functools.cache
def _compiled(program: Program) -> Callable[..., Any]:
    """Return one program for all points: op by op, each operation of it would be compiled."""
    return jax.jit(lambda point: jax.tree.leaves(_function(program)(*point)))


def _results(program: Program, point: Sequence[Any]) -> list[np.ndarray]:
    return jax.device_get(_compiled(program)(point))


def _function(program: Program) -> Callable[..., Any]:
    """Return a program on one device."""

    def run(*arguments: Any) -> Any:
        stacked = [jnp.asarray(x)[None] for x in arguments]
        return jax.tree.map(lambda x: x[0], jax.vmap(program.function, axis_name=AXIS)(*stacked))

    return run if program.devices else program.function


def _changes(program: Program) -> list[set[int]]:
    """Return the arguments that change each result."""
    key = "changes", id(program.function)
    if key not in _FACTS:
        with as_users_have_it():
            changed: list[set[int]] = [set() for _ in _results(program, _points()[0])]
            for point, other in zip(_points(), _points()[1:], strict=False):
                before = _results(program, point)
                for i in range(len(ARGUMENTS)):
                    mixed = [other[j] if i == j else x for j, x in enumerate(point)]
                    for k, after in enumerate(_results(program, mixed)):
                        if not np.array_equal(before[k], after):
                            changed[k].add(i)
        _FACTS[key] = changed
    return _FACTS[key]


def _gradients(program: Program) -> list[set[int]]:
    """Return the arguments that each result has a gradient of."""
    key = "gradients", id(program.function)
    if key not in _FACTS:
        with as_users_have_it():
            gradients: list[set[int]] = [set() for _ in _results(program, _points()[0])]
            for point in _points():
                for i, tangents in enumerate(_tangents(program, point)):
                    for k, tangent in enumerate(tangents):
                        if np.any(tangent):
                            gradients[k].add(i)
        _FACTS[key] = gradients
    return _FACTS[key]


def _tangents(program: Program, point: Sequence[Any]) -> list[list[np.ndarray]]:
    """Return the tangents of the results, for each argument; those of integers are zeros."""
    try:
        return jax.device_get(_compiled_tangents(program, _by_jvp)(point))
    except TypeError:  # a custom_vjp has no tangents
        return jax.device_get(_compiled_tangents(program, _by_vjp)(point))


@functools.cache
def _compiled_tangents(program: Program, way: Callable[..., Any]) -> Callable[..., Any]:
    def of_all_arguments(point: Sequence[Any]) -> Any:
        def of_argument(i: int) -> Any:
            def run(x: Any) -> list[Any]:
                return jax.tree.leaves(_function(program)(*point[:i], x, *point[i + 1 :]))

            return way(run, point[i])

        return [of_argument(i) for i in range(len(ARGUMENTS))]

    return jax.jit(of_all_arguments)


def _by_jvp(run: Callable[..., Any], x: Any) -> list[jax.Array]:
    tangents = jax.jvp(run, (x,), (jnp.ones(SIZE),))[1]
    return [jnp.zeros(()) if x.dtype == jax.dtypes.float0 else x for x in tangents]


def _by_vjp(run: Callable[..., Any], x: Any) -> list[jax.Array]:
    results, pull_back = jax.vjp(run, x)
    slopes = []
    for k in range(len(results)):
        cotangents = [
            (j == k) * jnp.ones_like(x)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else np.zeros(x.shape, jax.dtypes.float0)
            for j, x in enumerate(results)
        ]
        slopes.append(pull_back(cotangents)[0])
    return slopes
