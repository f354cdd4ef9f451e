"""An optimizer's update whose work on matrices is done at owners: shards go there and results come back by all-to-alls."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from shardopt.core.trace import Trace, part_of, slice_of
from shardopt.core.types import PyTree, abstract
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout, make_layout
from shardopt.engine.matrix_tasks import OPAQUE, gathered_bytes
from shardopt.engine.owned_stage import run_stage, stage_bytes
from shardopt.engine.owned_tasks import LEAST, owner_axes, plan_stages, trace_update
from shardopt.engine.owners import moved_bytes
from shardopt.engine.transformation import Asked, update_of
from shardopt.mesh import spec_axes
from shardopt.partition import LayoutBytes, Owned, Owners


def owned_update(
    config: StrategyConfig, layout: Layout, grads: PyTree, opt_state: PyTree, params: PyTree, asked: Asked
) -> tuple[PyTree, PyTree]:
    """Return what `update_of` returns, in the global view but for products and decompositions of matrices.

    These are units, a matrix or stacked block each, run alone by its owner, so that its bits do not depend on how many
    devices there are. Where state does not live there the owner gets all of what the unit reads, and sends back to every device
    its shard of the result: for Psi bytes that go and come, (N-1)/N^2 Psi per device each way.
    """

    def update(grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array) -> tuple[PyTree, PyTree]:
        given = asked._replace(value=value, grad=grads)  # what it closed over would be an argument of another trace
        return update_of(config.tx, grads, opt_state, params, _opaque(given))

    args = grads, opt_state, params, asked.value
    trace, shapes = trace_update(update, *args)
    again = functools.partial(trace_again, config, layout, abstract(asked.value))
    stages, _ = plan_stages(config, layout, trace, functools.partial(again, single=True))
    if not stages:
        return update_of(config.tx, grads, opt_state, params, asked)
    leaves = jax.tree.leaves(args)
    values = dict(zip(trace.jaxpr.constvars, trace.consts, strict=True))
    values |= dict(zip(trace.jaxpr.invars, leaves, strict=True))
    for stage in stages:
        tasks = (*stage.tasks, *stage.here)
        reads = [[*one.task.inputs, *one.task.given] for one in tasks]
        evaluate(trace, values, [var for some in reads for var in some])
        made = run_stage(config, stage, again, [[values[var] for var in some] for some in reads])
        for one, outputs in zip(tasks, made, strict=True):
            values |= dict(zip(one.task.outputs, outputs, strict=True))
    evaluate(trace, values, trace.jaxpr.outvars)
    found = [var.val if isinstance(var, jex.Literal) else values[var] for var in trace.jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def owners_of(config: StrategyConfig, layout: Layout) -> Owners | None:
    """Return how the work of an update on matrices is shared out; None where it is not."""
    count = math.prod(config.mesh_shape[axis] for axis in owner_axes(config))
    if config.opt_state_layout != "matrices" or count == 1:
        return None
    again = functools.partial(trace_again, config, layout, jax.ShapeDtypeStruct((), jnp.float32))
    stages, left = plan_stages(config, layout, again(single=False), functools.partial(again, single=True))
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
            rows.append(Owned(one.paths, tuple(mine)))
        even = sum(one.cost * one.blocks for one in stage.here)
        loads = [load + even for load in loads]
        for cost, owner in zip(stage.costs, stage.owners, strict=True):
            loads[owner] += cost
    imbalance = max(loads) * count / sum(loads) - 1 if sum(loads) else 0.0
    staged = [stage_bytes(config, stage) for stage in stages]
    sent = sum(one for one, _ in staged) + sum(moved_bytes(config, plan) for plan in layout.trained)
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
        asked = Asked(loss, grads, lambda _: zeros(value), lambda *_: jax.tree.map(zeros, params))
        return update_of(config.tx, grads, opt_state, params, _opaque(asked))

    return trace_update(update, params, jax.eval_shape(config.tx.init, params), params, value)[0]


def _opaque(asked: Asked) -> Asked:
    """Have the loss be one equation of a trace, by its name."""

    def named(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def run(*args: PyTree) -> PyTree:
            return f(*args)

        run.__name__ = OPAQUE
        return jax.jit(run)

    return asked._replace(value_fn=named(asked.value_fn), grad_fn=named(asked.grad_fn))


def evaluate(trace: Trace, values: dict[jex.Var, jax.Array], wanted: Sequence[jex.Var | jex.Literal]) -> None:
    """Add to the values what `wanted` needs, equation by equation."""
    equations, _ = slice_of(trace, wanted, stop=set(values))
    for i in sorted(equations):
        eqn = trace.jaxpr.eqns[i]
        reads = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
        made = part_of(trace, {i}, reads, eqn.outvars)(*(values[var] for var in reads))
        values |= dict(zip(eqn.outvars, made, strict=True))
