"""The global view: one optax update, placed by sharding constraints."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.collectives import BUCKET_BYTES, all_gather, all_reduce, per_device
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, wide_dtype
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import Gradients, grad_specs
from shardopt.engine.layout import Layout, shardings

# The norm of a gradient whose leaves are split: one sum for each set of axes, not one a leaf.


def gradient_norm(recipe: StrategyConfig, layout: Layout, grads: PyTree) -> Any:
    """Return the Euclidean norm of all leaves together, summed in fp32 at least; a row each of replicas that train apart.

    In the per-device view: the partitioner would sum leaf by leaf, and between processes on CPU each is a round trip.
    """
    specs = grad_specs(recipe, layout)

    def local(leaves):
        totals: dict[tuple[str, ...], Any] = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            axes = tuple(axis for axis in spec if axis is not None and axis not in recipe.rows)
            total = jnp.sum(jnp.square(jnp.abs(leaf.astype(wide_dtype(leaf.dtype)))))
            totals[axes] = totals[axes] + total if axes in totals else total
        square = sum(all_reduce([total], axes)[0] for axes, total in totals.items())
        return jnp.sqrt(square).reshape([1 for _ in recipe.rows])

    run = per_device(local, recipe.mesh, in_specs=(specs,), out_specs=PartitionSpec(*recipe.rows))
    return run(jax.tree.leaves(grads))


def apply_update(
    recipe: StrategyConfig,
    layout: Layout,
    params: PyTree,
    opt_state: PyTree,
    step: Gradients,
    value_fn: Callable[[PyTree], Any],
) -> tuple[PyTree, PyTree]:
    """Return (new params, new optimizer state), the params as `make_whole` takes them.

    Gradients and parameters are constrained to where the optimizer state lives, so each device updates its own shard.
    The wrapped transformation sees global arrays, so norms, factored moments and orthogonalisation mean what they
    always do. Line searches get `value_fn`, the loss of this batch at other parameters.
    """
    state_split = layout.merge(
        [None] * len(layout.plans),
        [plan.spec(split=recipe.placement.opt_state) for plan in layout.plans if plan.trainable],
    )
    place = lambda tree, specs: jax.lax.with_sharding_constraint(tree, shardings(recipe.mesh, specs))  # noqa: E731
    grads, shards = place(step.grads, state_split), place(layout.trainable(params), state_split)
    frozen = layout.treedef.flatten_up_to(params)
    extra = {
        "value": step.loss,
        "grad": grads,
        "value_fn": lambda at: value_fn(layout.merge(frozen, jax.tree.leaves(at))),
    }
    updates, opt_state = recipe.tx.update(grads, opt_state, shards, **_taken(recipe.tx.update, extra))
    shards = optax.apply_updates(shards, updates)
    new = layout.merge(frozen, jax.tree.leaves(place(shards, state_split)))
    new = _replace_updated(recipe, layout, new, step.updates)
    opt_specs = layout.specs.opt_state if layout.reducer is None else layout.specs.opt_state.optimizer
    return new, place(opt_state, opt_specs)


def all_gather_params(recipe: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Bring updated parameters to where they live: for ZeRO 1 and 2 gather what was updated split.

    In the per-device view: the partitioner would gather leaf by leaf, and between processes on CPU each is a round trip.
    """
    rows, split = recipe.rows, recipe.placement
    if split.opt_state and not split.params:
        plans = [plan for plan in layout.plans if plan.trainable]
        dims = [None if plan.dim is None else plan.dim + len(rows) for plan in plans]
        tensor = [PartitionSpec(*[None for _ in rows], *plan.tensor) for plan in plans]
        run = per_device(
            lambda leaves: all_gather(leaves, dims, tensor, axis="data", joined=BUCKET_BYTES),
            recipe.mesh,
            in_specs=([PartitionSpec(*rows, *plan.data_spec(split=True)) for plan in plans],),
            out_specs=[PartitionSpec(*rows, *plan.data_spec(split=False)) for plan in plans],
        )
        whole = run(jax.tree.leaves(layout.trainable(params)))
        params = layout.merge(layout.treedef.flatten_up_to(params), whole)
    specs = layout.treedef.unflatten([PartitionSpec(*rows, *plan.spec(split=split.params)) for plan in layout.plans])
    return jax.lax.with_sharding_constraint(params, shardings(recipe.mesh, specs))


def _taken(update: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return those extra arguments that an optax update takes: all, some or none."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in parameters}


def _replace_updated(recipe: StrategyConfig, layout: Layout, params: PyTree, updates: dict[str, Any]) -> PyTree:
    if not updates:
        return params
    frozen = {plan.path: plan for plan in layout.plans if not plan.trainable}
    problems = [f"{path}: not a frozen parameter leaf" for path in updates if path not in frozen]
    problems += [
        f"{path}: shape {value.shape}, the parameter has {frozen[path].shape}"
        for path, value in updates.items()
        if path in frozen and value.shape != frozen[path].shape
    ]
    if problems:
        fix = "return so.Updated with the parameters' own nesting, for leaves named by frozen= or of integer type."
        raise ValueError(format_error(recipe.who, "so.Updated does not fit the parameters.", problems, fix))
    leaves = layout.treedef.flatten_up_to(params)
    return layout.treedef.unflatten(
        [
            updates[plan.path].astype(plan.dtype) if plan.path in updates else leaf
            for leaf, plan in zip(leaves, layout.plans, strict=True)
        ]
    )
