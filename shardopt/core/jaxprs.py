"""Walking through a jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation in the order of the trace, each followed by those of what it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in called(eqn):
            yield from equations(inner)


def called(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return what an equation calls: the body of a function or loop, the branches of a choice."""
    inner = (getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(eqn.params))
    return [one for one in inner if hasattr(one, "eqns")]
