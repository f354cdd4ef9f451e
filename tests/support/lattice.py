"""Checks of the functions that combine relations: a value of one relation has the other too."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from shardopt.separability._derivatives import implies
from shardopt.separability._loops import _common_relation
from shardopt.separability._relations import (
    EquationPair,
    Relation,
    Shapes,
    Unrelated,
    as_drawn,
    is_drawn,
)
from support.relation_meaning import draw_pair, draw_relation, draw_shapes, violation

DRAWS = 400


def _site(shapes: Shapes, num_pieces: int) -> EquationPair:
    eqns = [jax.make_jaxpr(lax.neg)(np.ones(shape)).eqns[0] for shape in shapes]
    return EquationPair(eqns[0], eqns[1], num_pieces)


def _relations(rng: np.random.Generator) -> tuple[EquationPair, Shapes, Relation, Relation]:
    """Return two random relations of values of one shape, often of almost the same relation."""
    num_pieces = int(rng.choice([2, 3]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(0, 3)), sizes=(1, 2), most_uneven=1)
    dtype = np.dtype(np.float64)
    a, b = (draw_relation(rng, shapes, dtype, num_pieces) for _ in range(2))
    if rng.random() < 0.2:
        b = as_drawn(a) if rng.random() < 0.5 else a
    return _site(shapes, num_pieces), shapes, a, b


def _has(
    rng: np.random.Generator, site: EquationPair, shapes: Shapes, a: Relation, b: Relation
) -> str | None:
    """Return why a value with relation `a` does not have relation `b`; None if it has."""
    if isinstance(b, Unrelated):
        return None
    if is_drawn(a) and not is_drawn(b):
        return f"{a} is drawn, and {b} is not"
    pair = draw_pair(rng, a, shapes, np.float64, site.num_pieces)
    problem = violation(b, *pair)
    return f"{a} is not {b}: {problem}" if problem else None


def implied(rng: np.random.Generator) -> str | None:
    """Return why a relation does not imply another one, although `implies` says so.

    Marks of draws do not count.
    """
    site, shapes, a, b = _relations(rng)
    return _has(rng, site, shapes, a, as_drawn(b)) if implies(site, a, b) else None


def common(rng: np.random.Generator) -> str | None:
    """Return why the common relation of two values is not one of both."""
    site, shapes, a, b = _relations(rng)
    both = _common_relation(site, a, b)
    return _has(rng, site, shapes, a, both) or _has(rng, site, shapes, b, both)


CHECKS: dict[str, Callable[[np.random.Generator], str | None]] = {
    "implies": implied,
    "_common_relation": common,
}
"""Function -> its check."""


def problems(name: str) -> list[Any]:
    """Return the problems of a function that combines relations."""
    rng = np.random.default_rng(0)
    return [problem for _ in range(DRAWS) if (problem := CHECKS[name](rng))]
