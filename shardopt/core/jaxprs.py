"""Walking through a jaxpr."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation in the order of the trace, each followed by those of what it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for leaf in jax.tree.leaves(eqn.params):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
