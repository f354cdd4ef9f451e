"""A block that keeps little of its forward pass for its backward pass, outside of any pipeline."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from shardopt.core.types import abstract
from shardopt.pipeline.passes import floating, replaced, take_apart

Arrays = list[Any]


def keeping_little(f: Callable[[Arrays, Arrays], Arrays], given: Arrays, x: Arrays) -> Arrays:
    """Return `f(given, x)`, keeping for the backward pass only what `take_apart` keeps.

    So what follows from `given` alone, gathers and casts of weights, is computed again there, and what elementwise
    operations make of something kept; a `jax.checkpoint` within f is heeded. A policy of `jax.checkpoint` around it all
    could not say that: it sees one primitive at a time, not what it depends on, and overrules those within.

    Args:
      f: of lists of arrays; its result has the shapes and dtypes of x.
      given: weights, indices, keys.
      x: the input.
    """
    trained, moving = floating(given), floating(x)
    passes = functools.cache(lambda: take_apart(f, given_shapes, x_shapes, trained=trained))
    given_shapes, x_shapes = abstract((given, x))

    def forward(given: Arrays, x: Arrays) -> tuple[Arrays, Any]:
        y, kept = passes().forward(given, x)
        return y, (given, kept)

    def backward(left: tuple[Arrays, Arrays], dy: Arrays) -> tuple[Arrays, Arrays]:
        given, kept = left
        dy = [dy[i] for i in moving]
        # Or a compiler that sees both passes at once would keep what the first one gathered.
        weights, dy = jax.lax.optimization_barrier(([given[i] for i in trained], dy))
        dx, dw = passes().both(replaced(given, trained, weights), kept, dy)
        return replaced([None] * len(given), trained, dw), replaced([None] * len(x), moving, dx)

    run = jax.custom_vjp(f)
    run.defvjp(forward, backward)
    return run(given, x)
