"""The tasks of an update as units of work on owners: the arrays that each unit exchanges, its cost, and its owner."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core._types import PyTree
from shardopt.matrices._blockwise import block_dim, is_blockwise, match_variables
from shardopt.matrices._matrix_tasks import Groups, MatrixTask, find_tasks
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan, Owned, shard_axes
from shardopt.partition._balance import share_out
from shardopt.trace._jaxprs import called_jaxprs, cost_of
from shardopt.trace._marks import LOSS
from shardopt.trace._parts import Trace, inlined, product_flops, shape_of, trace_of

MIN_ELEMENTS = 64
"""Values with fewer elements are small on every mesh: they are replicated on all devices."""


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
      per_block: whether a unit is a block.
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
    per_block: bool
    blocks: int
    cost: float
    paths: tuple[str, ...]


class OwnedStage(NamedTuple):
    """Tasks that run at the same time, unit by unit on their owners.

    Attributes:
      tasks: tasks whose inputs are sent to owners.
      local_tasks: tasks of stacked blocks whose state lives at their owners: nothing is sent.
      units: (task, block) of each unit of `tasks`.
      owners: the owner of each unit, its index along the axes of owners.
      full_trace: the trace of the update.
      block_trace: the trace of the update of one block, if units are blocks.
    """

    tasks: tuple[OwnedTask, ...]
    local_tasks: tuple[OwnedTask, ...]
    units: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    full_trace: Trace
    block_trace: Trace | None

    @property
    def costs(self) -> list[float]:
        """The cost of each unit."""
        return [self.tasks[task].cost for task, _ in self.units]


def owner_axes(config: StrategyConfig) -> tuple[str, ...]:
    """Return the axes that owners are along: the axes that a placement shards over, and tensor."""
    tensor = ("tensor",) if config.mesh_shape.get("tensor", 1) > 1 else ()
    return (*shard_axes(config.mesh_shape).names, *tensor)


def trace_update(update: Callable[..., PyTree], *args: PyTree) -> tuple[Trace, PyTree]:
    """Return the trace of an update, with all calls inlined except the loss, and the shapes of its results."""
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)

    def flat(leaves: list[jax.Array]) -> list[jax.Array]:
        return inlined(closed.jaxpr, closed.consts, leaves, keep=(LOSS,))

    return trace_of(jax.make_jaxpr(flat)(jax.tree.leaves(args))), shapes


def plan_stages(
    config: StrategyConfig, layout: Layout, full_trace: Trace, trace_block: Callable[[], Trace]
) -> tuple[list[OwnedStage], list[Owned]]:
    """Return the tasks that run on owners, stage by stage, each unit with its owner; and the matrices that get no owner.

    Args:
      config: of the strategy.
      layout: of the parameters.
      full_trace: the trace of the update, whose first variables are the gradients.
      trace_block: makes the trace of the update of a model of one block.
    """
    groups = Groups(full_trace, max(MIN_ELEMENTS, config.layout.min_shard_elements))
    plans: dict[int, list[LeafPlan]] = {}
    for var, plan in zip(full_trace.jaxpr.invars, layout.trained, strict=False):
        if groups.select_large([var]):
            plans.setdefault(groups.group_number(var), []).append(plan)
    count = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    stages: dict[int, list[OwnedTask]] = {}
    local_tasks: dict[int, list[OwnedTask]] = {}
    without_owner: list[Owned] = []
    matched: list[tuple[Trace, dict[jex.Var, jex.Var]] | None] = []  # filled at most once, when it is needed
    for task in find_tasks(full_trace, groups):
        task_plans = plans.get(task.group, [])
        state_axes = {None if plan.owned is None else plan.owned[0] for plan in task_plans}
        if len(state_axes) > 1 or (state_axes <= {None} and count == 1):
            continue
        cut = None
        if task_plans and all(plan.stacked for plan in task_plans):
            if not matched:
                matched.append(_match_block(full_trace, trace_block()))
            cut = _cut_into_blocks(task, full_trace, matched[0], task_plans[0].shape[0])
        block_axes = next(iter(state_axes - {None}), None)
        if block_axes:  # the state is at its owner already; a task of several blocks is left to the partitioner
            if cut is not None:
                local_task = _make_owned_task(config, task, task_plans, full_trace, cut, block_axes)
                local_tasks.setdefault(task.stage, []).append(local_task)
            continue
        if cut is None and any(plan.pipelined for plan in task_plans):
            because = "the optimizer mixes the blocks of a leaf, and each stage of the pipeline holds only some of them"
            without_owner.append(Owned(tuple(plan.path for plan in task_plans), (), because))
            continue
        stages.setdefault(task.stage, []).append(_make_owned_task(config, task, task_plans, full_trace, cut))
    block_trace = matched[0][0] if matched and matched[0] else None
    return [
        _make_stage(tuple(stages.get(i, ())), tuple(local_tasks.get(i, ())), count, full_trace, block_trace)
        for i in sorted({*stages, *local_tasks})
    ], without_owner


def _make_stage(
    tasks: tuple[OwnedTask, ...],
    local_tasks: tuple[OwnedTask, ...],
    num_owners: int,
    full_trace: Trace,
    block_trace: Trace | None,
) -> OwnedStage:
    # units of one program are adjacent, so that devices have the same mixtures of programs
    order = sorted(range(len(tasks)), key=lambda i: (-tasks[i].cost, tasks[i].key, i))
    units = tuple((i, block) for i in order for block in range(tasks[i].blocks))
    owners = share_out([tasks[i].cost for i, _ in units], num_owners)
    return OwnedStage(tasks, local_tasks, units, tuple(owners), full_trace, block_trace)


def _match_block(full_trace: Trace, block_trace: Trace) -> tuple[Trace, dict[jex.Var, jex.Var]] | None:
    matches = match_variables(full_trace.jaxpr, block_trace.jaxpr)
    return None if matches is None else (block_trace, matches)


def _cut_into_blocks(
    task: MatrixTask, full_trace: Trace, matched: tuple[Trace, dict[jex.Var, jex.Var]] | None, blocks: int
) -> tuple[Trace, dict[jex.Var, jex.Var], int] | None:
    """Return the trace of one block, if the task does the same to each block and never mixes blocks."""
    if matched is None or blocks == 1:
        return None
    block_trace, matches = matched
    indices = sorted(task.equations)
    pairs = [full_trace.jaxpr.eqns[i] for i in indices], [block_trace.jaxpr.eqns[i] for i in indices]
    block_dims = [block_dim(var, matches, blocks) for var in (*task.inputs, *task.outputs)]
    if None in block_dims or not is_blockwise(*pairs, matches, blocks):
        return None
    return block_trace, matches, blocks


def _make_owned_task(
    config: StrategyConfig,
    task: MatrixTask,
    plans: Sequence[LeafPlan],
    full_trace: Trace,
    cut: tuple[Trace, dict[jex.Var, jex.Var], int] | None,
    state_axes: str | tuple[str, ...] | None = None,
) -> OwnedTask:
    """Return a task as units; `state_axes` are the axes that blocks are sharded over if the state is at owners."""
    unit_trace, matches, blocks = (full_trace, None, 1) if cut is None else cut
    block_axes = state_axes or ("pipeline" if any(plan.pipelined for plan in plans) else None)
    num_parts = math.prod(config.mesh_shape[axis] for axis in spec_axes((block_axes,)))

    def transfer_of(var: jex.Var, *, large: bool) -> Transfer:
        dim = None if matches is None else block_dim(var, matches, blocks)
        unit = shape_of(var if matches is None else matches[var])
        spec = _sent_spec(config, var, plans, dim) if large and state_axes is None else None
        local_spec = PartitionSpec(*[None] * dim, block_axes) if dim is not None and num_parts > 1 else PartitionSpec()
        return Transfer(local_spec if spec is None else spec, spec is not None, unit.shape, np.dtype(unit.dtype), dim)

    min_elements = max(MIN_ELEMENTS, config.layout.min_shard_elements)
    is_large = lambda var: math.prod(shape_of(var).shape) >= min_elements  # noqa: E731
    reads = [*task.inputs, *task.small_inputs]
    unit_var = lambda var: var if matches is None else matches[var]  # noqa: E731
    input_vars, output_vars = [unit_var(var) for var in reads], [unit_var(var) for var in task.outputs]
    part = closed_part(unit_trace, task.equations, input_vars, output_vars)
    inputs = tuple(transfer_of(var, large=is_large(var)) for var in reads)
    outputs = tuple(transfer_of(var, large=is_large(var)) for var in task.outputs)
    return OwnedTask(
        task=task,
        inputs=inputs,
        outputs=outputs,
        input_vars=tuple(input_vars),
        output_vars=tuple(output_vars),
        key=f"{part} {inputs} {outputs}",
        per_block=cut is not None,
        blocks=blocks // num_parts,
        cost=float(sum(_flops(eqn) for eqn in part.eqns)),
        paths=tuple(plan.path for plan in plans),
    )


def closed_part(
    trace: Trace, equations: Iterable[int], inputs: Sequence[jex.Var], outputs: Sequence[jex.Var]
) -> jex.Jaxpr:
    """Return these equations as a jaxpr without constants."""
    return trace.jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=[trace.jaxpr.eqns[i] for i in sorted(equations)],
        debug_info=trace.jaxpr.debug_info.with_unknown_names(),
    )


def _sent_spec(
    config: StrategyConfig, var: jex.Var, plans: Sequence[LeafPlan], dim: int | None
) -> PartitionSpec | None:
    """Return a spec that shards a value over all axes of owners; None if no dim allows it, or the leaf is replicated."""
    shape, sizes = shape_of(var).shape, config.mesh_shape
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
        shape = shape_of(eqn.invars[0]).shape
        return _DECOMPOSITION_FLOPS[name] * math.prod(shape) * min(shape[-2:])
    return float(sum(math.prod(shape_of(var).shape) for var in eqn.outvars))


_DECOMPOSITION_FLOPS = {"cholesky": 1 / 3, "eig": 25.0, "eigh": 9.0, "lu": 2 / 3, "geqrf": 2.0, "qr": 4.0, "svd": 20.0}
"""Approximate flops of a decomposition, divided by m n min(m, n). Golub and Van Loan, "Matrix Computations"."""
