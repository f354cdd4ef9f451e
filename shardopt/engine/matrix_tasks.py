"""Which parts of an optimizer's update work on matrices, found in its trace: each can be run in one place.

An update is elementwise arithmetic, which runs on shards where they lie; sums to a number (norms), which the partitioner
reduces; and products and decompositions of matrices, for which it would gather. A task is the last: the equations of one
matrix from the first such to the last, with as much before them as makes what goes in fewest bytes.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeGuard

import jax.extend.core as jex

from shardopt.core.jaxprs import called, within
from shardopt.core.primitives import DECOMPOSITIONS
from shardopt.core.trace import MOST, Atom, Trace, bytes_of, inputs_of, min_cut, shape_of, slice_of

OPAQUE = "shardopt_value_fn"
"""The name of the jitted loss that an update may ask for: it is sharded already."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_MOVES = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})


class Task(NamedTuple):
    """A part of an update that works on matrices, and on nothing else that is large.

    Attributes:
      equations: which it is made of.
      inputs: the large variables that it reads.
      given: the small ones.
      outputs: the variables that it makes for others.
      group: a number that variables of one matrix (a gradient, its moments) share.
      stage: tasks of one stage do not wait for each other.
    """

    equations: frozenset[int]
    inputs: tuple[jex.Var, ...]
    given: tuple[jex.Var, ...]
    outputs: tuple[jex.Var, ...]
    group: int
    stage: int


class Groups:
    """Variables that belong together, because an equation reads or makes them at once; small ones keep nothing together."""

    def __init__(self, trace: Trace, least: int):
        self.trace, self.least = trace, least
        self._parent: dict[jex.Var, jex.Var] = {}
        for eqn in trace.jaxpr.eqns:
            some = [] if is_opaque(eqn) else self.large([*inputs_of(eqn), *eqn.outvars])
            for var in some[1:]:
                self._parent[self.root(var)] = self.root(some[0])
        self._number: dict[jex.Var, int] = {}

    def root(self, var: jex.Var) -> jex.Var:
        """Return the variable that stands for those that belong together."""
        while (up := self._parent.get(var, var)) is not var:
            self._parent[var] = self._parent.get(up, up)
            var = up
        return var

    def large(self, variables: Iterable[jex.Var]) -> list[jex.Var]:
        """Return those with so many elements that they may be sharded."""
        return [var for var in variables if math.prod(shape_of(var).shape) >= self.least]

    def number(self, var: jex.Var) -> int:
        """Return the number of the group of a large variable."""
        return self._number.setdefault(self.root(var), len(self._number))

    def of(self, eqn: jex.JaxprEqn) -> int | None:
        """Return the group that an equation belongs to; None if it has no large variables."""
        some = [] if is_opaque(eqn) else self.large([*inputs_of(eqn), *eqn.outvars])
        return self.number(some[0]) if some else None


def is_opaque(eqn: jex.JaxprEqn) -> bool:
    """Return whether an equation evaluates the loss."""
    return any(one.params.get("name") == OPAQUE or one.primitive.name == "shard_map" for one in within(eqn))


def is_heavy(eqn: jex.JaxprEqn, least: int) -> bool:
    """Return whether an equation multiplies or decomposes matrices; a product that is small is a sum, as of norms."""

    def heavy(one: jex.JaxprEqn) -> bool:
        if one.primitive.name in _PRODUCTS:
            return math.prod(shape_of(one.outvars[0]).shape) >= least
        return one.primitive.name in DECOMPOSITIONS

    return any(map(heavy, within(eqn)))


def gathered_bytes(jaxpr: jex.Jaxpr, least: int) -> int:
    """Return the bytes of what products and decompositions would gather if matrices were sharded within, at least.

    Of each the smallest large value that it reads or makes; what a loop does once for each turn that it is known to take.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if is_opaque(eqn):
            continue
        if inner := called(eqn):
            found = [gathered_bytes(one, least) for one in inner]
            total += eqn.params.get("length", 1) * (max(found) if eqn.primitive.name == "cond" else sum(found))
        elif is_heavy(eqn, least):
            sizes = [bytes_of(var) for var in (*eqn.invars, *eqn.outvars) if math.prod(shape_of(var).shape) >= least]
            total += min(sizes, default=0)
    return total


def find_tasks(trace: Trace, groups: Groups) -> list[Task]:
    """Return the tasks of an update, stage by stage.

    A matrix has one task, unless some value in it waits for a task of another (a norm over all updates, which a later
    product reads): then what comes after is a task of the next stage.
    """
    eqns, stages, members = trace.jaxpr.eqns, _Stages(trace, groups), {}
    for i, eqn in enumerate(eqns):
        group = groups.of(eqn)
        if group is not None and is_heavy(eqn, groups.least):
            members.setdefault((stages.of[i], group), []).append(i)
    return [_task(trace, groups, stages, found, group, stage) for (stage, group), found in sorted(members.items())]


class _Stages:
    """Of every equation, how many tasks of other matrices it waits for, one after another."""

    def __init__(self, trace: Trace, groups: Groups):
        self.of: list[int] = []
        behind: dict[jex.Var, frozenset[int]] = {}  # the groups whose heavy equations a variable depends on
        stage: dict[jex.Var, int] = {}
        for eqn in trace.jaxpr.eqns:
            group, reads = groups.of(eqn), inputs_of(eqn)
            own = frozenset() if group is None else frozenset({group})
            waits = frozenset().union(*(behind.get(var, frozenset()) for var in reads))
            later = [stage.get(var, 0) + bool(behind.get(var, frozenset()) - own) for var in reads]
            same = [stage.get(var, 0) for var in reads]
            # What is of no matrix (a sum of norms) only passes the wait on; the loss ends a stage.
            now = max(same if group is None and not is_opaque(eqn) else later, default=0)
            if group is not None and is_heavy(eqn, groups.least):
                waits |= own
            self.of.append(now)
            for var in eqn.outvars:
                behind[var], stage[var] = waits, now


def _task(trace: Trace, groups: Groups, stages: _Stages, heavy: Sequence[int], group: int, stage: int) -> Task:
    eqns = trace.jaxpr.eqns
    core = _between(trace, heavy, [i for i, one in enumerate(stages.of) if one == stage])
    core |= _moves_after(trace, core)
    made = {var for i in core for var in eqns[i].outvars}
    reads = list(dict.fromkeys(var for i in sorted(core) for var in eqns[i].invars if _outside(var, made)))
    entry = _fewest_bytes(trace, reads, groups.least)
    before, _ = slice_of(trace, reads, stop=set(entry))
    wanted = {var for var in trace.jaxpr.outvars if not isinstance(var, jex.Literal)}
    wanted |= {var for i, eqn in enumerate(eqns) if i not in core for var in inputs_of(eqn)}
    large = set(groups.large(entry))
    return Task(
        equations=frozenset(core | before),
        inputs=tuple(var for var in entry if var in large),
        given=tuple(var for var in entry if var not in large),
        outputs=tuple(var for i in sorted(core) for var in eqns[i].outvars if var in wanted),
        group=group,
        stage=stage,
    )


def _outside(var: Atom, made: Collection[jex.Var]) -> TypeGuard[jex.Var]:
    return not isinstance(var, jex.Literal) and var not in made


def _between(trace: Trace, heavy: Sequence[int], allowed: Sequence[int]) -> set[int]:
    """Return the equations on paths from one of `heavy` to another, themselves among them."""
    eqns, first, last = trace.jaxpr.eqns, set(heavy), set(heavy)
    after = {var for i in heavy for var in eqns[i].outvars}
    for i in allowed:
        if inputs_of(eqns[i]) & after:
            first.add(i)
            after |= set(eqns[i].outvars)
    before = {var for i in heavy for var in inputs_of(eqns[i])}
    for i in reversed(allowed):
        if set(eqns[i].outvars) & before:
            last.add(i)
            before |= inputs_of(eqns[i])
    return first & last


def _moves_after(trace: Trace, core: set[int]) -> set[int]:
    """Return the equations that only give a result of `core` its shape: what leaves then looks like the parameter."""
    found, made = set(), {var for i in core for var in trace.jaxpr.eqns[i].outvars}
    for i, eqn in enumerate(trace.jaxpr.eqns):
        if eqn.primitive.name in _MOVES and inputs_of(eqn) & made:
            found.add(i)
            made |= set(eqn.outvars)
    return found


def _fewest_bytes(trace: Trace, wanted: Sequence[jex.Var], least: int) -> list[jex.Var]:
    """Return the variables of fewest bytes from which light equations make `wanted`, as early as there are so few.

    A minimum vertex cut: what the update is given, and what heavy equations make, is a source; a variable lets through its
    bytes. See `shardopt.remat.split_backward`.
    """
    if not wanted:
        return []
    behind, _ = slice_of(trace, wanted, stop=set())
    light = [i for i in sorted(behind) if not (is_opaque(trace.jaxpr.eqns[i]) or is_heavy(trace.jaxpr.eqns[i], least))]
    makes = {var: i for i in light for var in trace.jaxpr.eqns[i].outvars}
    variables, todo = {}, list(wanted)
    while todo:
        var = todo.pop()
        if var not in variables:
            variables[var] = len(variables)
            todo += inputs_of(trace.jaxpr.eqns[makes[var]]) if var in makes else ()
    count = len(variables)
    source, sink = 2 * count, 2 * count + 1
    unit = max(sum(map(bytes_of, variables)) / (MOST // 2), 1.0)
    edges: dict[tuple[int, int], int] = {}  # backwards, so that the cut found is the earliest
    for var, i in variables.items():
        edges[count + i, i] = max(math.ceil(bytes_of(var) / unit), 1)
        reads = inputs_of(trace.jaxpr.eqns[makes[var]]) if var in makes else ()
        edges |= {(i, count + variables[one]): MOST for one in reads}
        if var not in makes:
            edges[i, source] = MOST
    edges |= {(sink, count + variables[var]): MOST for var in wanted}
    cut = min_cut(edges, 2 * count + 2, sink, source)
    names = list(variables)
    return [names[i] for i in sorted(i for out, i in cut if i < count and out == count + i)]
