"""Find the parts of an optimizer update that work on matrices, so that each part can run on a
single device.

The trace of an update has three kinds of equations:

- elementwise arithmetic, which runs on shards where they are;
- sums to a number (norms), which the partitioner reduces;
- products and decompositions of matrices, for which the partitioner would gather.

A `MatrixTask` holds the third kind: the equations of one matrix from the first product to the last.
It also holds earlier equations, as far as they reduce the bytes of its inputs.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax.extend.core as jex

from shardopt.trace._matrix_work import Groups, is_heavy, is_opaque
from shardopt.trace._parts import Trace, fewest_bytes, inputs_of, slice_of, variables_of

_RESHAPES = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})


class MatrixTask(NamedTuple):
    """A part of an update that works on one matrix, and on no other large value.

    Attributes:
      equations: the indices of its equations in the trace.
      inputs: the large variables that it reads.
      small_inputs: the small variables that it reads.
      outputs: its variables that other equations or the results read.
      group: a number that variables of one matrix (a gradient, its moments) share.
      stage: tasks of one stage do not wait for each other.
    """

    equations: frozenset[int]
    inputs: tuple[jex.Var, ...]
    small_inputs: tuple[jex.Var, ...]
    outputs: tuple[jex.Var, ...]
    group: int
    stage: int


def find_tasks(trace: Trace, groups: Groups) -> list[MatrixTask]:
    """Return the tasks of an update, ordered by stage.

    A matrix has one task, unless one of its values waits for the task of another matrix. An example
    is a norm over all updates, which a later product reads. The equations after that value are then
    a task of the next stage.
    """
    eqns = trace.jaxpr.eqns
    stages = _Stages(trace, groups)
    heavy_equations = {}
    for i, eqn in enumerate(eqns):
        group = groups.group_of(eqn)
        if group is not None and is_heavy(eqn, groups.min_elements):
            heavy_equations.setdefault((stages.stage_of[i], group), []).append(i)
    return [
        _task(trace, groups, stages, heavy, group, stage)
        for (stage, group), heavy in sorted(heavy_equations.items())
    ]


class _Stages:
    """The stage of every equation: how many tasks of other matrices it waits for, one after
    another.
    """

    def __init__(self, trace: Trace, groups: Groups):
        self.stage_of: list[int] = []
        # the groups whose heavy equations a variable depends on
        heavy_groups: dict[jex.Var, frozenset[int]] = {}
        stage: dict[jex.Var, int] = {}
        for eqn in trace.jaxpr.eqns:
            group = groups.group_of(eqn)
            reads = inputs_of(eqn)
            this_group = frozenset() if group is None else frozenset({group})
            waits_for = frozenset().union(*(heavy_groups.get(var, frozenset()) for var in reads))
            next_stages = [
                stage.get(var, 0) + bool(heavy_groups.get(var, frozenset()) - this_group)
                for var in reads
            ]
            input_stages = [stage.get(var, 0) for var in reads]
            # An equation of no matrix (a sum of norms) does not start a stage; an evaluation of the
            # loss does.
            eqn_stage = max(
                input_stages if group is None and not is_opaque(eqn) else next_stages, default=0
            )
            if group is not None and is_heavy(eqn, groups.min_elements):
                waits_for |= this_group
            self.stage_of.append(eqn_stage)
            for var in eqn.outvars:
                heavy_groups[var], stage[var] = waits_for, eqn_stage


def _task(
    trace: Trace, groups: Groups, stages: _Stages, heavy: Sequence[int], group: int, stage: int
) -> MatrixTask:
    core = _equations_between(
        trace, heavy, [i for i, eqn_stage in enumerate(stages.stage_of) if eqn_stage == stage]
    )
    core |= _reshapes_after(trace, core)
    eqns = [trace.jaxpr.eqns[i] for i in sorted(core)]
    results = [var for eqn in eqns for var in eqn.outvars]
    reads = dict.fromkeys(var for eqn in eqns for var in inputs_of(eqn))
    reads = [var for var in reads if var not in results]
    # Light equations before the core join the task if what they read is smaller than what they
    # make: the momentum in bf16 is sent, not its fp32 copy.
    inputs = _smallest_inputs(trace, reads, groups.min_elements)
    preparation, _ = slice_of(trace, reads, stop=set(inputs))
    large_inputs = groups.select_large(inputs)
    read_outside = _read_outside(trace, core)
    return MatrixTask(
        equations=frozenset(core | preparation),
        inputs=tuple(large_inputs),
        small_inputs=tuple(var for var in inputs if var not in large_inputs),
        outputs=tuple(var for var in results if var in read_outside),
        group=group,
        stage=stage,
    )


def _read_outside(trace: Trace, core: Collection[int]) -> set[jex.Var]:
    """Return the variables that the results or the equations outside of `core` read."""
    other_eqns = [eqn for i, eqn in enumerate(trace.jaxpr.eqns) if i not in core]
    return set(variables_of(trace.jaxpr.outvars)).union(*map(inputs_of, other_eqns))


def _equations_between(trace: Trace, heavy: Sequence[int], allowed: Sequence[int]) -> set[int]:
    """Return the equations on paths between two equations of `heavy`, including `heavy`."""
    eqns = trace.jaxpr.eqns
    after_heavy = set(heavy)
    before_heavy = set(heavy)
    results = {var for i in heavy for var in eqns[i].outvars}
    for i in allowed:
        if inputs_of(eqns[i]) & results:
            after_heavy.add(i)
            results |= set(eqns[i].outvars)
    inputs = {var for i in heavy for var in inputs_of(eqns[i])}
    for i in reversed(allowed):
        if set(eqns[i].outvars) & inputs:
            before_heavy.add(i)
            inputs |= inputs_of(eqns[i])
    # A walk forwards and a walk backwards: an equation of both is on a path between heavy ones.
    return after_heavy & before_heavy


def _reshapes_after(trace: Trace, core: set[int]) -> set[int]:
    """Return the equations that only reshape a result of `core`, so that the task returns arrays
    like the parameter.
    """
    reshapes = set()
    results = {var for i in core for var in trace.jaxpr.eqns[i].outvars}
    for i, eqn in enumerate(trace.jaxpr.eqns):
        if eqn.primitive.name in _RESHAPES and inputs_of(eqn) & results:
            reshapes.add(i)
            results |= set(eqn.outvars)
    return reshapes


def _smallest_inputs(trace: Trace, targets: Sequence[jex.Var], min_elements: int) -> list[jex.Var]:
    """Return the variables of fewest bytes from which light equations compute `targets`.

    The earliest, if bytes are equal. They stop all ways from the inputs of the update and from
    results of heavy equations.
    """
    if not targets:
        return []
    dependencies, _ = slice_of(trace, targets, stop=set())
    eqns = trace.jaxpr.eqns
    light = [
        i
        for i in sorted(dependencies)
        if not (is_opaque(eqns[i]) or is_heavy(eqns[i], min_elements))
    ]
    makes = {var: i for i in light for var in trace.jaxpr.eqns[i].outvars}
    reads_of: dict[jex.Var, Collection[jex.Var]] = {}
    todo = list(targets)
    while todo:
        var = todo.pop()
        if var not in reads_of:
            reads_of[var] = inputs_of(trace.jaxpr.eqns[makes[var]]) if var in makes else ()
            todo += reads_of[var]
    sources = [var for var in reads_of if var not in makes]
    arcs = [(read, var) for var, reads in reads_of.items() for read in reads]
    return fewest_bytes(list(reads_of), sources, arcs, targets, earliest=True)
