"""Decide which equations of an update run at the owners of matrices, and which on the shards of
parameters.

State of stacked blocks lives at their owners. Gradients, parameters and averages of parameters do
not, and updates must return to the parameters. A minimum cut of the update's trace finds the
variables to move, with the fewest bytes. For Muon and Adam the gradient moves to the owner and the
update moves back. Weight decay is a term of the parameter, and is added at the parameter.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import jax.extend.core as jex

from shardopt.config._layout import Layout
from shardopt.core import in_averages
from shardopt.matrices._owners import is_moved
from shardopt.partition import LeafPlan
from shardopt.trace._jaxprs import shape_of
from shardopt.trace._matrix_work import Groups, is_heavy, is_opaque
from shardopt.trace._parts import MOST, Trace, bytes_of, inputs_of, sink_side

_PARAMETERS = 0
_OWNERS = 1
"""Source and sink of the cut: the shards of parameters, and the owners."""


class Move(NamedTuple):
    """A variable that moves to owners, or back.

    Attributes:
      plan: the plan of a parameter with its shape and sharding.
      to_owners: whether it moves to owners; otherwise it moves from owners to the parameters.
    """

    plan: LeafPlan
    to_owners: bool


class Sides(NamedTuple):
    """The place of each equation of an update, if some state lives at owners, and gradients and
    parameters do not.

    Attributes:
      at_owners: the equations that run at owners.
      moves: the variables that move between the two sides.
      returns: for each result of the update, whether it lives with the parameters: updates, and
        averages of parameters.
    """

    at_owners: frozenset[int]
    moves: dict[jex.Var, Move]
    returns: tuple[bool, ...]


def plan_sides(
    layout: Layout, trace: Trace, min_elements: int, tasks: Collection[int], devices: int
) -> Sides:
    """Return the side of each of an update's equations.

    Args:
      layout: of the parameters.
      trace: of the update. Its inputs are gradients, state, parameters and loss; its results are
        updates and state.
      min_elements: a variable with at least so many elements is large.
      tasks: the equations of the tasks that run at owners because their state is there.
      devices: the number of owners.
    """
    crossing = _CrossingVariables(layout, trace, Groups(trace, min_elements))
    if not crossing.roots:
        return Sides(frozenset(), {}, crossing.returns)
    node = crossing.nodes(tasks)
    maker = crossing.side_of_input | {
        var: i for eqn, i in node.items() for var in trace.jaxpr.eqns[eqn].outvars
    }
    readers = {
        var: nodes
        for var, nodes in crossing.readers(node).items()
        if var in maker and crossing.may_cross(var)
    }
    owner_nodes = crossing.nodes_at_owners(maker, readers, devices)
    moves = {}
    for var, nodes in readers.items():
        to_owners = maker[var] not in owner_nodes
        plan = crossing.plan(var)
        if plan is not None and any((reader in owner_nodes) is to_owners for reader in nodes):
            moves[var] = Move(plan, to_owners)
    return Sides(frozenset(i for i in node if node[i] in owner_nodes), moves, crossing.returns)


class _CrossingVariables:
    """The large variables that may move: they belong to the matrix of a parameter whose state is
    elsewhere. And the graph of the equations that make and read them.

    Attributes:
      groups: the variables that belong to the same matrices.
      plans: the plans of the parameters of each group and shape.
      roots: the groups whose state is at owners.
      returns: see `Sides`.
      side_of_input: the side of each input of the update.
    """

    def __init__(self, layout: Layout, trace: Trace, groups: Groups):
        count = len(layout.trained)
        invars = trace.jaxpr.invars
        self.groups = groups
        self.eqns = trace.jaxpr.eqns
        self.results = trace.jaxpr.outvars
        self.plans: dict[tuple[jex.Var, tuple[int, ...]], list[LeafPlan]] = {}
        self.roots: set[jex.Var] = set()
        for var, plan in zip(invars, layout.trained, strict=False):
            if groups.select_large([var]):
                self.plans.setdefault((groups.root(var), plan.shape), []).append(plan)
                if is_moved(plan):
                    self.roots.add(groups.root(var))
        opt_state = layout.abstract.opt_state
        averaged = in_averages(layout.reduce.split(opt_state)[0])
        self.returns = (*[True] * count, *averaged)
        # gradients, state, parameters, loss
        at_parameters = (*self.returns, *[True] * count, False)
        sides = (_PARAMETERS if stays else _OWNERS for stays in at_parameters)
        self.side_of_input = dict(zip(invars, sides, strict=True))

    def may_cross(self, var: jex.Var) -> bool:
        """Return whether reading a variable on the other side moves bytes."""
        return bool(self.groups.select_large([var])) and self.groups.root(var) in self.roots

    def plan(self, var: jex.Var) -> LeafPlan | None:
        """Return the plan of the parameters with the shape of a variable, if they are all placed
        alike and move.
        """
        plans = self.plans.get((self.groups.root(var), shape_of(var)), [])
        placements = {(plan.owned, plan.spec(sharded=True)) for plan in plans}
        return plans[0] if len(placements) == 1 and is_moved(plans[0]) else None

    def nodes(self, tasks: Collection[int]) -> dict[int, int]:
        """Return equation -> its node in the graph that is cut, for the loss and for equations with
        variables that may cross.

        The node is a side if the equation has to be there.
        """
        node = {}
        for i, eqn in enumerate(self.eqns):
            if is_opaque(eqn):
                node[i] = _PARAMETERS
            elif any(map(self.may_cross, {*inputs_of(eqn), *eqn.outvars})):
                is_owned = i in tasks or is_heavy(eqn, self.groups.min_elements)
                node[i] = _OWNERS if is_owned else 2 + i
        return node

    def readers(self, node: dict[int, int]) -> dict[jex.Var, set[int]]:
        """Return variable -> the nodes that read it. A side reads its results."""
        readers: dict[jex.Var, set[int]] = {}
        for i in node:
            for var in inputs_of(self.eqns[i]):
                readers.setdefault(var, set()).add(node[i])
        for var, with_parameters in zip(self.results, self.returns, strict=True):
            if not isinstance(var, jex.Literal):
                readers.setdefault(var, set()).add(_PARAMETERS if with_parameters else _OWNERS)
        return readers

    def nodes_at_owners(
        self, maker: dict[jex.Var, int], readers: dict[jex.Var, set[int]], devices: int
    ) -> set[int]:
        """Return the nodes on the side of owners if the fewest bytes move.

        A variable has two nodes of its own, its copies on either side. So it is sent once, however
        many nodes read it.
        """
        # a variable without the shape of a parameter is left to the partitioner, which gathers it
        costs = {var: bytes_of(var) * (1 if self.plan(var) else devices) for var in readers}
        # Capacities are integers. In this unit all costs together stay below an edge that is never
        # cut.
        unit = max(sum(costs.values()) / (MOST // 4), 1.0)
        edges: dict[tuple[int, int], int] = {}
        size = 2 + len(self.eqns)
        for var, nodes in readers.items():
            # A variable, with its copies on either side. Cut edges go from parameters to owners:
            #
            # maker -cost-> sent -inf-> readers       maker at parameters, a reader at owners
            # readers -inf-> returned -cost-> maker   maker at owners, a reader at parameters
            sent_node = size
            returned_node = size + 1
            size += 2
            cost = math.ceil(costs[var] / unit)
            edges |= {(maker[var], sent_node): cost, (returned_node, maker[var]): cost}
            edges |= {(sent_node, reader): MOST for reader in nodes}
            edges |= {(reader, returned_node): MOST for reader in nodes}
        return sink_side(edges, size, _PARAMETERS, _OWNERS)
