"""The settings of one proof, which every rule needs that follows a function which an equation
calls.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from shardopt.separability._relations import EquationPair, KeyPath, Relation


class DifferentTracesError(Exception):
    """The whole trace and the piece trace do not have the same equations.

    Attributes:
      eqn: the first equation that differs; None if it is not known.
    """

    def __init__(self, eqn: JaxprEqn | None):
        super().__init__()
        self.eqn = eqn


@dataclasses.dataclass(frozen=True)
class ProofSettings:
    """The settings of one proof.

    Attributes:
      relate_jaxprs: `walk.relate`, which relates the results of two traces of one function. As a
        field it saves a circular import.
      num_pieces: n, the number of equal pieces of the batch.
      row_axes: the mesh axes that the pieces are spread over, in the order of the pieces.
        Collectives over these axes combine all pieces. () if there are none.
      other_axes: mesh axes that divide the work of every piece in the same way.
      positions: whether pieces are pieces of sequences; if False, they are pieces of the rows.
      training: whether the loss is differentiated. Then the rules of `jax.custom_vjp` and
        `jax.custom_jvp` count.
      alone: whether a device may take this branch or turn, and others not. Then a collective in it
        would wait for ever.
      callers: the calls that the proof is inside of, the outermost first.
      rule_traces: traces of derivative rules, by the ids of the two equations. The proof follows a
        loop several times, so it caches them.
      key_uses: the draws from each random key, and whether they are draws for each row.
    """

    relate_jaxprs: "Callable[[ProofSettings, Any, Any, Sequence[Relation]], list[Relation]]"
    num_pieces: int
    row_axes: tuple[str, ...] = ()
    other_axes: frozenset[str] = frozenset()
    positions: bool = False
    training: bool = False
    alone: bool = False
    callers: tuple[JaxprEqn, ...] = ()
    rule_traces: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    key_uses: dict[tuple[KeyPath, Hashable], bool] = dataclasses.field(default_factory=dict)

    def relate(
        self, site: EquationPair, whole_jaxpr: Any, piece_jaxpr: Any, relations: Sequence[Relation]
    ) -> list[Relation]:
        """Return the relations of the results of a function that an equation calls.

        Raises:
          DifferentTracesError: if the two jaxprs do not have the same equations.
        """
        inner = dataclasses.replace(self, callers=(*self.callers, site.whole_eqn))
        return self.relate_jaxprs(inner, whole_jaxpr, piece_jaxpr, relations)
