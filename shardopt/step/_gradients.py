"""The per-device view: differentiate the loss of each micro-batch, and reduce the gradient once."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.collectives import all_reduce, constrain_tensor, per_device
from shardopt.collectives._per_device import TENSOR
from shardopt.config._compression import compress_mean, manual_specs
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core._checksum import LIMBS, checksum_of, from_limbs, to_limbs
from shardopt.core._types import Metric, PyTree, Weighted
from shardopt.losses._batch_dims import batch_specs
from shardopt.losses._global_view import global_gradients, global_loss
from shardopt.losses._loss import loss_of_rows, step_key
from shardopt.losses._metrics import factor, objective
from shardopt.losses._parts import Gradients, LossParts
from shardopt.losses._sums import (
    accumulate,
    all_reduce_grads,
    cut,
    parts_of_micro_batches,
    reduce_scatter_grads,
    scale,
    sum_parts,
)
from shardopt.mesh import device_kind
from shardopt.step._pipelined import pipelined_gradients, pipelined_losses, stored_order


def make_gradients(config: StrategyConfig, layout: Layout) -> Callable[..., Gradients]:
    """Return `gradients(params, batch, step, rng, reducer_state=None)`, to be called in the global
    view.

    Let T_i and W_i be the total and weight of the loss on device and micro-batch i (a plain mean
    has W_i = 1). The gradient is the gradient of sum_i T_i / sum_i W_i. The code differentiates and
    sums T_i / n, with n the number of pieces. At the end it multiplies the sum by n / sum_i W_i, in
    fp32 at least. So half-precision gradients are as large as the gradient of the mean throughout,
    and no weight is rounded to half precision. A loss of several terms, each over its own weight,
    is differentiated as sum_k T_ik / sum_i W_ik, whose weights are summed first.

    If each replica trains by itself, parameters, gradients, loss and metrics are stacked, one entry
    a replica.
    """
    if config.loss.view == "global":
        return global_gradients(config, layout)
    differentiate = micro_batch_gradients if config.schedule is None else pipelined_gradients
    compression = layout.compression

    def local(params, batch, step, rng, reducer_state):
        params = [_unstack(config, x) for x in params]
        grads, parts = differentiate(config, layout, params, batch, step, rng)
        sums = None
        if config.sums:
            sums = from_limbs(grads.pop()) + checksum_of(jax.tree.leaves(parts.loss))
            sums = sums.reshape(*[1 for _ in per_device_axes], 2)
        parts = sum_parts(parts, config.axes)
        grads, reducer_state = _reduce(config, layout, grads, parts.loss, reducer_state)
        return *jax.tree.map(lambda x: _stack(config, x), (grads, parts)), reducer_state, sums

    per_device_axes = [axis for axis in config.mesh.axis_names if axis != TENSOR]
    state_specs = None if compression is None else manual_specs(compression)
    out_specs = (
        grad_specs(config, layout),
        config.axes.stack(),
        state_specs,
        PartitionSpec(*per_device_axes),
    )

    def gradients(params, batch, step, rng, reducer_state=None):
        specs = *in_specs(config, layout, batch), state_specs
        run = per_device(local, config.mesh, in_specs=specs, out_specs=out_specs)
        grads, parts, state, sums = run(
            layout.treedef.flatten_up_to(params), batch, step, rng, reducer_state
        )
        loss, metrics = parts.divided()
        return Gradients(
            layout.merge([None] * len(layout.plans), grads),
            loss,
            metrics,
            parts.updates,
            state,
            sums,
        )

    return gradients


def make_loss(
    config: StrategyConfig, layout: Layout
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array | Metric]]]:
    """Return `loss(params, batch, step=None, rng=None) -> (loss, metrics)` of the union batch.

    With a step and rng it is the same function that `make_gradients` differentiates, with the same
    keys and micro-batches. Without them the loss gets no key.
    """
    if config.loss.view == "global":
        return global_loss(config, layout)
    losses = micro_batch_losses if config.schedule is None else pipelined_losses

    def local(params, batch, step, rng):
        return sum_parts(losses(config, layout, params, batch, step, rng), config.axes)

    def loss(params, batch, step=None, rng=None):
        run = per_device(
            local, config.mesh, in_specs=in_specs(config, layout, batch), out_specs=PartitionSpec()
        )
        return run(layout.treedef.flatten_up_to(params), batch, step, rng).divided()

    return loss


def grad_specs(config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
    """Return how gradients of the trainable leaves are sharded over all axes but tensor: as the
    optimizer state, unless a reducer runs.
    """
    sharded = config.placement.opt_state and layout.compression is None
    return [config.axes.stack(plan.data_spec(sharded=sharded)) for plan in layout.trained]


def _reduce(
    config: StrategyConfig,
    layout: Layout,
    grads: list[jax.Array],
    loss: Weighted,
    reducer_state: PyTree,
) -> tuple[list[jax.Array], PyTree]:
    """Return the gradients of the union batch from the gradients of this device, and the new state
    of the reducer.
    """
    axes, compression = config.axes, layout.compression
    remaining_factor = factor(loss, config.num_pieces)
    if compression is None:
        grads = [scale(grad, remaining_factor) for grad in _sum_over_devices(config, layout, grads)]
    else:
        grads = all_reduce_grads(
            grads, layout.trained, [axes.gradient(p, done=axes.summed) for p in layout.trained]
        )
    # before the reducer, whose residuals have the stored order of blocks
    if config.schedule is not None:
        grads = stored_order(config.schedule, layout, grads)
    if compression is not None:
        # The mean over N devices of N times each device's part is the sum.
        grads = [scale(grad, remaining_factor * compression.size) for grad in grads]
        grads, reducer_state = compress_mean(compression, grads, reducer_state)
    return grads, reducer_state


def _sum_over_devices(
    config: StrategyConfig, layout: Layout, grads: list[jax.Array]
) -> list[jax.Array]:
    """Reduce-scatter over the axes that a leaf's gradient is sharded over, unless done, and
    all-reduce over the others.
    """
    sharded = config.placement
    if sharded.opt_state and not sharded.grads:
        grads = reduce_scatter_grads(config.wire, grads, layout.trained)

    def done(plan):
        return plan.shard_axes if sharded.opt_state and plan.dim is not None else ()

    axes = [config.axes.gradient(plan, done=done(plan)) for plan in layout.trained]
    return all_reduce_grads(grads, layout.trained, axes)


def _unstack(config: StrategyConfig, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[1:]) if config.per_replica else x


def _stack(config: StrategyConfig, x: jax.Array) -> jax.Array:
    return x[None] if config.per_replica else x


def in_specs(config: StrategyConfig, layout: Layout, batch: PyTree) -> tuple[PyTree, ...]:
    """Return the specs of (params, batch, step, rng) in the per-device view.

    Values without rows are replicated.
    """
    params = [
        config.axes.stack(plan.data_spec(sharded=config.placement.params)) for plan in layout.plans
    ]
    return params, batch_specs(config, batch), PartitionSpec(), PartitionSpec()


def micro_batch_gradients(
    config: StrategyConfig,
    layout: Layout,
    params: list[jax.Array],
    batch: PyTree,
    step: jax.Array,
    rng: jax.Array,
) -> tuple[list[jax.Array], LossParts]:
    """Return the local gradients of the trained leaves, summed over micro-batches, and loss parts
    [micro_batches, ...].

    If the placement shards gradients, they are reduce-scattered over data already. If the config
    asks for sums, the sum of the local gradients' bits follows the last gradient, as limbs.
    """
    return _MicroBatches(config, layout, params, batch, step, rng).gradients()


def micro_batch_losses(
    config: StrategyConfig,
    layout: Layout,
    params: list[jax.Array],
    batch: PyTree,
    step: jax.Array,
    rng: jax.Array,
) -> LossParts:
    """Return the parts of the local loss, [micro_batches, ...]; without keys if rng is None."""
    return _MicroBatches(config, layout, params, batch, step, rng).losses()


@dataclasses.dataclass(frozen=True, eq=False)
class _MicroBatches:
    """The micro-batches of one device in one step; `params` are all leaves, as they are placed."""

    config: StrategyConfig
    layout: Layout
    params: list[jax.Array]
    batch: PyTree
    step: jax.Array
    rng: jax.Array | None

    def gradients(self) -> tuple[list[jax.Array], LossParts]:
        # Without the constraint, the partitioner would replicate the accumulators over tensor.
        specs = [
            *(plan.tensor for plan in self.layout.trained),
            *[PartitionSpec()] * self.config.sums,
        ]

        def constrain_sums(sums):
            return constrain_tensor(sums, specs)

        count, cut_rows = self.config.loss.micro_batches, functools.partial(cut, self.config)
        return accumulate(self.run, self.batch, count, constrain_sums, self.sum_weights, cut_rows)

    def run(self, micro_batch, index, weights=None):
        config, sharded = self.config, self.config.placement
        trained = self.layout.trained_leaves(self.params)
        probe = jnp.zeros(LIMBS) if config.sums and config.gathers else None
        differentiate = jax.grad(self.objective, argnums=(0, 1), has_aux=True)
        (grads, limbs), parts = differentiate(trained, probe, micro_batch, self.key(index), weights)
        if config.sums and probe is None:
            limbs = to_limbs(checksum_of(jax.lax.optimization_barrier(grads)))
        if sharded.grads and not sharded.params:
            grads = reduce_scatter_grads(config.wire, grads, self.layout.trained)
        grads = _keep_in_loop(grads) if sharded.grads and config.loss.micro_batches > 1 else grads
        return [*grads, *[limbs] * config.sums], parts

    def objective(self, trained, probe, micro_batch, key, weights):
        params = self.layout.merge(self.params, trained)
        parts = loss_of_rows(self.config, self.layout, params, micro_batch, key, probe)
        # a single micro-batch has all weights
        if weights is None and isinstance(parts.loss.weight, tuple):
            weights = all_reduce(jax.lax.stop_gradient(parts.loss.weight), self.config.axes.summed)
        return objective(parts.loss, self.config.num_pieces, weights), parts

    def sum_weights(self) -> list[jax.Array]:
        return all_reduce([x.sum(0) for x in self.losses().loss.weight], self.config.axes.summed)

    def losses(self) -> LossParts:
        config, tree = self.config, self.layout.treedef.unflatten(self.params)

        def run(rows, index):
            return loss_of_rows(config, self.layout, tree, rows, self.key(index))

        return parts_of_micro_batches(
            run, self.batch, config.loss.micro_batches, functools.partial(cut, config)
        )

    def key(self, index: jax.Array) -> jax.Array | None:
        return None if self.rng is None else step_key(self.config, self.step, self.rng, index)


def _keep_in_loop(grads: list[jax.Array]) -> list[jax.Array]:
    """Keep reduce-scatters in the loop over micro-batches on TPU.

    XLA's while_loop_all_reduce_code_motion would sum replicated gradients and scatter the sum. That
    sends less, but holds gradients replicated that the placement shards. It fails on sums that are
    cast back, as `scatter_dtype` casts them.
    """
    on_tpu = (device_kind() or "").startswith("TPU")
    return [jax.lax.optimization_barrier(grad) for grad in grads] if on_tpu else grads
