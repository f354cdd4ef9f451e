"""Shardings of arrays in the global view: gathered weights, sharded gradients, activations split by
rows.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.core import Arrays, PyTree, is_inexact
from shardopt.losses._batch_dims import CutBatch, cut_batch, leaf_spec, num_rows, sequence_lengths
from shardopt.partition import LeafPlan


def constrain(mesh: Mesh, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return `x` with a sharding constraint."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def moved(tree: PyTree, old: Mesh, new: Mesh) -> PyTree:
    """Return arrays of one mesh as arrays of another mesh with the same devices.

    Their placement is left to the partitioner. Two constraints, so that gradients move back.
    """
    if old == new:
        return tree

    def move(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * jnp.ndim(x))
        return constrain(new, constrain(old, x, spec), spec)

    return jax.tree.map(move, tree)


def gather_leaves(
    config: StrategyConfig, leaves: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> Arrays:
    """Have the partitioner gather leaves over data, each cast to `gather_dtype`, and keep their
    gradients sharded.
    """
    return [_gather(config, leaf, plan) for leaf, plan in zip(leaves, plans, strict=True)]


def _gather(config: StrategyConfig, leaf: jax.Array, plan: LeafPlan) -> jax.Array:
    gather_dtype = config.slots.wire(config.wire, plan).gather_dtype

    def gather_one(x: jax.Array) -> jax.Array:
        if gather_dtype is not None:
            x = x.astype(gather_dtype)
        # The cast would otherwise follow the gather.
        x = constrain(config.mesh, x, plan.spec(sharded=config.placement.params))
        return constrain(config.mesh, x, plan.spec(sharded=False))

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (
            constrain(config.mesh, grad, plan.spec(sharded=config.placement.opt_state)).astype(
                plan.dtype
            ),
        )

    if not is_inexact(plan):
        return gather_one(leaf)
    differentiable_gather = jax.custom_vjp(gather_one)
    differentiable_gather.defvjp(lambda x: (gather_one(x), None), backward)
    return differentiable_gather(leaf)


def shard_grads(
    config: StrategyConfig, grads: Sequence[jax.Array], plans: Sequence[LeafPlan]
) -> Arrays:
    """Place gradients where the optimizer state of their leaves lives."""
    specs = [plan.spec(sharded=config.placement.opt_state) for plan in plans]
    return [constrain(config.mesh, grad, spec) for grad, spec in zip(grads, specs, strict=True)]


def shard_activations(
    config: StrategyConfig, run_block: Callable[..., PyTree], batch: PyTree
) -> Callable[..., PyTree]:
    """Return a block function whose input and output activations are split by rows and positions,
    like the batch.

    Without the constraint, the partitioner may follow the sharding of a weight. Leaves whose first
    dim does not count rows are left to the partitioner, and so is a second dim that does not count
    positions.
    """
    rows = num_rows(config, batch)
    axes = config.axes
    positions = sequence_lengths(config, batch)

    def place(x: jax.Array) -> jax.Array:
        if x.shape[:1] != (rows,) or rows % axes.num_row_shares:
            return x
        entries: list = [axes.summed_rows, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)]
        if axes.positions and x.ndim > 1 and x.shape[1] in positions:
            entries[1] = axes.positions
        return constrain(config.mesh, x, PartitionSpec(*entries))

    def run_constrained(
        block: PyTree, index: jax.Array, rng: jax.Array | None, x: PyTree
    ) -> PyTree:
        return jax.tree.map(place, run_block(block, index, rng, jax.tree.map(place, x)))

    return run_constrained


def cut_rows(config: StrategyConfig, batch: PyTree, count: int) -> CutBatch:
    """Return the rows as micro-batches, each a part of the rows of every device, as
    `micro_batches.cut` cuts them.
    """
    devices = config.axes.num_row_shares

    def cut(x: jax.Array, path: str, dim: int) -> jax.Array:
        leading_shape = x.shape[:dim]
        trailing_shape = x.shape[dim + 1 :]
        parts = jnp.moveaxis(
            x.reshape(*leading_shape, devices, count, -1, *trailing_shape), dim + 1, 0
        )
        spec = leaf_spec(config, path, x.ndim, dim, rows=config.axes.summed_rows, leading=(None,))
        return constrain(
            config.mesh, parts.reshape(count, *leading_shape, -1, *trailing_shape), spec
        )

    return cut_batch(config, cut, batch)


def cut_by_replica(config: StrategyConfig, batch: PyTree) -> CutBatch:
    """Return the rows of each replica, [replicas, ...], placed on the devices of that replica.

    See `cut_batch`.
    """
    (replica,) = config.axes.stacked
    count = config.axes.sizes[replica]

    def cut(x: jax.Array, path: str, dim: int) -> jax.Array:
        parts = jnp.moveaxis(x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :]), dim, 0)
        spec = leaf_spec(
            config, path, x.ndim, dim, rows=config.axes.summed_rows, leading=(replica,)
        )
        return constrain(config.mesh, parts, spec)

    return cut_batch(config, cut, batch)
