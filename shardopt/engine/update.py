"""The update in the global view: one optax update, placed by constraints; then the all-gather, and the gradient's norm."""

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
from shardopt.engine.transformation import ExtraArgs, call_update
from shardopt.mesh import spec_axes


def apply_update(
    config: StrategyConfig,
    layout: Layout,
    params: PyTree,
    opt_state: PyTree,
    gradients: Gradients,
    value_fn: Callable[[PyTree], jax.Array],
) -> tuple[PyTree, PyTree]:
    """Return (new params, new optimizer state): the params for `all_gather_params`, the state where it is stored.

    Gradients and parameters are sharded like the optimizer state, so each device updates its own shard. If the state of
    whole matrices lives at owners, their gradients are sent there and their updates sent back, see `owned_update`.
    The wrapped transformation sees global arrays, so norms, factored moments and orthogonalisation keep their meaning.
    It may call the loss of this batch at other parameters (line searches, sophia), or its gradient (sam).
    """
    sharded = config.placement.opt_state
    shard_specs = layout.merge([None] * len(layout.plans), [plan.spec(sharded=sharded) for plan in layout.trained])
    place = lambda tree, specs: jax.lax.with_sharding_constraint(tree, shardings(config.mesh, specs))  # noqa: E731
    grads, shards = place(gradients.grads, shard_specs), place(layout.trainable(params), shard_specs)
    frozen = layout.treedef.flatten_up_to(params)

    def loss_at(trained: PyTree) -> jax.Array:
        return value_fn(layout.merge(frozen, jax.tree.leaves(trained)))

    def grad_at(trained: PyTree, _: int = 0) -> PyTree:  # sam passes the number of its step
        return place(jax.grad(loss_at)(trained), shard_specs)

    extra_args = ExtraArgs(gradients.loss, grads, loss_at, grad_at)
    updates, new_opt_state = _update(config, layout, grads, opt_state, shards, extra_args)
    _check_same_form(config.strategy, opt_state, new_opt_state)
    opt_state = new_opt_state
    shards = place(optax.apply_updates(shards, updates), shard_specs)
    new_params = layout.merge(frozen, jax.tree.leaves(shards))
    new_params = _replace_updated(config, layout, new_params, gradients.updates)
    opt_specs = layout.specs.opt_state if layout.compression is None else layout.specs.opt_state.optimizer
    if "opt_state" in config.offload:
        abstract_state = (
            layout.abstract.opt_state if layout.compression is None else layout.abstract.opt_state.optimizer
        )
        return new_params, jax.device_put(opt_state, host_shardings(abstract_state, shardings(config.mesh, opt_specs)))
    return new_params, place(opt_state, opt_specs)


def all_gather_params(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Place updated parameters where they live: ZeRO 1 and 2 gather the shards that each device updated.

    The gather runs in the per-device view. The partitioner would gather leaf by leaf, and between processes on CPU each
    gather is a round trip.
    """
    axes, sharded = config.axes, config.placement
    if sharded.opt_state and not sharded.params:
        num_stacked = len(axes.stacked)
        dims = [None if plan.dim is None else plan.dim + num_stacked for plan in layout.trained]
        tensor = [PartitionSpec(*[None] * num_stacked, *plan.tensor) for plan in layout.trained]
        axes_of_leaves = [plan.axes for plan in layout.trained]
        run = per_device(
            lambda leaves: all_gather(leaves, dims, tensor, axes=axes_of_leaves, bucket_bytes=BUCKET_BYTES),
            config.mesh,
            in_specs=([axes.stack(plan.data_spec(sharded=True)) for plan in layout.trained],),
            out_specs=[axes.stack(plan.data_spec(sharded=False)) for plan in layout.trained],
        )
        replicated = run(jax.tree.leaves(layout.trainable(params)))
        params = layout.merge(layout.treedef.flatten_up_to(params), replicated)
    specs = layout.treedef.unflatten([axes.stack(plan.spec(sharded=sharded.params)) for plan in layout.plans])
    return jax.lax.with_sharding_constraint(params, shardings(config.mesh, specs))


def _update(
    config: StrategyConfig, layout: Layout, grads: PyTree, opt_state: PyTree, params: PyTree, extra_args: ExtraArgs
) -> tuple[PyTree, PyTree]:
    def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if config.opt_state_layout == "matrices":
            return owned_update(config, layout, grads, opt_state, params, extra_args)
        return call_update(config.tx, grads, opt_state, params, extra_args)

    if "opt_state" in config.offload:
        return streamed_update(config, layout, (grads, opt_state, params), extra_args, update)
    return update(grads, opt_state, params)


def _check_same_form(caller: str, before: PyTree, after: PyTree) -> None:
    """Refuse, by a ValueError, an optimizer that changes the structure, shapes or dtypes of its state."""
    fix = "let init make each leaf with the shape and dtype that update returns, or cast to it in update."
    if jax.tree.structure(before) != jax.tree.structure(after):
        problem = "update of the optimizer returned a state of another structure than it was given."
        raise ValueError(format_error(caller, problem, fix="let init make what update returns."))
    describe = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}"  # noqa: E731
    leaves = zip(leaves_with_paths(abstract(before)), jax.tree.leaves(abstract(after)), strict=True)
    changed = [
        f"{path or 'the state'}: {describe(a)}, then {describe(b)}"
        for (path, a), b in leaves
        if describe(a) != describe(b)
    ]
    if changed:
        problem = "update of the optimizer changed its state's form, which must be the same at every step."
        raise ValueError(format_error(caller, problem, changed, fix))


def _replace_updated(config: StrategyConfig, layout: Layout, params: PyTree, updates: dict[str, jax.Array]) -> PyTree:
    if not updates:
        return params
    frozen = {plan.path: plan for plan in layout.plans if not plan.trainable}
    wrong_updates = [f"{path}: not a frozen parameter leaf" for path in updates if path not in frozen]
    wrong_updates += [
        f"{path}: shape {value.shape}, the parameter has {frozen[path].shape}"
        for path, value in updates.items()
        if path in frozen and value.shape != frozen[path].shape
    ]
    if wrong_updates:
        fix = "return so.Updated with the parameters' own nesting, for leaves named by frozen= or of integer type."
        raise ValueError(format_error(config.strategy, "so.Updated does not fit the parameters.", wrong_updates, fix))
    leaves = layout.treedef.flatten_up_to(params)
    return layout.treedef.unflatten(
        [
            updates[plan.path].astype(plan.dtype) if plan.path in updates else leaf
            for leaf, plan in zip(leaves, layout.plans, strict=True)
        ]
    )


def gradient_norm(config: StrategyConfig, layout: Layout, grads: PyTree) -> jax.Array:
    """Return the Euclidean norm of all leaves together, summed in fp32 at least; stacked if each replica trains by itself.

    It runs in the per-device view, with one sum for each set of axes that leaves are sharded over. The partitioner would sum
    leaf by leaf, and between processes on CPU each sum is a round trip.
    """
    specs, stacked = grad_specs(config, layout), config.axes.stacked

    def local_norm(leaves):
        totals: dict[tuple[str, ...], jax.Array] = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            axes = tuple(axis for axis in spec_axes(spec) if axis not in stacked)
            total = jnp.sum(jnp.square(jnp.abs(leaf.astype(wide_dtype(leaf.dtype)))))
            totals[axes] = totals[axes] + total if axes in totals else total
        squared_norm = sum(all_reduce([total], axes)[0] for axes, total in totals.items())
        return jnp.sqrt(squared_norm).reshape([1 for _ in stacked])

    run = per_device(local_norm, config.mesh, in_specs=(specs,), out_specs=config.axes.stack())
    return run(jax.tree.leaves(grads))
