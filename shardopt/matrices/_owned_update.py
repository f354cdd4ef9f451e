"""An optimizer's update whose work on matrices is done at owners: all-to-alls send shards there and
results back.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._transformation import ExtraArgs, call_update
from shardopt.config._update_trace import opaque, trace_of_update, trace_update
from shardopt.core import PyTree, abstract, with_leaves
from shardopt.matrices._owned_sides import Sides, plan_sides
from shardopt.matrices._owned_stage import run_stage, stage_bytes
from shardopt.matrices._owned_tasks import (
    WHOLE,
    CutLeaves,
    OwnedStage,
    OwnedTask,
    Transfer,
    add_loads,
    is_at_owners,
    owner_axes,
    owner_numbers,
    plan_stages,
)
from shardopt.matrices._owners import move, moved_bytes
from shardopt.mesh import size_along, spec_axes
from shardopt.partition import Owned, Owners
from shardopt.trace._matrix_work import MIN_ELEMENTS
from shardopt.trace._parts import Atom, Trace, abstract_value, part_of, slice_of, variables_of


class OwnedUpdate:
    """An update whose work on matrices is done at owners; see `OptimizerUpdate`."""

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        extra_args: ExtraArgs,
    ) -> tuple[PyTree, PyTree]:
        """Return the result of `call_update`, with products and decompositions of matrices run by
        their owners; in the global view.

        Gradients, parameters and updates are sharded as the placement says. Equations that need
        state at owners run there, see `plan_sides`. Products and decompositions are units, a matrix
        or stacked block each. Each owner runs a unit alone, so its bits do not depend on the number
        of devices. If the state of a unit is not at its owner, the owner gets all inputs of the
        unit, and sends every device its shard of the result. Psi bytes sent and returned cost
        (N-1)/N^2 Psi per device each way.
        """

        def update(
            grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array
        ) -> tuple[PyTree, PyTree]:
            # the loss and gradients of this trace, because those in the closure belong to another
            # trace
            traced_args = extra_args._replace(value=value, grad=grads)
            return call_update(config.update.tx, grads, opt_state, params, opaque(traced_args))

        args = grads, opt_state, params, extra_args.value
        trace, shapes = trace_update(update, *args)
        retrace_update = functools.partial(retrace, config, layout, abstract(extra_args.value))
        stages, _ = plan_stages(config, layout, trace, retrace_update)
        sides = _sides(config, layout, trace, stages)
        if not stages and not sides.moves:
            return call_update(config.update.tx, grads, opt_state, params, extra_args)
        variables = [*trace.jaxpr.constvars, *trace.jaxpr.invars]
        values = dict(zip(variables, [*trace.consts, *jax.tree.leaves(args)], strict=True))
        # A variable moves once, however many equations read it on the other side.
        moved_values: dict[jex.Var, jax.Array] = {}

        def read(var: jex.Var, *, at_owners: bool) -> jax.Array:
            variable_move = sides.moves.get(var)
            if variable_move is None or variable_move.to_owners is not at_owners:
                return values[var]
            if var not in moved_values:
                moved_values[var] = move(
                    config, variable_move.plan, values[var], to_owners=at_owners
                )
            return moved_values[var]

        def compute(targets: Sequence[Atom]) -> None:
            evaluate(
                trace, values, targets, lambda var, i: read(var, at_owners=i in sides.at_owners)
            )

        # Before each stage `values` has all that the inputs of its tasks are computed from. The
        # update runs equation by equation, and the partitioner places those between the stages.
        for stage in stages:
            inputs = [
                [*owned_task.task.inputs, *owned_task.task.small_inputs]
                for owned_task in stage.tasks
            ]
            compute([var for task_inputs in inputs for var in task_inputs])
            stage_args = [
                [read(var, at_owners=stage.is_local) for var in task_inputs]
                for task_inputs in inputs
            ]
            outputs = run_stage(config, stage, retrace_update, stage_args)
            for owned_task, task_outputs in zip(stage.tasks, outputs, strict=True):
                values |= dict(zip(owned_task.task.outputs, task_outputs, strict=True))
        compute(trace.jaxpr.outvars)
        results = [
            var.val if isinstance(var, jex.Literal) else read(var, at_owners=not sides.returns[i])
            for i, var in enumerate(trace.jaxpr.outvars)
        ]
        return with_leaves(shapes, results)

    def describe(self, config: StrategyConfig, layout: Layout) -> Owners | None:
        """Return which devices do the work of an update on matrices.

        None if it is not divided between owners.
        """
        count = size_along(config.mesh_shape, owner_axes(config))
        if config.layout.opt_state_layout != "matrices" or count == 1:
            return None
        retrace_update = functools.partial(
            retrace, config, layout, jax.ShapeDtypeStruct((), jnp.float32)
        )
        trace = retrace_update(WHOLE)
        stages, without_owner = plan_stages(config, layout, trace, retrace_update)
        rows = _rows_of_state(config, layout, stages)
        loads = np.zeros(count)
        sent = 0
        padding = 0
        for stage in stages:
            stage_sent, stage_padding = stage_bytes(config, stage)
            sent += stage_sent
            padding += stage_padding
            if stage.is_local:
                loads += sum(local_task.cost * local_task.blocks for local_task in stage.tasks)
            else:
                rows += _rows_of_units(config, stage)
                add_loads(stage, owner_numbers(config, stage.axes), loads)
        imbalance = float(loads.max() / loads.mean() - 1) if loads.any() else 0.0
        moves = _sides(config, layout, trace, stages).moves
        sent += sum(
            moved_bytes(config, variable_move.plan, abstract_value(var).dtype)
            for var, variable_move in moves.items()
        )
        return Owners((*rows, *without_owner), count, imbalance, sent, padding)


def _sides(
    config: StrategyConfig, layout: Layout, trace: Trace, stages: Sequence[OwnedStage]
) -> Sides:
    devices = size_along(config.mesh_shape, owner_axes(config))
    tasks = {i for local_task in _local_tasks(stages) for i in local_task.task.equations}
    return plan_sides(
        layout, trace, max(MIN_ELEMENTS, config.layout.min_shard_elements), tasks, devices
    )


def _local_tasks(stages: Sequence[OwnedStage]) -> list[OwnedTask]:
    return [task for stage in stages if stage.is_local for task in stage.tasks]


def _rows_of_state(
    config: StrategyConfig, layout: Layout, stages: Sequence[OwnedStage]
) -> list[Owned]:
    """Return the owners of the blocks of each leaf whose state is there."""
    local_paths = {path for local_task in _local_tasks(stages) for path in local_task.paths}
    rows = []
    for plan in layout.trained:
        if not is_at_owners(plan) and plan.path not in local_paths:
            continue
        block_axes = [
            axis for axis in spec_axes(plan.state_spec(sharded=True)[:1]) if axis != "pipeline"
        ]
        # devices along tensor repeat the work if no rule splits the leaf: the first of them is
        # named
        numbers = owner_numbers(config, block_axes)[0]
        blocks = plan.shape[0] // (config.mesh_shape["pipeline"] if plan.pipelined else 1)
        owners = tuple(int(numbers[i * len(numbers) // blocks]) for i in range(blocks))
        rows.append(Owned((plan.path,), owners, state=True))
    return rows


def _rows_of_units(config: StrategyConfig, stage: OwnedStage) -> list[Owned]:
    """Return the owners of the units of each task whose inputs are sent to them."""
    numbers = owner_numbers(config, stage.axes)
    owners: list[list[int]] = [[] for _ in stage.tasks]
    for (task, _), owner in zip(stage.units, stage.owners, strict=True):
        owners[task].append(owner)
    return [
        Owned(
            task.paths,
            tuple(numbers[:, task_owners].ravel().tolist()),
            arrays=(_count_sent(task.inputs), _count_sent(task.outputs)),
        )
        for task, task_owners in zip(stage.tasks, owners, strict=True)
    ]


def _count_sent(transfers: Sequence[Transfer]) -> int:
    return sum(transfer.is_sent for transfer in transfers)


def retrace(
    config: StrategyConfig, layout: Layout, value: jax.ShapeDtypeStruct, cut: CutLeaves
) -> Trace:
    """Return the trace of the update of shapes, for the model, or for a model with a single block
    in some leaves.

    Args:
      config: of the strategy.
      layout: of the parameters.
      value: the shape of the loss.
      cut: the trained leaves, by index, that have a single block.
    """
    shapes = [
        jax.ShapeDtypeStruct((1, *plan.shape[1:]) if i in cut else plan.shape, plan.dtype)
        for i, plan in enumerate(layout.trained)
    ]
    return trace_of_update(
        config.update.tx, layout.merge([None] * len(layout.plans), shapes), value
    )


def evaluate(
    trace: Trace,
    values: dict[jex.Var, jax.Array],
    targets: Sequence[Atom],
    read: Callable[[jex.Var, int], jax.Array] | None = None,
) -> None:
    """Compute the variables `targets`, equation by equation, and add all results to `values`.

    Args:
      trace: the equations.
      values: the known variables, with their values.
      targets: variables to compute.
      read: `read(var, i)`, the value of a known variable for equation i; None: its entry of
        `values`.
    """
    equations, _ = slice_of(trace, targets, stop=set(values))
    for i in sorted(equations):
        eqn = trace.jaxpr.eqns[i]
        reads = variables_of(eqn.invars)
        args = [values[var] if read is None else read(var, i) for var in reads]
        results = part_of(trace, {i}, reads, eqn.outvars)(*args)
        values |= dict(zip(eqn.outvars, results, strict=True))
