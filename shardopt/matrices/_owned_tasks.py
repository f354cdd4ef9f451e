"""The tasks of an update as units of work on owners: the arrays that each unit exchanges, its cost,
and its owner.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.matrices._blockwise import block_dim, is_blockwise, match_variables
from shardopt.matrices._matrix_tasks import MatrixTask, find_tasks
from shardopt.mesh import size_along, spec_axes
from shardopt.partition import LeafPlan, Owned, shard_axes
from shardopt.partition._balance import share_out
from shardopt.partition._owners import TENSOR
from shardopt.trace._jaxprs import called_jaxprs, cost_of, shape_of
from shardopt.trace._matrix_work import MIN_ELEMENTS, Groups
from shardopt.trace._parts import Trace, abstract_value, jaxpr_of_part, product_flops

CutLeaves = frozenset[int]
"""The trained leaves, by index, that have a single block in a trace; an empty set is the trace of
the whole update.
"""
WHOLE: CutLeaves = frozenset()


class Transfer(NamedTuple):
    """How an input or output of a unit gets to its owner or back.

    Attributes:
      spec: how it is sharded: over all axes that owners are along if it is sent, over none of them
        if it is not.
      is_sent: whether it is sent to the owner, or back. A value that is not sent is at its owner,
        small, or replicated.
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
      input_vars: the inputs as variables of the trace that a unit runs: the trace of the update, or
        of one block.
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
      axes: the axes that owners are along. Devices along other axes have other matrices, and share
        out those. None: each device runs the units that it has.
      tasks: the tasks.
      units: (task, block) of each unit whose inputs are sent to an owner.
      owners: the owner of each unit, its index along `axes`.
      traces: the traces of the update that units run, by the leaves that are cut.
    """

    axes: tuple[str, ...]
    tasks: tuple[OwnedTask, ...]
    units: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    traces: dict[CutLeaves, Trace]

    @property
    def is_local(self) -> bool:
        """Whether stacked matrices live at their owners, so that nothing is sent."""
        return not self.axes


def owner_axes(config: StrategyConfig) -> tuple[str, ...]:
    """Return the axes that owners are along: the axes that a placement shards over, and tensor."""
    tensor = ("tensor",) if config.mesh_shape.get("tensor", 1) > 1 else ()
    return (*shard_axes(config.mesh_shape).names, *tensor)


def owner_numbers(config: StrategyConfig, axes: Sequence[str]) -> np.ndarray:
    """Return the numbers of owners, [devices along the other axes of owners, devices along `axes`]."""
    all_axes = owner_axes(config)
    sizes = config.mesh_shape
    numbers = np.arange(_size(config, all_axes)).reshape([sizes[axis] for axis in all_axes])
    order = [*(axis for axis in all_axes if axis not in axes), *axes]
    return numbers.transpose([all_axes.index(axis) for axis in order]).reshape(
        -1, _size(config, axes)
    )


def _size(config: StrategyConfig, axes: Sequence[str]) -> int:
    return size_along(config.mesh_shape, axes)


def plan_stages(
    config: StrategyConfig, layout: Layout, full_trace: Trace, retrace: Callable[[CutLeaves], Trace]
) -> tuple[list[OwnedStage], list[Owned]]:
    """Return the tasks that run on owners, stage by stage, each unit with its owner.

    And the matrices that get no owner.

    Args:
      config: of the strategy.
      layout: of the parameters.
      full_trace: the trace of the update, whose first variables are the gradients.
      retrace: makes the trace of the update with a single block for each of these leaves.
    """
    groups = Groups(full_trace, max(MIN_ELEMENTS, config.layout.min_shard_elements))
    leaves = _leaves_of_groups(groups, full_trace.jaxpr.invars[: len(layout.trained)])
    tasks = find_tasks(full_trace, groups)
    cuts = _Cuts(
        layout.trained, full_trace, retrace, [leaves.get(task.group, []) for task in tasks]
    )
    all_axes = owner_axes(config)
    specs = _specs_of(layout, full_trace)
    placed: dict[tuple[int, tuple[str, ...]], list[OwnedTask]] = {}
    without_owner: list[Owned] = []
    for task in tasks:
        task_leaves = leaves.get(task.group, [])
        task_plans = [layout.trained[i] for i in task_leaves]
        at_owners = {is_at_owners(plan) for plan in task_plans}
        # A task over leaves here and leaves at owners is left to the partitioner, as on one device.
        if len(at_owners) == 2 or (True not in at_owners and _size(config, all_axes) == 1):
            continue
        cut = cuts.cut(task, task_leaves)
        if cut is None and True in at_owners:
            continue  # a task of several blocks is left to the partitioner
        if cut is None and any(plan.pipelined for plan in task_plans):
            because = (
                "the optimizer mixes the blocks of a leaf, and each stage of the pipeline holds"
                " only some of them"
            )
            without_owner.append(Owned(tuple(plan.path for plan in task_plans), (), because))
            continue
        block_axes = ()
        axes = all_axes
        if cut is not None:
            block_axes = tuple(spec_axes(task_plans[0].state_spec(sharded=True)[:1]))
            axes = _axes_between(config, task_plans, block_axes)
        owned_task = _make_owned_task(
            config, task, task_plans, full_trace, specs, cut, block_axes, is_local=not axes
        )
        placed.setdefault((task.stage, axes), []).append(owned_task)
    return _in_order(config, placed, cuts.traces), without_owner


def _leaves_of_groups(groups: Groups, grads: Sequence[jex.Var]) -> dict[int, list[int]]:
    """Return group -> the leaves, by index, of its large gradients."""
    leaves: dict[int, list[int]] = {}
    for i, var in enumerate(grads):
        if groups.select_large([var]):
            leaves.setdefault(groups.group_number(var), []).append(i)
    return leaves


def is_at_owners(plan: LeafPlan) -> bool:
    """Return whether the state of stacked matrices is at their owners between steps."""
    return plan.stacked and plan.owned is not None


def _axes_between(
    config: StrategyConfig, plans: Sequence[LeafPlan], block_axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the axes that share out blocks; none if each device holds whole blocks already."""
    axes = tuple(axis for axis in owner_axes(config) if axis not in block_axes)
    # No axes: nothing is sent, and each device runs the blocks that it holds.
    is_local = is_at_owners(plans[0]) or _size(config, axes) == 1 or _are_whole(plans)
    return () if is_local else axes


def _in_order(
    config: StrategyConfig,
    placed: dict[tuple[int, tuple[str, ...]], list[OwnedTask]],
    traces: dict[CutLeaves, Trace],
) -> list[OwnedStage]:
    """Return the stages in the order of their numbers; tasks without axes of owners are local."""
    loads = {number: np.zeros(_size(config, owner_axes(config))) for number, _ in placed}
    result = []
    # those with the fewest owners first: the others have more freedom to even out
    for number, axes in sorted(placed, key=lambda key: (key[0], len(key[1]), key[1])):
        tasks = tuple(placed[number, axes])
        if axes:
            result.append(_make_stage(config, axes, tasks, loads[number], traces))
        else:
            result.append(OwnedStage((), tasks, (), (), traces))
    return result


def _specs_of(layout: Layout, trace: Trace) -> dict[jex.Var, PartitionSpec]:
    """Return the specs of the state that an update reads and returns."""
    count = len(layout.trained)
    opt_state = layout.specs.opt_state
    specs = jax.tree.leaves(layout.reduce.split(opt_state)[0])
    state_vars = (*trace.jaxpr.invars[count : -count - 1], *trace.jaxpr.outvars[count:])
    return {
        var: spec
        for var, spec in zip(state_vars, specs * 2, strict=True)
        if not isinstance(var, jex.Literal)
    }


def _make_stage(
    config: StrategyConfig,
    axes: tuple[str, ...],
    tasks: tuple[OwnedTask, ...],
    loads: np.ndarray,
    traces: dict[CutLeaves, Trace],
) -> OwnedStage:
    """Return tasks with an owner for each unit, and add the costs of the units to `loads`, the
    loads of all owners.
    """
    # units of one program are adjacent, so that devices have the same mixtures of programs
    order = sorted(range(len(tasks)), key=lambda i: (-tasks[i].cost, tasks[i].key, i))
    units = tuple((i, block) for i in order for block in range(tasks[i].blocks))
    numbers = owner_numbers(config, axes)
    owners = share_out(
        [tasks[i].cost for i, _ in units], numbers.shape[1], loads[numbers].max(axis=0)
    )
    stage = OwnedStage(axes, tasks, units, tuple(owners), traces)
    add_loads(stage, numbers, loads)
    return stage


def add_loads(stage: OwnedStage, numbers: np.ndarray, loads: np.ndarray) -> None:
    """Add the costs of the units of a stage to the loads of their owners.

    `numbers` come from `owner_numbers`.
    """
    for (task, _), owner in zip(stage.units, stage.owners, strict=True):
        loads[numbers[:, owner]] += stage.tasks[task].cost


def _are_whole(plans: Sequence[LeafPlan]) -> bool:
    """Return whether leaves are sharded by whole matrices, along the first dim."""
    return all(
        plan.dim == 0 and not plan.experts and TENSOR not in tuple(plan.tensor) for plan in plans
    )


class _BlockTask(NamedTuple):
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
    """Finds the tasks that do the same to each block of a `BlockModel`, or to each matrix of any
    other stacked leaf.

    Each leaf of three or more dims may be a stack. The proof is a trace of the update whose stacks
    have one matrix each. All leaves are cut in one trace. If an optimizer works differently then,
    leaves of each shape are cut in a trace of their own.
    """

    def __init__(
        self,
        plans: Sequence[LeafPlan],
        full_trace: Trace,
        retrace: Callable[[CutLeaves], Trace],
        groups: Sequence[Sequence[int]],
    ):
        self.plans = plans
        self.full_trace = full_trace
        self.retrace = retrace
        self.traces = {WHOLE: full_trace}
        self.matches: dict[CutLeaves, dict[jex.Var, jex.Var] | None] = {}
        self.blocks = frozenset(i for i, plan in enumerate(plans) if plan.stacked)
        self.stacks = frozenset(i for leaves in groups if self.are_stacks(leaves) for i in leaves)

    def are_stacks(self, leaves: Sequence[int]) -> bool:
        """Return whether leaves outside of a `BlockModel` may be stacks of equally many matrices,
        with the same devices.
        """
        plans = [self.plans[i] for i in leaves]
        if any(plan.stacked or len(plan.shape) < 3 for plan in plans):
            return False
        return len({(plan.shape[0], plan.spec(sharded=True)[0]) for plan in plans}) == 1

    def cut(self, task: MatrixTask, leaves: Sequence[int]) -> _BlockTask | None:
        """Return a task of some leaves in blocks; None if it mixes blocks, or has a single one."""
        if leaves and self.blocks.issuperset(leaves):
            attempts = [self.blocks]
        elif self.stacks.issuperset(leaves) and leaves:
            shapes = {self.plans[i].shape for i in leaves}
            attempts = [
                self.stacks,
                frozenset(i for i in self.stacks if self.plans[i].shape in shapes),
            ]
        else:
            return None
        blocks = self.plans[leaves[0]].shape[0]
        for cut_leaves in attempts if blocks > 1 else ():
            matches = self.match(cut_leaves)
            if matches is not None:
                trace = self.traces[cut_leaves]
                return (
                    _BlockTask(cut_leaves, trace, matches, blocks)
                    if self.is_cut(task, trace, matches, blocks)
                    else None
                )
        return None

    def is_cut(
        self, task: MatrixTask, trace: Trace, matches: dict[jex.Var, jex.Var], blocks: int
    ) -> bool:
        """Return whether a task does the same to each block, and never mixes blocks."""
        indices = sorted(task.equations)
        # The two traces have the same equations in the same places, as `match` has shown.
        pairs = (
            [self.full_trace.jaxpr.eqns[i] for i in indices],
            [trace.jaxpr.eqns[i] for i in indices],
        )
        block_dims = [block_dim(var, matches, blocks) for var in (*task.inputs, *task.outputs)]
        return None not in block_dims and is_blockwise(*pairs, matches, blocks)

    def match(self, leaves: CutLeaves) -> dict[jex.Var, jex.Var] | None:
        """Return variable of the full trace -> variable of the trace with these leaves cut.

        None if the traces differ.
        """
        if leaves not in self.matches:
            try:
                self.traces[leaves] = self.retrace(leaves)
            except Exception:
                if leaves == self.blocks:
                    raise
                # the optimizer refuses such a shape, so it does not treat it as a stack
                self.matches[leaves] = None
            else:
                self.matches[leaves] = match_variables(
                    self.full_trace.jaxpr, self.traces[leaves].jaxpr
                )
        return self.matches[leaves]


def _make_owned_task(
    config: StrategyConfig,
    task: MatrixTask,
    plans: Sequence[LeafPlan],
    full_trace: Trace,
    specs: Mapping[jex.Var, PartitionSpec],
    cut: _BlockTask | None,
    block_axes: tuple[str, ...],
    *,
    is_local: bool = False,
) -> OwnedTask:
    """Return a task as units.

    Args:
      config: of the strategy.
      task: the task.
      plans: the plans of its parameters.
      full_trace: the trace of the update.
      specs: the specs of the state that the update reads and returns.
      cut: the task in blocks; None if it is a single unit.
      block_axes: the axes that shard the blocks.
      is_local: whether each device has whole blocks, so that nothing is sent.
    """
    unit_trace, matches, blocks = (full_trace, None, 1) if cut is None else cut[1:]
    num_parts = _size(config, block_axes)
    min_elements = max(MIN_ELEMENTS, config.layout.min_shard_elements)

    def unit_var(var: jex.Var) -> jex.Var:
        return var if matches is None else matches[var]

    def transfer_of(var: jex.Var) -> Transfer:
        dim = None if matches is None else block_dim(var, matches, blocks)
        unit = abstract_value(unit_var(var))
        spec = None
        if math.prod(shape_of(var)) >= min_elements and not is_local:
            spec = _sent_spec(config, var, specs.get(var), plans, dim, block_axes)
        is_sent = spec is not None
        if spec is None:
            spec = PartitionSpec()
            if dim is not None and num_parts > 1:
                spec = PartitionSpec(*[None] * dim, block_axes)
        return Transfer(spec, is_sent, unit.shape, np.dtype(unit.dtype), dim)

    reads = [*task.inputs, *task.small_inputs]
    input_vars = [unit_var(var) for var in reads]
    output_vars = [unit_var(var) for var in task.outputs]
    part = jaxpr_of_part(unit_trace, task.equations, input_vars, output_vars).replace(constvars=[])
    inputs = tuple(map(transfer_of, reads))
    outputs = tuple(map(transfer_of, task.outputs))
    return OwnedTask(
        task=task,
        inputs=inputs,
        outputs=outputs,
        input_vars=tuple(input_vars),
        output_vars=tuple(output_vars),
        # The text of the program and of its transfers: units with one key share a branch and its
        # slots.
        key=f"{part} {inputs} {outputs}",
        cut=WHOLE if cut is None else cut.leaves,
        blocks=blocks // num_parts,
        cost=float(sum(cost_of(eqn, _flops_of_primitive) for eqn in part.eqns)),
        paths=tuple(plan.path for plan in plans),
    )


def _sent_spec(
    config: StrategyConfig,
    var: jex.Var,
    spec: PartitionSpec | None,
    plans: Sequence[LeafPlan],
    dim: int | None,
    block_axes: tuple[str, ...],
) -> PartitionSpec | None:
    """Return a spec that shards a value over all axes of owners.

    None if no dim allows it, or the leaf is replicated.

    It has as much as possible of `spec`, which is how state is sharded between steps: the
    partitioner moves the rest.
    """
    shape = shape_of(var)
    sizes = config.mesh_shape
    plan = next((plan for plan in plans if plan.shape == shape), None)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    if plan is not None:
        if plan.dim is None:
            return None
        entries = _entries(plan.spec(sharded=True))
    elif spec is not None and (dim is None or tuple(spec_axes((spec[dim],))) == block_axes):
        entries = _entries(spec)
    elif dim is not None:
        entries[dim] = block_axes
    for axis in owner_axes(config):
        if axis in spec_axes(entries):
            continue
        candidates = [
            i
            for i, entry in enumerate(entries)
            if i != dim and shape[i] % (size_along(sizes, entry) * sizes[axis]) == 0
        ]
        if not candidates:
            return None
        # prefer a dim that is sharded already, then the longest dim
        best_dim = max(candidates, key=lambda i: (bool(set(entries[i]) - {"pipeline"}), shape[i]))
        # The new axis is the minor one: devices along it cut the shard that they hold already.
        entries[best_dim] = (*entries[best_dim], axis)
    return PartitionSpec(*entries)


def _entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the axes of each dim."""
    return [tuple(spec_axes((entry,))) for entry in spec]


def _flops_of_primitive(eqn: jex.JaxprEqn) -> float | None:
    """Return the approximate flops of an equation: exact for products, an estimate for
    decompositions.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        return product_flops(eqn)
    if called_jaxprs(eqn):
        return None
    if name in _DECOMPOSITION_FLOPS:
        shape = shape_of(eqn.invars[0])
        return _DECOMPOSITION_FLOPS[name] * math.prod(shape) * min(shape[-2:])
    return float(sum(math.prod(shape_of(var)) for var in eqn.outvars))


_DECOMPOSITION_FLOPS = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "lu": 2 / 3,
    "geqrf": 2.0,
    "qr": 4.0,
    "svd": 20.0,
}
"""Approximate flops of a decomposition, divided by m n min(m, n). Golub and Van Loan, "Matrix
Computations".
"""
