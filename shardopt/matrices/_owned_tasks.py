"""The tasks of an update as units of work on owners: the arrays that each unit exchanges, its cost, and its owner."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.extend.core as jex
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.matrices._blockwise import block_dim, is_blockwise, match_variables
from shardopt.matrices._matrix_tasks import MatrixTask, find_tasks
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan, Owned, shard_axes
from shardopt.partition._balance import share_out
from shardopt.partition._owners import TENSOR
from shardopt.trace._jaxprs import called_jaxprs, cost_of, shape_of
from shardopt.trace._matrix_work import MIN_ELEMENTS, Groups
from shardopt.trace._parts import Trace, abstract_value, jaxpr_of_part, product_flops

CutLeaves = frozenset[int]
"""The trained leaves, by index, that have a single block in a trace; an empty set is the trace of the whole update."""
WHOLE: CutLeaves = frozenset()


class Transfer(NamedTuple):
    """How an input or output of a unit gets to its owner or back.

    Attributes:
      spec: how it is sharded: over all axes that owners are along if it is sent, over none of them if it is not.
      is_sent: whether it is sent to the owner, or back. A value that is not sent is at its owner, small, or replicated.
      shape: the shape of one unit's value, at its owner.
      dtype: its dtype.
      dim: the dim that counts blocks; None if units are not blocks.
    """

    spec: PartitionSpec
    is_sent: bool
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None


class OwnedTask(NamedTuple):
    """A task that runs on owners, as units: a single unit, or one unit a block.

    Attributes:
      task: the task.
      inputs: its large inputs, then its small inputs.
      outputs: its outputs.
      input_vars: the inputs as variables of the trace that a unit runs: the trace of the update, or of one block.
      output_vars: the outputs as variables of that trace.
      key: tasks with equal keys run the same program.
      cut: the leaves whose blocks are units; `WHOLE` if there is a single unit.
      blocks: the number of units on the stage of a device.
      cost: of a unit, in flops.
      paths: the key paths of its parameters.
    """

    task: MatrixTask
    inputs: tuple[Transfer, ...]
    outputs: tuple[Transfer, ...]
    input_vars: tuple[jex.Var, ...]
    output_vars: tuple[jex.Var, ...]
    key: str
    cut: CutLeaves
    blocks: int
    cost: float
    paths: tuple[str, ...]


class OwnedStage(NamedTuple):
    """Tasks that run at the same time, unit by unit on their owners.

    Attributes:
      tasks: tasks whose inputs are sent to owners.
      local_tasks: tasks of stacked matrices that live at their owners: nothing is sent.
      units: (task, block) of each unit of `tasks`.
      owners: the owner of each unit, its index along the axes of owners.
      traces: the traces of the update that units run, by the leaves that are cut.
    """

    tasks: tuple[OwnedTask, ...]
    local_tasks: tuple[OwnedTask, ...]
    units: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    traces: dict[CutLeaves, Trace]

    @property
    def costs(self) -> list[float]:
        """The cost of each unit."""
        return [self.tasks[task].cost for task, _ in self.units]


def owner_axes(config: StrategyConfig) -> tuple[str, ...]:
    """Return the axes that owners are along: the axes that a placement shards over, and tensor."""
    tensor = ("tensor",) if config.mesh_shape.get("tensor", 1) > 1 else ()
    return (*shard_axes(config.mesh_shape).names, *tensor)


def plan_stages(
    config: StrategyConfig, layout: Layout, full_trace: Trace, retrace: Callable[[CutLeaves], Trace]
) -> tuple[list[OwnedStage], list[Owned]]:
    """Return the tasks that run on owners, stage by stage, each unit with its owner; and the matrices that get no owner.

    Args:
      config: of the strategy.
      layout: of the parameters.
      full_trace: the trace of the update, whose first variables are the gradients.
      retrace: makes the trace of the update in which these leaves have a single block.
    """
    groups = Groups(full_trace, max(MIN_ELEMENTS, config.layout.min_shard_elements))
    leaves: dict[int, list[int]] = {}
    for i, (var, _) in enumerate(zip(full_trace.jaxpr.invars, layout.trained, strict=False)):
        if groups.select_large([var]):
            leaves.setdefault(groups.group_number(var), []).append(i)
    tasks = find_tasks(full_trace, groups)
    cuts = _Cuts(layout.trained, full_trace, retrace, [leaves.get(task.group, []) for task in tasks])
    count = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    stages: dict[int, list[OwnedTask]] = {}
    local_tasks: dict[int, list[OwnedTask]] = {}
    without_owner: list[Owned] = []
    for task in tasks:
        task_leaves = leaves.get(task.group, [])
        task_plans = [layout.trained[i] for i in task_leaves]
        state_axes = {None if plan.owned is None else plan.owned[0] for plan in task_plans}
        if len(state_axes) > 1 or (state_axes <= {None} and count == 1):
            continue
        cut = cuts.cut(task, task_leaves)
        block_axes = next(iter(state_axes - {None}), None)
        if block_axes or (cut is not None and (block_axes := _axes_of_whole_matrices(task_plans))):
            if cut is not None:  # a task of several blocks is left to the partitioner
                local_task = _make_owned_task(config, task, task_plans, full_trace, cut, block_axes)
                local_tasks.setdefault(task.stage, []).append(local_task)
            continue
        if cut is None and any(plan.pipelined for plan in task_plans):
            because = "the optimizer mixes the blocks of a leaf, and each stage of the pipeline holds only some of them"
            without_owner.append(Owned(tuple(plan.path for plan in task_plans), (), because))
            continue
        stages.setdefault(task.stage, []).append(_make_owned_task(config, task, task_plans, full_trace, cut))
    return [
        _make_stage(tuple(stages.get(i, ())), tuple(local_tasks.get(i, ())), count, cuts.traces)
        for i in sorted({*stages, *local_tasks})
    ], without_owner


def _make_stage(
    tasks: tuple[OwnedTask, ...], local_tasks: tuple[OwnedTask, ...], num_owners: int, traces: dict[CutLeaves, Trace]
) -> OwnedStage:
    # units of one program are adjacent, so that devices have the same mixtures of programs
    order = sorted(range(len(tasks)), key=lambda i: (-tasks[i].cost, tasks[i].key, i))
    units = tuple((i, block) for i in order for block in range(tasks[i].blocks))
    owners = share_out([tasks[i].cost for i, _ in units], num_owners)
    return OwnedStage(tasks, local_tasks, units, tuple(owners), traces)


def _axes_of_whole_matrices(plans: Sequence[LeafPlan]) -> str | tuple[str, ...] | None:
    """Return the axes that shard leaves by whole matrices, along the first dim; None if a matrix is split."""
    axes = {plan.axes for plan in plans if plan.dim == 0 and not plan.experts and TENSOR not in tuple(plan.tensor)}
    return axes.pop() if len(axes) == 1 and all(plan.dim == 0 for plan in plans) else None


class _Cut(NamedTuple):
    """A task that does the same to each block.

    Attributes:
      leaves: the leaves that have a single block in `trace`.
      trace: the trace of the update of one block.
      matches: variable of the full trace -> variable of `trace`.
      blocks: the number of blocks.
    """

    leaves: CutLeaves
    trace: Trace
    matches: dict[jex.Var, jex.Var]
    blocks: int


class _Cuts:
    """Finds the tasks that do the same to each block of a `BlockModel`, or to each matrix of any other stacked leaf.

    Each leaf of three or more dims may be a stack. The proof is a trace of the update in which each stack has one matrix.
    All leaves are cut in one trace. If an optimizer works differently then, leaves of each shape are cut in a trace of their own.
    """

    def __init__(
        self,
        plans: Sequence[LeafPlan],
        full_trace: Trace,
        retrace: Callable[[CutLeaves], Trace],
        groups: Sequence[Sequence[int]],
    ):
        self.plans, self.full_trace, self.retrace = plans, full_trace, retrace
        self.traces = {WHOLE: full_trace}
        self.matches: dict[CutLeaves, dict[jex.Var, jex.Var] | None] = {}
        self.blocks = frozenset(i for i, plan in enumerate(plans) if plan.stacked)
        self.stacks = frozenset(i for leaves in groups if self.are_stacks(leaves) for i in leaves)

    def are_stacks(self, leaves: Sequence[int]) -> bool:
        """Return whether leaves outside of a `BlockModel` may be stacks of equally many matrices, each whole or cut alike."""
        plans = [self.plans[i] for i in leaves]
        if len({plan.shape[:1] for plan in plans}) != 1 or any(plan.stacked or len(plan.shape) < 3 for plan in plans):
            return False
        return _axes_of_whole_matrices(plans) is not None or all(plan.spec(sharded=True)[0] is None for plan in plans)

    def cut(self, task: MatrixTask, leaves: Sequence[int]) -> _Cut | None:
        """Return a task of some leaves in blocks; None if it mixes blocks, or has a single one."""
        if leaves and self.blocks.issuperset(leaves):
            attempts = [self.blocks]
        elif self.stacks.issuperset(leaves) and leaves:
            shapes = {self.plans[i].shape for i in leaves}
            attempts = [self.stacks, frozenset(i for i in self.stacks if self.plans[i].shape in shapes)]
        else:
            return None
        blocks = self.plans[leaves[0]].shape[0]
        for cut_leaves in attempts if blocks > 1 else ():
            matches = self.match(cut_leaves)
            if matches is not None:
                trace = self.traces[cut_leaves]
                return _Cut(cut_leaves, trace, matches, blocks) if self.is_cut(task, trace, matches, blocks) else None
        return None

    def is_cut(self, task: MatrixTask, trace: Trace, matches: dict[jex.Var, jex.Var], blocks: int) -> bool:
        """Return whether a task does the same to each block, and never mixes blocks."""
        indices = sorted(task.equations)
        pairs = [self.full_trace.jaxpr.eqns[i] for i in indices], [trace.jaxpr.eqns[i] for i in indices]
        block_dims = [block_dim(var, matches, blocks) for var in (*task.inputs, *task.outputs)]
        return None not in block_dims and is_blockwise(*pairs, matches, blocks)

    def match(self, leaves: CutLeaves) -> dict[jex.Var, jex.Var] | None:
        """Return variable of the full trace -> variable of the trace with these leaves cut; None if the traces differ."""
        if leaves not in self.matches:
            try:
                self.traces[leaves] = self.retrace(leaves)
            except Exception:
                if leaves == self.blocks:
                    raise
                self.matches[leaves] = None  # the optimizer refuses such a shape, so it does not treat it as a stack
            else:
                self.matches[leaves] = match_variables(self.full_trace.jaxpr, self.traces[leaves].jaxpr)
        return self.matches[leaves]


def _make_owned_task(
    config: StrategyConfig,
    task: MatrixTask,
    plans: Sequence[LeafPlan],
    full_trace: Trace,
    cut: _Cut | None,
    state_axes: str | tuple[str, ...] | None = None,
) -> OwnedTask:
    """Return a task as units; `state_axes` are the axes that blocks are sharded over if the state is at owners."""
    unit_trace, matches, blocks = (full_trace, None, 1) if cut is None else cut[1:]
    block_axes = state_axes or ("pipeline" if any(plan.pipelined for plan in plans) else None)
    num_parts = math.prod(config.mesh_shape[axis] for axis in spec_axes((block_axes,)))

    def transfer_of(var: jex.Var, *, large: bool) -> Transfer:
        dim = None if matches is None else block_dim(var, matches, blocks)
        unit = abstract_value(var if matches is None else matches[var])
        dtype = np.dtype(unit.dtype)
        if large and state_axes is None and (sent := _sent_spec(config, var, plans, dim)) is not None:
            return Transfer(sent, True, unit.shape, dtype, dim)
        local_spec = PartitionSpec(*[None] * dim, block_axes) if dim is not None and num_parts > 1 else PartitionSpec()
        return Transfer(local_spec, False, unit.shape, dtype, dim)

    min_elements = max(MIN_ELEMENTS, config.layout.min_shard_elements)
    is_large = lambda var: math.prod(shape_of(var)) >= min_elements  # noqa: E731
    reads = [*task.inputs, *task.small_inputs]
    unit_var = lambda var: var if matches is None else matches[var]  # noqa: E731
    input_vars, output_vars = [unit_var(var) for var in reads], [unit_var(var) for var in task.outputs]
    part = jaxpr_of_part(unit_trace, task.equations, input_vars, output_vars).replace(constvars=[])
    inputs = tuple(transfer_of(var, large=is_large(var)) for var in reads)
    outputs = tuple(transfer_of(var, large=is_large(var)) for var in task.outputs)
    return OwnedTask(
        task=task,
        inputs=inputs,
        outputs=outputs,
        input_vars=tuple(input_vars),
        output_vars=tuple(output_vars),
        key=f"{part} {inputs} {outputs}",
        cut=WHOLE if cut is None else cut.leaves,
        blocks=blocks // num_parts,
        cost=float(sum(_flops(eqn) for eqn in part.eqns)),
        paths=tuple(plan.path for plan in plans),
    )


def _sent_spec(
    config: StrategyConfig, var: jex.Var, plans: Sequence[LeafPlan], dim: int | None
) -> PartitionSpec | None:
    """Return a spec that shards a value over all axes of owners; None if no dim allows it, or the leaf is replicated."""
    shape, sizes = shape_of(var), config.mesh_shape
    plan = next((plan for plan in plans if plan.shape == shape), None)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    if plan is not None:
        if plan.dim is None:
            return None
        entries = [tuple(spec_axes((entry,))) for entry in plan.spec(sharded=True)]
    elif dim is not None and any(plan.pipelined for plan in plans):
        entries[dim] = ("pipeline",)

    def can_shard(i: int, axis: str) -> bool:
        return i != dim and shape[i] % (math.prod(sizes[name] for name in entries[i]) * sizes[axis]) == 0

    for axis in owner_axes(config):
        if any(axis in entry for entry in entries):
            continue
        # prefer a dim that is sharded already, then the longest dim
        candidates = [i for i in range(len(shape)) if can_shard(i, axis)]
        if not candidates:
            return None
        best_dim = max(candidates, key=lambda i: (bool(set(entries[i]) - {"pipeline"}), shape[i]))
        entries[best_dim] = (*entries[best_dim], axis)
    return PartitionSpec(*(None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries))


def _flops(eqn: jex.JaxprEqn) -> float:
    """Return the approximate flops of an equation: exact for products, an estimate for decompositions."""
    return cost_of(eqn, _flops_of_primitive)


def _flops_of_primitive(eqn: jex.JaxprEqn) -> float | None:
    name = eqn.primitive.name
    if name == "dot_general":
        return product_flops(eqn)
    if called_jaxprs(eqn):
        return None
    if name in _DECOMPOSITION_FLOPS:
        shape = shape_of(eqn.invars[0])
        return _DECOMPOSITION_FLOPS[name] * math.prod(shape) * min(shape[-2:])
    return float(sum(math.prod(shape_of(var)) for var in eqn.outvars))


_DECOMPOSITION_FLOPS = {"cholesky": 1 / 3, "eig": 25.0, "eigh": 9.0, "lu": 2 / 3, "geqrf": 2.0, "qr": 4.0, "svd": 20.0}
"""Approximate flops of a decomposition, divided by m n min(m, n). Golub and Van Loan, "Matrix Computations"."""
