"""The update in the global view, placed by constraints; then the all-gather, and the norm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.collectives import BUCKET_BYTES, LeafWire, all_gather, all_reduce, per_device
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._offload import to_host
from shardopt.config._transformation import ExtraArgs, call_update, check_same_form, check_updates
from shardopt.core import Arrays, PyTree, cast, widened
from shardopt.core._loss_parts import Gradients
from shardopt.losses._parts import check_updated
from shardopt.mesh import spec_axes
from shardopt.partition import Owners
from shardopt.step._results import AppliedUpdate, Change
from shardopt.transforms._skip_anomalies import unless_skipped


def apply_update(
    config: StrategyConfig,
    layout: Layout,
    params: PyTree,
    opt_state: PyTree,
    gradients: Gradients,
    value_fn: Callable[[PyTree], jax.Array],
) -> AppliedUpdate:
    """Return new params for `all_gather_params`, the new optimizer state where it is stored, and
    the change.

    Gradients and parameters are sharded like the optimizer state, so each device updates its own
    shard. If the state of whole matrices lives at owners, their gradients are sent there and their
    updates sent back, see `OwnedUpdate`. The wrapped transformation sees global arrays, so norms,
    factored moments and orthogonalisation keep their meaning. It may call the loss of this batch at
    other parameters (line searches, sophia), or its gradient (sam).
    """
    sharded = config.placement.opt_state
    shard_specs = layout.merge(
        [None] * len(layout.plans), [plan.spec(sharded=sharded) for plan in layout.trained]
    )

    def place(tree, specs):
        return jax.lax.with_sharding_constraint(tree, shardings(config.mesh, specs))

    grads = place(gradients.grads, shard_specs)
    shards = layout.trainable(params)
    if sharded and not config.placement.params:
        # ZeRO 1 and 2 hold whole parameters: this cuts out the part of this device, and sends
        # nothing.
        shards = place(shards, shard_specs)
    # `merge` replaces the trained ones, and keeps the frozen ones.
    param_leaves = layout.treedef.flatten_up_to(params)

    def loss_at(trained: PyTree) -> jax.Array:
        return value_fn(layout.merge(param_leaves, jax.tree.leaves(trained)))

    def grad_at(trained: PyTree, _: int = 0) -> PyTree:  # sam passes the number of its step
        return place(jax.grad(loss_at)(trained), shard_specs)

    extra_args = ExtraArgs(gradients.loss, grads, loss_at, grad_at)
    updates, new_opt_state = config.slots.update(
        config, layout, grads, opt_state, shards, extra_args
    )
    check_same_form(config.strategy, opt_state, new_opt_state)
    check_updates(config.strategy, shards, updates)
    # Kept for `unless_skipped`, which compares the counts of skipped steps before and after.
    old_opt_state = opt_state
    opt_state = new_opt_state
    change = Change(grads, updates, shards)
    new_shards = jax.tree.leaves(optax.apply_updates(shards, updates))
    new_params = layout.merge(param_leaves, new_shards)
    # Batch statistics do not pass through optax, which skips its own update. So their skip is here.
    with_updated = _replace_updated(config, layout, new_params, gradients.updates)
    new_params = unless_skipped(old_opt_state, opt_state, new_params, with_updated)
    if "opt_state" in config.update.offload:
        opt_specs, _ = layout.reduce.split(layout.specs.opt_state)
        abstract_state, _ = layout.reduce.split(layout.abstract.opt_state)
        opt_state = to_host(
            config.update.offload, abstract_state, opt_state, shardings(config.mesh, opt_specs)
        )
    return AppliedUpdate(new_params, opt_state, change)


def all_gather_params(config: StrategyConfig, layout: Layout, params: PyTree) -> PyTree:
    """Return updated parameters where they live: ZeRO 1 and 2 gather the shards that each device
    updated.

    The gather runs in the per-device view. The partitioner would gather leaf by leaf, and between
    processes on CPU each gather is a round trip.
    """
    axes = config.axes
    if config.placement.params or not config.placement.opt_state:
        return params
    wires = [
        # Replicas that train apart have a first dim, of size 1 on each device, so the sharded dim
        # shifts.
        LeafWire(plan.dim, plan.tensor, plan.axes).stacked(len(axes.stacked))
        for plan in layout.trained
    ]
    run = per_device(
        lambda leaves: all_gather(leaves, wires, bucket_bytes=BUCKET_BYTES),
        config.mesh,
        in_specs=([axes.stack(plan.data_spec(sharded=True)) for plan in layout.trained],),
        out_specs=[axes.stack(plan.data_spec(sharded=False)) for plan in layout.trained],
    )
    replicated = run(jax.tree.leaves(layout.trainable(params)))
    return layout.merge(layout.treedef.flatten_up_to(params), replicated)


class PlainUpdate:
    """One optax update of global arrays: the core's own filling of the slot `update`."""

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
        return call_update(config.update.tx, grads, opt_state, params, extra_args)

    def describe(self, config: StrategyConfig, layout: Layout) -> Owners | None:
        """Return None: nothing is divided between owners."""
        return None


def _replace_updated(
    config: StrategyConfig, layout: Layout, params: PyTree, updates: dict[str, jax.Array]
) -> PyTree:
    if not updates:
        return params
    check_updated(config.strategy, layout.plans, updates)
    leaves = layout.treedef.flatten_up_to(params)
    return layout.treedef.unflatten(
        [
            cast(updates[plan.path], plan.dtype) if plan.path in updates else leaf
            for leaf, plan in zip(leaves, layout.plans, strict=True)
        ]
    )


def norm_of_shards(config: StrategyConfig, leaves: Arrays, specs: list[PartitionSpec]) -> jax.Array:
    """Return the Euclidean norm of all leaves together, stacked if each replica trains by itself.

    It runs in the per-device view, with one sum for each set of axes that leaves are sharded over.
    The partitioner would sum leaf by leaf, and between processes on CPU each sum is a round trip.
    """
    stacked = config.axes.stacked

    def local_norm(leaves):
        # A sum over an axis that only copies a leaf would count the leaf once a copy. So each leaf
        # is summed over exactly the axes that shard it.
        totals: dict[tuple[str, ...], jax.Array] = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            axes = tuple(axis for axis in spec_axes(spec) if axis not in stacked)
            total = jnp.sum(jnp.square(jnp.abs(widened(leaf))))
            totals[axes] = totals[axes] + total if axes in totals else total
        squared_norm = sum(all_reduce([total], axes)[0] for axes, total in totals.items())
        return jnp.sqrt(squared_norm).reshape([1 for _ in stacked])

    run = per_device(local_norm, config.mesh, in_specs=(specs,), out_specs=config.axes.stack())
    return run(leaves)
