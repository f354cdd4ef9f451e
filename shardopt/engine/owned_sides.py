"""Which equations of an update run at the owners of matrices and which on the shards of parameters: as few bytes move as can be.

State of stacked blocks lives at their owners; gradients and parameters do not, and updates are wanted where parameters
are. A minimum cut of the update's trace says what crosses: of Muon and Adam the gradient goes there and the update comes
back, and weight decay, a term of the parameter, is added where that is.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import jax.extend.core as jex

from shardopt.core.trace import MOST, Trace, bytes_of, inputs_of, shape_of, sink_side
from shardopt.engine.layout import Layout
from shardopt.engine.matrix_tasks import Groups, is_heavy, is_opaque
from shardopt.engine.owners import is_moved
from shardopt.partition import LeafPlan

_HOME, _OWNERS = 0, 1
"""Source and sink of the cut."""


class Move(NamedTuple):
    """A variable that is read where it is not made: it is like this parameter, and goes to owners, or back."""

    plan: LeafPlan
    there: bool


class Sides(NamedTuple):
    """Where an update runs of which some state lives at owners, and gradients and parameters do not.

    Attributes:
      owned: the equations that run at owners.
      moves: what crosses.
    """

    owned: frozenset[int]
    moves: dict[jex.Var, Move]


def plan_sides(layout: Layout, trace: Trace, least: int, tasks: Collection[int], devices: int) -> Sides:
    """Return the sides of an update's equations.

    Args:
      layout: of the parameters.
      trace: of the update: gradients, state, parameters and loss in, updates and state out.
      least: from how many elements on a variable is large.
      tasks: the equations of those tasks that run at owners whose state is there.
      devices: how many owners there are.
    """
    cut = _Cut(layout, trace, Groups(trace, least))
    if not cut.roots:
        return Sides(frozenset(), {})
    eqns = trace.jaxpr.eqns
    node: dict[int, int] = {}
    for i, eqn in enumerate(eqns):
        if is_opaque(eqn):
            node[i] = _HOME
        elif any(map(cut.crosses, {*inputs_of(eqn), *eqn.outvars})):
            node[i] = _OWNERS if i in tasks or is_heavy(eqn, least) else 2 + i
    readers: dict[jex.Var, set[int]] = {}
    for i in node:
        for var in inputs_of(eqns[i]):
            readers.setdefault(var, set()).add(node[i])
    for i, var in enumerate(trace.jaxpr.outvars):
        if not isinstance(var, jex.Literal):
            readers.setdefault(var, set()).add(_HOME if i < len(layout.trained) else _OWNERS)
    made = {var: node[i] for i in node for var in eqns[i].outvars} | cut.given
    found = {var: some for var, some in readers.items() if var in made and cut.crosses(var)}
    # what is like no parameter is left to the partitioner, which gathers it
    costs = {var: bytes_of(var) * (1 if cut.plan(var) else devices) for var in found}
    unit = max(sum(costs.values()) / (MOST // 4), 1.0)
    edges: dict[tuple[int, int], int] = {}
    size = 2 + len(eqns)
    for var, some in found.items():
        there, back, cost = size, size + 1, math.ceil(costs[var] / unit)
        size += 2
        edges |= {(made[var], there): cost, (back, made[var]): cost}
        edges |= {(there, one): MOST for one in some} | {(one, back): MOST for one in some}
    owned = sink_side(edges, size, _HOME, _OWNERS)
    moves = {}
    for var, some in found.items():
        there, plan = made[var] not in owned, cut.plan(var)
        if plan is not None and any((one in owned) is there for one in some):
            moves[var] = Move(plan, there)
    return Sides(frozenset(i for i in node if node[i] in owned), moves)


class _Cut:
    """The variables that may cross: large ones of the same matrices as a parameter that is not where its state is."""

    def __init__(self, layout: Layout, trace: Trace, groups: Groups):
        count, invars = len(layout.trained), trace.jaxpr.invars
        self.groups = groups
        self.like: dict[tuple[jex.Var, tuple[int, ...]], list[LeafPlan]] = {}
        self.roots: set[jex.Var] = set()
        for var, plan in zip(invars, layout.trained, strict=False):
            if groups.large([var]):
                self.like.setdefault((groups.root(var), plan.shape), []).append(plan)
                if is_moved(plan):
                    self.roots.add(groups.root(var))
        params = invars[len(invars) - count - 1 : -1]
        self.given = dict.fromkeys(invars[count:], _OWNERS) | dict.fromkeys([*invars[:count], *params], _HOME)

    def crosses(self, var: jex.Var) -> bool:
        """Return whether it costs something to read it on the other side."""
        return bool(self.groups.large([var])) and self.groups.root(var) in self.roots

    def plan(self, var: jex.Var) -> LeafPlan | None:
        """Return the plan of the parameters that it has the shape of, if they all live in the same places and move."""
        some = self.like.get((self.groups.root(var), shape_of(var).shape), [])
        same = {(plan.owned, plan.spec(sharded=True)) for plan in some}
        return some[0] if len(same) == 1 and is_moved(some[0]) else None
