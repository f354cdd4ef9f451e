"""What holds in a whole proof, handed to every rule that follows what an equation calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from shardopt.separability.relations import Site, Value


class DifferentTracesError(Exception):
    """The loss does other things on the whole batch than on a piece of it.

    Attributes:
      eqn: the first equation that differs, if one is known.
    """

    def __init__(self, eqn: JaxprEqn | None):
        super().__init__()
        self.eqn = eqn


@dataclasses.dataclass(frozen=True)
class Scope:
    """What holds in a whole proof.

    Attributes:
      walk: `walk(scope, whole, piece, values)`, the relations of the results of two traces of one function.
      pieces: n, into how many pieces the batch is cut.
      row_axes: mesh axes along which the pieces are, so that collectives over them combine all pieces; () if they do not.
      other_axes: mesh axes along which the loss is cut in another way, for each piece alike.
      positions: whether the pieces are pieces of the sequences, rather than of the rows.
      training: whether the loss is differentiated, so that rules of `jax.custom_vjp` and `jax.custom_jvp` count.
      callers: the calls that are being followed.
      rules: traces of derivative rules, by the equations' ids, since loops are followed several times.
    """

    walk: "Callable[[Scope, Any, Any, Sequence[Value]], list[Value]]"
    pieces: int
    row_axes: frozenset[str] = frozenset()
    other_axes: frozenset[str] = frozenset()
    positions: bool = False
    training: bool = False
    callers: tuple[JaxprEqn, ...] = ()
    rules: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)

    def relate(self, site: Site, whole: Any, piece: Any, values: Sequence[Value]) -> list[Value]:
        """Return the relations of the results of what an equation calls.

        Raises:
          DifferentTracesError: if the traces are not the same equations.
        """
        return self.walk(dataclasses.replace(self, callers=(*self.callers, site.whole)), whole, piece, values)


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Return a jaxpr without what it closes over."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
