"""The global view: one optax update, placed by sharding constraints; the all-gather after it; the gradient's norm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.collectives import BUCKET_BYTES, all_gather, all_reduce, per_device
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract, leaves_with_paths, wide_dtype
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import grad_specs
from shardopt.engine.layout import Layout, shardings
from shardopt.engine.loss import Gradients
from shardopt.engine.offload import host_shardings
from shardopt.engine.owned_update import owned_update
from shardopt.engine.streamed_update import streamed_update
from shardopt.engine.transformation import Asked, update_of
from shardopt.mesh import spec_axes


def apply_update(
    config: StrategyConfig,
    layout: Layout,
    params: PyTree,
    opt_state: PyTree,
    found: Gradients,
    value_fn: Callable[[PyTree], jax.Array],
) -> tuple[PyTree, PyTree]:
    """Return (new params, new optimizer state), the params as `all_gather_params` takes them, the state where it waits.

    Gradients and parameters are constrained to where a placement shards optimizer state, so each device updates its own
    shard. What has its state at owners of whole matrices goes there, and its update comes back, see `owned_update`.
    The wrapped transformation sees global arrays, so norms, factored moments and orthogonalisation mean what they
    always do. It may ask for the loss of this batch at other parameters (line searches, sophia), or its gradient (sam).
    """
    sharded = config.placement.opt_state
    home = layout.merge([None] * len(layout.plans), [plan.spec(sharded=sharded) for plan in layout.trained])
    place = lambda tree, specs: jax.lax.with_sharding_constraint(tree, shardings(config.mesh, specs))  # noqa: E731
    grads, shards = place(found.grads, home), place(layout.trainable(params), home)
    frozen = layout.treedef.flatten_up_to(params)

    def loss_at(trained: PyTree) -> jax.Array:
        return value_fn(layout.merge(frozen, jax.tree.leaves(trained)))

    def grad_at(trained: PyTree, _: int = 0) -> PyTree:  # the number of a step of sam
        return place(jax.grad(loss_at)(trained), home)

    asked = Asked(found.loss, grads, loss_at, grad_at)
    updates, after = _update(config, layout, grads, opt_state, shards, asked)
    _check_same_form(config.strategy, opt_state, after)
    opt_state = after
    shards = place(optax.apply_updates(shards, updates), home)
    new = layout.merge(frozen, jax.tree.leaves(shards))
    new = _replace_updated(config, layout, new, found.updates)
    opt_specs = layout.specs.opt_state if layout.compression is None else layout.specs.opt_state.optimizer
    if "opt_state" in config.offload:
        abstract_state = (
            layout.abstract.opt_state if layout.compression is None else layout.abstract.opt_state.optimizer
        )
        return new, jax.device_put(opt_state, host_shardings(abstract_state, shardings(config.mesh, opt_specs)))
    return new, place(opt_state, opt_specs)


def all_gather_params(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Bring updated parameters to where they live: for ZeRO 1 and 2, gather what was updated sharded.

    In the per-device view: the partitioner would gather leaf by leaf, and between processes on CPU each is a round trip.
    """
    axes, sharded = config.axes, config.placement
    if sharded.opt_state and not sharded.params:
        first = len(axes.stacked)
        dims = [None if plan.dim is None else plan.dim + first for plan in layout.trained]
        tensor = [PartitionSpec(*[None] * first, *plan.tensor) for plan in layout.trained]
        over = [plan.axes for plan in layout.trained]
        run = per_device(
            lambda leaves: all_gather(leaves, dims, tensor, axes=over, bucket_bytes=BUCKET_BYTES),
            config.mesh,
            in_specs=([axes.stack(plan.data_spec(sharded=True)) for plan in layout.trained],),
            out_specs=[axes.stack(plan.data_spec(sharded=False)) for plan in layout.trained],
        )
        replicated = run(jax.tree.leaves(layout.trainable(params)))
        params = layout.merge(layout.treedef.flatten_up_to(params), replicated)
    specs = layout.treedef.unflatten([axes.stack(plan.spec(sharded=sharded.params)) for plan in layout.plans])
    return jax.lax.with_sharding_constraint(params, shardings(config.mesh, specs))


def _update(
    config: StrategyConfig, layout: Layout, grads: PyTree, opt_state: PyTree, params: PyTree, asked: Asked
) -> tuple[PyTree, PyTree]:
    def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if config.opt_state_layout == "matrices":
            return owned_update(config, layout, grads, opt_state, params, asked)
        return update_of(config.tx, grads, opt_state, params, asked)

    if "opt_state" in config.offload:
        return streamed_update(config, layout, (grads, opt_state, params), asked, update)
    return update(grads, opt_state, params)


def _check_same_form(who: str, before: PyTree, after: PyTree) -> None:
    """Refuse, by a ValueError, an optimizer whose state does not keep its structure, shapes and dtypes."""
    fix = "let init make each leaf with the shape and dtype that update returns, or cast to it in update."
    if jax.tree.structure(before) != jax.tree.structure(after):
        what = "update of the optimizer returned a state of another structure than it was given."
        raise ValueError(format_error(who, what, fix="let init make what update returns."))
    show = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}"  # noqa: E731
    leaves = zip(leaves_with_paths(abstract(before)), jax.tree.leaves(abstract(after)), strict=True)
    changed = [f"{path or 'the state'}: {show(a)}, then {show(b)}" for (path, a), b in leaves if show(a) != show(b)]
    if changed:
        what = "update of the optimizer changed its state's form, which must be the same at every step."
        raise ValueError(format_error(who, what, changed, fix))


def _replace_updated(config: StrategyConfig, layout: Layout, params: PyTree, updates: dict[str, jax.Array]) -> PyTree:
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
        raise ValueError(format_error(config.strategy, "so.Updated does not fit the parameters.", problems, fix))
    leaves = layout.treedef.flatten_up_to(params)
    return layout.treedef.unflatten(
        [
            updates[plan.path].astype(plan.dtype) if plan.path in updates else leaf
            for leaf, plan in zip(leaves, layout.plans, strict=True)
        ]
    )


def gradient_norm(config: StrategyConfig, layout: Layout, grads: PyTree) -> jax.Array:
    """Return the Euclidean norm of all leaves together, summed in fp32 at least; stacked where replicas train apart.

    In the per-device view, one sum for each set of axes that leaves are sharded over: the partitioner would sum leaf by
    leaf, and between processes on CPU each is a round trip.
    """
    specs, stacked = grad_specs(config, layout), config.axes.stacked

    def local(leaves):
        totals: dict[tuple[str, ...], jax.Array] = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            axes = tuple(axis for axis in spec_axes(spec) if axis not in stacked)
            total = jnp.sum(jnp.square(jnp.abs(leaf.astype(wide_dtype(leaf.dtype)))))
            totals[axes] = totals[axes] + total if axes in totals else total
        square = sum(all_reduce([total], axes)[0] for axes, total in totals.items())
        return jnp.sqrt(square).reshape([1 for _ in stacked])

    run = per_device(local, config.mesh, in_specs=(specs,), out_specs=config.axes.stack())
    return run(jax.tree.leaves(grads))
