"""An optimizer's update whose work on matrices is done at owners: shards go there and results come back by all-to-alls."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from shardopt.core.trace import Atom, Trace, part_of, shape_of, slice_of
from shardopt.core.types import PyTree, abstract
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout, make_layout
from shardopt.engine.matrix_tasks import OPAQUE, gathered_bytes
from shardopt.engine.owned_sides import Sides, plan_sides
from shardopt.engine.owned_stage import run_stage, stage_bytes
from shardopt.engine.owned_tasks import LEAST, OwnedStage, owner_axes, plan_stages, trace_update
from shardopt.engine.owners import move, moved_bytes
from shardopt.engine.transformation import ExtraArgs, call_update
from shardopt.mesh import spec_axes
from shardopt.partition import LayoutBytes, Owned, Owners


def owned_update(
    config: StrategyConfig, layout: Layout, grads: PyTree, opt_state: PyTree, params: PyTree, extra_args: ExtraArgs
) -> tuple[PyTree, PyTree]:
    """Return what `call_update` returns, in the global view but for products and decompositions of matrices.

    Gradients, parameters and updates are sharded as the placement shards them; what of an update needs state that lives at
    owners runs there, see `plan_sides`. Products and decompositions are units, a matrix or stacked block each, run alone by
    its owner, so that its bits do not depend on how many devices there are. Where state does not live there the owner gets
    all of what the unit reads, and sends back to every device its shard of the result: for Psi bytes that go and come,
    (N-1)/N^2 Psi per device each way.
    """

    def update(grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array) -> tuple[PyTree, PyTree]:
        given = extra_args._replace(
            value=value, grad=grads
        )  # what it closed over would be an argument of another trace
        return call_update(config.tx, grads, opt_state, params, _opaque(given))

    args = grads, opt_state, params, extra_args.value
    trace, shapes = trace_update(update, *args)
    again = functools.partial(trace_again, config, layout, abstract(extra_args.value))
    stages, _ = plan_stages(config, layout, trace, functools.partial(again, single=True))
    sides = _sides(config, layout, trace, stages)
    if not stages and not sides.moves:
        return call_update(config.tx, grads, opt_state, params, extra_args)
    leaves = jax.tree.leaves(args)
    values = dict(zip(trace.jaxpr.constvars, trace.consts, strict=True))
    values |= dict(zip(trace.jaxpr.invars, leaves, strict=True))
    moved: dict[jex.Var, jax.Array] = {}

    def read(var: jex.Var, *, owned: bool) -> jax.Array:
        way = sides.moves.get(var)
        if way is None or way.there is not owned:
            return values[var]
        if var not in moved:
            moved[var] = move(config, way.plan, values[var], there=owned)
        return moved[var]

    def make(wanted: Sequence[Atom]) -> None:
        evaluate(trace, values, wanted, lambda var, i: read(var, owned=i in sides.owned))

    for stage in stages:
        tasks = (*stage.tasks, *stage.here)
        reads = [[*one.task.inputs, *one.task.given] for one in tasks]
        make([var for some in reads for var in some])
        there = [False] * len(stage.tasks) + [True] * len(stage.here)
        args = [[read(var, owned=owned) for var in some] for some, owned in zip(reads, there, strict=True)]
        for one, outputs in zip(tasks, run_stage(config, stage, again, args), strict=True):
            values |= dict(zip(one.task.outputs, outputs, strict=True))
    make(trace.jaxpr.outvars)
    found = [
        var.val if isinstance(var, jex.Literal) else read(var, owned=i >= len(layout.trained))
        for i, var in enumerate(trace.jaxpr.outvars)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _sides(config: StrategyConfig, layout: Layout, trace: Trace, stages: Sequence[OwnedStage]) -> Sides:
    devices = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    tasks = {i for stage in stages for one in stage.here for i in one.task.equations}
    return plan_sides(layout, trace, max(LEAST, config.min_shard_elements), tasks, devices)


def owners_of(config: StrategyConfig, layout: Layout) -> Owners | None:
    """Return how the work of an update on matrices is shared out; None where it is not."""
    count = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    if config.opt_state_layout != "matrices" or count == 1:
        return None
    again = functools.partial(trace_again, config, layout, jax.ShapeDtypeStruct((), jnp.float32))
    trace = again(single=False)
    stages, left = plan_stages(config, layout, trace, functools.partial(again, single=True))
    rows, loads = [], [0.0] * count
    for plan in layout.trained:
        if plan.owned is not None:
            over = math.prod(config.mesh_shape[axis] for axis in spec_axes(plan.owned[:1]) if axis != "pipeline")
            blocks = plan.shape[0] // (config.mesh_shape["pipeline"] if plan.pipelined else 1)
            step = count // over  # devices that repeat it: those along tensor, where no rule splits the leaf
            rows.append(Owned((plan.path,), tuple(i * over // blocks * step for i in range(blocks)), state=True))
    for stage in stages:
        for i, one in enumerate(stage.tasks):
            mine = [owner for (task, _), owner in zip(stage.units, stage.owners, strict=True) if task == i]
            there, back = (sum(moved.moves for moved in some) for some in (one.inputs, one.outputs))
            rows.append(Owned(one.paths, tuple(mine), arrays=(there, back)))
        even = sum(one.cost * one.blocks for one in stage.here)
        loads = [load + even for load in loads]
        for cost, owner in zip(stage.costs, stage.owners, strict=True):
            loads[owner] += cost
    imbalance = max(loads) * count / sum(loads) - 1 if sum(loads) else 0.0
    staged = [stage_bytes(config, stage) for stage in stages]
    moves = _sides(config, layout, trace, stages).moves
    sent = sum(one for one, _ in staged)
    sent += sum(moved_bytes(config, one.plan, shape_of(var).dtype) for var, one in moves.items())
    return Owners((*rows, *left), count, imbalance, sent, sum(padding for _, padding in staged))


def layout_bytes(config: StrategyConfig, layout: Layout) -> LayoutBytes | None:
    """Return what an update sends for its work on matrices with either layout; None where there is none, or nothing to send."""
    count = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    if not config.placement.opt_state or count == 1:
        return None
    trace = trace_again(config, layout, jax.ShapeDtypeStruct((), jnp.float32), single=False)
    gathered = gathered_bytes(trace.jaxpr, max(LEAST, config.min_shard_elements))
    if not gathered:
        return None
    config = config._replace(opt_state_layout="matrices")
    shapes = layout.treedef.unflatten([jax.ShapeDtypeStruct(plan.shape, plan.dtype) for plan in layout.plans])
    owners = owners_of(config, make_layout(config, shapes))
    assert owners is not None
    return LayoutBytes(gathered * (count - 1) // count, owners.bytes_sent)


def trace_again(config: StrategyConfig, layout: Layout, value: jax.ShapeDtypeStruct, *, single: bool) -> Trace:
    """Return the trace of the update, from shapes alone: of the model, or of one that has a single block.

    Args:
      config: of the strategy.
      layout: of the parameters.
      value: the shape of the loss.
      single: whether there is a single block.
    """
    blocks = lambda plan: (1, *plan.shape[1:]) if single and plan.stacked else plan.shape  # noqa: E731
    shapes = [jax.ShapeDtypeStruct(blocks(plan), plan.dtype) for plan in layout.trained]
    params = layout.merge([None] * len(layout.plans), shapes)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731

    def update(grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        extra_args = ExtraArgs(loss, grads, lambda _: zeros(value), lambda *_: jax.tree.map(zeros, params))
        return call_update(config.tx, grads, opt_state, params, _opaque(extra_args))

    return trace_update(update, params, jax.eval_shape(config.tx.init, params), params, value)[0]


def _opaque(extra_args: ExtraArgs) -> ExtraArgs:
    """Have the loss be one equation of a trace, by its name."""

    def named(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def run(*args: PyTree) -> PyTree:
            return f(*args)

        run.__name__ = OPAQUE
        return jax.jit(run)

    return extra_args._replace(value_fn=named(extra_args.value_fn), grad_fn=named(extra_args.grad_fn))


def evaluate(
    trace: Trace,
    values: dict[jex.Var, jax.Array],
    wanted: Sequence[Atom],
    read: Callable[[jex.Var, int], jax.Array] | None = None,
) -> None:
    """Add to the values what `wanted` needs, equation by equation.

    Args:
      trace: the equations.
      values: what is known, and becomes known.
      wanted: variables.
      read: what an equation of this number reads of a variable that is known; None: its value.
    """
    equations, _ = slice_of(trace, wanted, stop=set(values))
    for i in sorted(equations):
        eqn = trace.jaxpr.eqns[i]
        reads = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
        given = [values[var] if read is None else read(var, i) for var in reads]
        made = part_of(trace, {i}, reads, eqn.outvars)(*given)
        values |= dict(zip(eqn.outvars, made, strict=True))
