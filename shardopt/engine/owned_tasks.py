"""The tasks of an update as units of work on owners: what each moves, what it costs, and which device runs it."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.core.jaxprs import called
from shardopt.core.trace import Trace, inlined, shape_of, trace_of
from shardopt.core.types import PyTree
from shardopt.engine.blockwise import block_dim, is_blockwise, same_equations
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout
from shardopt.engine.matrix_tasks import OPAQUE, Groups, Task, find_tasks
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan, Owned, shard_axes
from shardopt.partition.balance import share_out

LEAST = 64
"""Values with fewer elements are small wherever leaves are: they are sent to all."""


class Moved(NamedTuple):
    """A value on its way to an owner or back.

    Attributes:
      spec: how it is sharded: over every axis that owners are along if it is moved, over none if it is not.
      moves: whether it goes to the owner, or comes from there; what does not is there, or small, or replicated, on every device.
      shape: of one unit, at its owner.
      dtype: its dtype.
      dim: the dim that counts blocks; None if units are no blocks.
    """

    spec: PartitionSpec
    moves: bool
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None


class OwnedTask(NamedTuple):
    """A task whose units, all of it or a block each, run on owners.

    Attributes:
      task: what is run.
      inputs: its large inputs and then its given ones.
      outputs: of it.
      reads: the inputs, as variables of the trace that a unit is run from: that of the update, or of one block.
      makes: the outputs.
      key: tasks with equal keys run the same program.
      cut: whether a unit is a block.
      blocks: how many units a device's stage has.
      cost: of a unit, in flops.
      paths: the parameters that it is of.
    """

    task: Task
    inputs: tuple[Moved, ...]
    outputs: tuple[Moved, ...]
    reads: tuple[jex.Var, ...]
    makes: tuple[jex.Var, ...]
    key: str
    cut: bool
    blocks: int
    cost: float
    paths: tuple[str, ...]


class OwnedStage(NamedTuple):
    """Tasks that run at once, unit by unit on their owners.

    Attributes:
      tasks: the tasks that owners are sent.
      here: those of stacked blocks whose state lives at their owners: nothing is sent.
      units: (task, block) of each unit of `tasks`.
      owners: the owner of each unit, a number along the axes.
      whole: the trace that tasks are of.
      single: that of one block, if units are blocks.
    """

    tasks: tuple[OwnedTask, ...]
    here: tuple[OwnedTask, ...]
    units: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    whole: Trace
    single: Trace | None

    @property
    def costs(self) -> list[float]:
        """The cost of each unit."""
        return [self.tasks[task].cost for task, _ in self.units]


def owner_axes(config: StrategyConfig) -> tuple[str, ...]:
    """Return the axes that owners are along: those that a placement shards over, and tensor."""
    tensor = ("tensor",) if config.mesh_shape.get("tensor", 1) > 1 else ()
    return (*shard_axes(config.mesh_shape).names, *tensor)


def trace_update(update: Callable[..., PyTree], *args: PyTree) -> tuple[Trace, PyTree]:
    """Return the trace of an update, with all written out that it calls but the loss, and the shapes of its results."""
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)

    def flat(leaves: list[jax.Array]) -> list[jax.Array]:
        return inlined(closed.jaxpr, closed.consts, leaves, keep=(OPAQUE,))

    return trace_of(jax.make_jaxpr(flat)(jax.tree.leaves(args))), shapes


def plan_stages(
    config: StrategyConfig, layout: Layout, whole: Trace, trace_single: Callable[[], Trace]
) -> tuple[list[OwnedStage], list[Owned]]:
    """Return the tasks of an update that are run by owners, stage by stage, each unit with its owner; and what has none.

    Args:
      config: of the strategy.
      layout: of the parameters.
      whole: the trace of the update, whose first variables are the gradients.
      trace_single: makes that of a model of one block.
    """
    groups = Groups(whole, max(LEAST, config.min_shard_elements))
    plans: dict[int, list[LeafPlan]] = {}
    for var, plan in zip(whole.jaxpr.invars, layout.trained, strict=False):
        if groups.large([var]):
            plans.setdefault(groups.number(var), []).append(plan)
    count = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    stages: dict[int, list[OwnedTask]] = {}
    here: dict[int, list[OwnedTask]] = {}
    left: list[Owned] = []
    matched: list[tuple[Trace, dict[jex.Var, jex.Var]] | None] = []  # once, if it is needed
    for task in find_tasks(whole, groups):
        of = plans.get(task.group, [])
        at = {None if plan.owned is None else plan.owned[0] for plan in of}
        if len(at) > 1 or (at <= {None} and count == 1):
            continue
        cut = None
        if of and all(plan.stacked for plan in of):
            if not matched:
                matched.append(_matched(whole, trace_single()))
            cut = _cut_into_blocks(task, whole, matched[0], of[0].shape[0])
        owner = next(iter(at - {None}), None)
        if owner:  # on its owner already; a task of several blocks is left to the partitioner
            if cut is not None:
                here.setdefault(task.stage, []).append(_owned(config, task, of, whole, cut, owner))
            continue
        if cut is None and any(plan.pipelined for plan in of):
            because = (
                "the optimizer does not treat the blocks of a leaf apart, and stages of the pipeline hold some each"
            )
            left.append(Owned(tuple(plan.path for plan in of), (), because))
            continue
        stages.setdefault(task.stage, []).append(_owned(config, task, of, whole, cut))
    single = matched[0][0] if matched and matched[0] else None
    numbers = sorted({*stages, *here})
    return [_stage(tuple(stages.get(i, ())), tuple(here.get(i, ())), count, whole, single) for i in numbers], left


def _stage(
    tasks: tuple[OwnedTask, ...], here: tuple[OwnedTask, ...], owners: int, whole: Trace, single: Trace | None
) -> OwnedStage:
    # units of one program side by side, so that devices have the same mixtures of programs
    order = sorted(range(len(tasks)), key=lambda i: (-tasks[i].cost, tasks[i].key, i))
    units = tuple((i, block) for i in order for block in range(tasks[i].blocks))
    found = share_out([tasks[i].cost for i, _ in units], owners)
    return OwnedStage(tasks, here, units, tuple(found), whole, single)


def _matched(whole: Trace, single: Trace) -> tuple[Trace, dict[jex.Var, jex.Var]] | None:
    same = same_equations(whole.jaxpr, single.jaxpr)
    return None if same is None else (single, same)


def _cut_into_blocks(
    task: Task, whole: Trace, matched: tuple[Trace, dict[jex.Var, jex.Var]] | None, blocks: int
) -> tuple[Trace, dict[jex.Var, jex.Var], int] | None:
    """Return the trace of one block, if the task does the same to each, and apart."""
    if matched is None or blocks == 1:
        return None
    one, same = matched
    chosen = sorted(task.equations)
    pairs = [whole.jaxpr.eqns[i] for i in chosen], [one.jaxpr.eqns[i] for i in chosen]
    counted = [block_dim(var, same, blocks) for var in (*task.inputs, *task.outputs)]
    if None in counted or not is_blockwise(*pairs, same, blocks):
        return None
    return one, same, blocks


def _owned(
    config: StrategyConfig,
    task: Task,
    plans: Sequence[LeafPlan],
    whole: Trace,
    cut: tuple[Trace, dict[jex.Var, jex.Var], int] | None,
    owner: str | tuple[str, ...] | None = None,
) -> OwnedTask:
    """Return a task as units; `owner` are the axes that blocks are sharded over already."""
    trace, same, blocks = (whole, None, 1) if cut is None else cut
    over = owner or ("pipeline" if any(plan.pipelined for plan in plans) else None)
    parts = math.prod(config.mesh_shape[axis] for axis in spec_axes((over,)))

    def moved(var: jex.Var, *, large: bool) -> Moved:
        dim = None if same is None else block_dim(var, same, blocks)
        one = shape_of(var if same is None else same[var])
        spec = _moved_spec(config, var, plans, dim) if large and owner is None else None
        here = PartitionSpec(*[None] * dim, over) if dim is not None and parts > 1 else PartitionSpec()
        return Moved(here if spec is None else spec, spec is not None, one.shape, np.dtype(one.dtype), dim)

    least = max(LEAST, config.min_shard_elements)
    large = lambda var: math.prod(shape_of(var).shape) >= least  # noqa: E731
    reads = [*task.inputs, *task.given]
    inner = lambda var: var if same is None else same[var]  # noqa: E731
    inside, outside = [inner(var) for var in reads], [inner(var) for var in task.outputs]
    part = closed_part(trace, task.equations, inside, outside)
    inputs = tuple(moved(var, large=large(var)) for var in reads)
    outputs = tuple(moved(var, large=large(var)) for var in task.outputs)
    return OwnedTask(
        task=task,
        inputs=inputs,
        outputs=outputs,
        reads=tuple(inside),
        makes=tuple(outside),
        key=f"{part} {inputs} {outputs}",
        cut=cut is not None,
        blocks=blocks // parts,
        cost=float(sum(_flops(eqn) for eqn in part.eqns)),
        paths=tuple(plan.path for plan in plans),
    )


def closed_part(
    trace: Trace, equations: Iterable[int], reads: Sequence[jex.Var], makes: Sequence[jex.Var]
) -> jex.Jaxpr:
    """Return these equations as a program that closes over nothing."""
    return trace.jaxpr.replace(
        constvars=[],
        invars=list(reads),
        outvars=list(makes),
        eqns=[trace.jaxpr.eqns[i] for i in sorted(equations)],
        debug_info=trace.jaxpr.debug_info.with_unknown_names(),
    )


def _moved_spec(
    config: StrategyConfig, var: jex.Var, plans: Sequence[LeafPlan], dim: int | None
) -> PartitionSpec | None:
    """Return how a value is sharded over all axes that owners are along; None if it cannot be, or lives replicated."""
    shape, sizes = shape_of(var).shape, config.mesh_shape
    plan = next((plan for plan in plans if plan.shape == shape), None)
    entries: list[tuple[str, ...]] = [()] * len(shape)
    if plan is not None:
        if plan.dim is None:
            return None
        entries = [tuple(spec_axes((entry,))) for entry in plan.spec(sharded=True)]
    elif dim is not None and any(plan.pipelined for plan in plans):
        entries[dim] = ("pipeline",)

    def room(at: int, axis: str) -> bool:
        return at != dim and shape[at] % (math.prod(sizes[one] for one in entries[at]) * sizes[axis]) == 0

    for axis in owner_axes(config):
        if any(axis in entry for entry in entries):
            continue
        # beside what is there already, else the longest
        fit = [at for at in range(len(shape)) if room(at, axis)]
        if not fit:
            return None
        at = max(fit, key=lambda at: (bool(set(entries[at]) - {"pipeline"}), shape[at]))
        entries[at] = (*entries[at], axis)
    return PartitionSpec(*(None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries))


def _flops(eqn: jex.JaxprEqn) -> float:
    """Return about how much an equation computes: products exactly, decompositions as some products of their matrix."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (left_sums, _), _ = params["dimension_numbers"]
        left = shape_of(eqn.invars[0]).shape
        return 2.0 * math.prod(shape_of(eqn.outvars[0]).shape) * math.prod(left[dim] for dim in left_sums)
    inner = [sum(_flops(one) for one in jaxpr.eqns) for jaxpr in called(eqn)]
    if inner:
        return params.get("length", 1) * (max(inner) if name == "cond" else sum(inner))
    sizes = [math.prod(shape_of(var).shape) for var in eqn.outvars]
    if name in _DEAR:
        shape = shape_of(eqn.invars[0]).shape
        return _DEAR[name] * math.prod(shape) * min(shape[-2:])
    return float(sum(sizes))


_DEAR = {"cholesky": 1 / 3, "eig": 25.0, "eigh": 9.0, "lu": 2 / 3, "geqrf": 2.0, "qr": 4.0, "svd": 20.0}
"""Flops of a decomposition over those of m n min(m, n), about. Golub and Van Loan, "Matrix Computations"."""
