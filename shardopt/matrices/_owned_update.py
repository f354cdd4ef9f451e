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
    add_loads,
    owner_axes,
    owner_numbers,
    plan_stages,
)
from shardopt.matrices._owners import move, moved_bytes
from shardopt.mesh import size_along, spec_axes
from shardopt.partition import Owned, Owners
from shardopt.trace._matrix_work import MIN_ELEMENTS
from shardopt.trace._parts import Atom, Trace, abstract_value, part_of, slice_of


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
        """Return the updates and the new optimizer state."""
        return owned_update(config, layout, grads, opt_state, params, extra_args)

    def describe(self, config: StrategyConfig, layout: Layout) -> Owners | None:
        """Return the owners."""
        return owners_of(config, layout)


def owned_update(
    config: StrategyConfig,
    layout: Layout,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    extra_args: ExtraArgs,
) -> tuple[PyTree, PyTree]:
    """Return the result of `call_update`, with products and decompositions of matrices run by their
    owners; in the global view.

    Gradients, parameters and updates are sharded as the placement says. Equations that need state
    at owners run there, see `plan_sides`. Products and decompositions are units, a matrix or
    stacked block each. Each owner runs a unit alone, so its bits do not depend on the number of
    devices. If the state of a unit is not at its owner, the owner gets all inputs of the unit, and
    sends every device its shard of the result. Psi bytes sent and returned cost (N-1)/N^2 Psi per
    device each way.
    """

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array
    ) -> tuple[PyTree, PyTree]:
        # the loss and gradients of this trace, because those in the closure belong to another trace
        traced_args = extra_args._replace(value=value, grad=grads)
        return call_update(config.update.tx, grads, opt_state, params, opaque(traced_args))

    args = grads, opt_state, params, extra_args.value
    trace, shapes = trace_update(update, *args)
    retrace_update = functools.partial(retrace, config, layout, abstract(extra_args.value))
    stages, _ = plan_stages(config, layout, trace, retrace_update)
    sides = _sides(config, layout, trace, stages)
    if not stages and not sides.moves:
        return call_update(config.update.tx, grads, opt_state, params, extra_args)
    leaves = jax.tree.leaves(args)
    values = dict(zip(trace.jaxpr.constvars, trace.consts, strict=True))
    values |= dict(zip(trace.jaxpr.invars, leaves, strict=True))
    moved_values: dict[jex.Var, jax.Array] = {}

    def read(var: jex.Var, *, at_owners: bool) -> jax.Array:
        variable_move = sides.moves.get(var)
        if variable_move is None or variable_move.to_owners is not at_owners:
            return values[var]
        if var not in moved_values:
            moved_values[var] = move(config, variable_move.plan, values[var], to_owners=at_owners)
        return moved_values[var]

    def compute(targets: Sequence[Atom]) -> None:
        evaluate(trace, values, targets, lambda var, i: read(var, at_owners=i in sides.at_owners))

    for stage in stages:
        tasks = (*stage.tasks, *stage.local_tasks)
        inputs = [[*owned_task.task.inputs, *owned_task.task.small_inputs] for owned_task in tasks]
        compute([var for task_inputs in inputs for var in task_inputs])
        is_local = [False] * len(stage.tasks) + [True] * len(stage.local_tasks)
        args = [
            [read(var, at_owners=local) for var in task_inputs]
            for task_inputs, local in zip(inputs, is_local, strict=True)
        ]
        for owned_task, outputs in zip(
            tasks, run_stage(config, stage, retrace_update, args), strict=True
        ):
            values |= dict(zip(owned_task.task.outputs, outputs, strict=True))
    compute(trace.jaxpr.outvars)
    results = [
        var.val if isinstance(var, jex.Literal) else read(var, at_owners=not sides.returns[i])
        for i, var in enumerate(trace.jaxpr.outvars)
    ]
    return with_leaves(shapes, results)


def _sides(
    config: StrategyConfig, layout: Layout, trace: Trace, stages: Sequence[OwnedStage]
) -> Sides:
    devices = size_along(config.mesh_shape, owner_axes(config))
    tasks = {
        i for stage in stages for local_task in stage.local_tasks for i in local_task.task.equations
    }
    return plan_sides(
        layout, trace, max(MIN_ELEMENTS, config.layout.min_shard_elements), tasks, devices
    )


def owners_of(config: StrategyConfig, layout: Layout) -> Owners | None:
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
    rows = []
    loads = np.zeros(count)
    local_paths = {
        path for stage in stages for local_task in stage.local_tasks for path in local_task.paths
    }
    for plan in layout.trained:
        if (plan.stacked and plan.owned is not None) or plan.path in local_paths:
            block_axes = [
                axis for axis in spec_axes(plan.state_spec(sharded=True)[:1]) if axis != "pipeline"
            ]
            # devices along tensor repeat the work if no rule splits the leaf: the first of them is
            # named
            numbers = owner_numbers(config, block_axes)[0]
            blocks = plan.shape[0] // (config.mesh_shape["pipeline"] if plan.pipelined else 1)
            owners = tuple(int(numbers[i * len(numbers) // blocks]) for i in range(blocks))
            rows.append(Owned((plan.path,), owners, state=True))
    for stage in stages:
        numbers = owner_numbers(config, stage.axes)
        for i, owned_task in enumerate(stage.tasks):
            owners = [
                owner
                for (task, _), owner in zip(stage.units, stage.owners, strict=True)
                if task == i
            ]
            task_owners = [int(number) for number in numbers[:, owners].ravel()]
            num_sent, num_returned = (
                sum(transfer.is_sent for transfer in transfers)
                for transfers in (owned_task.inputs, owned_task.outputs)
            )
            rows.append(
                Owned(owned_task.paths, tuple(task_owners), arrays=(num_sent, num_returned))
            )
        local_load = sum(local_task.cost * local_task.blocks for local_task in stage.local_tasks)
        loads += local_load
        add_loads(stage, numbers, loads)
    imbalance = float(loads.max() / loads.mean() - 1) if loads.any() else 0.0
    staged = [stage_bytes(config, stage) for stage in stages]
    moves = _sides(config, layout, trace, stages).moves
    sent = sum(stage_sent for stage_sent, _ in staged)
    sent += sum(
        moved_bytes(config, variable_move.plan, abstract_value(var).dtype)
        for var, variable_move in moves.items()
    )
    return Owners(
        (*rows, *without_owner), count, imbalance, sent, sum(padding for _, padding in staged)
    )


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
        reads = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
        args = [values[var] if read is None else read(var, i) for var in reads]
        results = part_of(trace, {i}, reads, eqn.outvars)(*args)
        values |= dict(zip(eqn.outvars, results, strict=True))
