"""Which equations of an optimizer update multiply or decompose matrices, and which variables belong
to one matrix.
"""

import math
from collections.abc import Iterable

import jax.extend.core as jex

from shardopt.trace._jaxprs import nested_equations, shape_of
from shardopt.trace._marks import LOSS, has_mark
from shardopt.trace._parts import Trace, inputs_of
from shardopt.trace._primitives import DECOMPOSITIONS

MIN_ELEMENTS = 64
"""Values with fewer elements are small on every mesh: they are replicated on all devices."""
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


class Groups:
    """Groups of large variables: an equation puts all large variables that it reads or makes into
    one group.
    """

    def __init__(self, trace: Trace, min_elements: int):
        self.trace = trace
        self.min_elements = min_elements
        self._parent: dict[jex.Var, jex.Var] = {}
        for eqn in trace.jaxpr.eqns:
            members = self._members(eqn)
            for var in members[1:]:
                self._parent[self.root(var)] = self.root(members[0])
        self._number: dict[jex.Var, int] = {}

    def _members(self, eqn: jex.JaxprEqn) -> list[jex.Var]:
        return [] if is_opaque(eqn) else self.select_large([*inputs_of(eqn), *eqn.outvars])

    def root(self, var: jex.Var) -> jex.Var:
        """Return the variable that represents the group of a variable."""
        while (parent := self._parent.get(var, var)) is not var:
            self._parent[var] = self._parent.get(parent, parent)
            var = parent
        return var

    def select_large(self, variables: Iterable[jex.Var]) -> list[jex.Var]:
        """Return the variables that have enough elements to be sharded."""
        return [var for var in variables if math.prod(shape_of(var)) >= self.min_elements]

    def group_number(self, var: jex.Var) -> int:
        """Return the number of the group of a large variable."""
        return self._number.setdefault(self.root(var), len(self._number))

    def group_of(self, eqn: jex.JaxprEqn) -> int | None:
        """Return the group that an equation belongs to; None if it has no large variables."""
        members = self._members(eqn)
        return self.group_number(members[0]) if members else None


def is_opaque(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation evaluates the loss."""
    return any(
        has_mark(inner, LOSS) or inner.primitive.name == "shard_map"
        for inner in nested_equations(eqn)
    )


def is_heavy(eqn: jex.JaxprEqn, min_elements: int) -> bool:
    """Return whether an equation multiplies or decomposes matrices.

    A product with a small result, as in a norm, is a sum.
    """

    def is_matrix_work(inner: jex.JaxprEqn) -> bool:
        if inner.primitive.name in _PRODUCTS:
            return math.prod(shape_of(inner.outvars[0])) >= min_elements
        return inner.primitive.name in DECOMPOSITIONS

    return any(map(is_matrix_work, nested_equations(eqn)))


def leaves_of_matrix_work(trace: Trace, count: int, min_elements: int) -> list[bool]:
    """Return for each of the first `count` inputs whether an equation multiplies or decomposes its
    matrix.
    """
    groups = Groups(trace, min_elements)
    heavy_groups = {
        groups.group_of(eqn) for eqn in trace.jaxpr.eqns if is_heavy(eqn, min_elements)
    } - {None}
    return [
        bool(groups.select_large([var])) and groups.group_number(var) in heavy_groups
        for var in trace.jaxpr.invars[:count]
    ]
