"""The per-device view: differentiate the loss of each micro-batch, and reduce the gradient once."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.collectives import all_reduce, constrain_tensor, per_device
from shardopt.collectives._per_device import TENSOR
from shardopt.config._axes import AxisTable
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._slots import DeviceLoss, LossFunction, StepInputs
from shardopt.core import Arrays, PyTree, Weighted
from shardopt.core._checksum import LIMBS, checksum_of, from_limbs, to_limbs
from shardopt.core._loss_parts import Gradients, LossParts
from shardopt.losses._batch_dims import batch_specs, num_rows
from shardopt.losses._loss import loss_of_rows, step_key
from shardopt.losses._metrics import factor, neutral, objective, of_rows
from shardopt.losses._per_row import row_numbers
from shardopt.losses._sums import (
    accumulate,
    all_reduce_grads,
    cut,
    parts_of_micro_batches,
    reduce_scatter_grads,
    scale,
)
from shardopt.mesh import device_kind
from shardopt.partition import LeafPlan
from shardopt.step._update import norm_of_shards


@dataclasses.dataclass(frozen=True)
class PerDeviceView:
    """Each device runs the loss on its own rows, and gradients are reduced over devices.

    Attributes:
      device_loss: the loss of the rows of one device.
      sum_parts: adds its parts up over pieces and devices.
    """

    device_loss: DeviceLoss
    sum_parts: Callable[[LossParts, AxisTable], LossParts]

    def gradients(self, config: StrategyConfig, layout: Layout) -> Callable[..., Gradients]:
        """Return `gradients(params, batch, step, rng, reducer_state=None)`, to be called in the
        global view.

        Let T_i and W_i be the total and weight of the loss on device and micro-batch i (a plain
        mean has W_i = 1). The gradient is the gradient of sum_i T_i / sum_i W_i. The code
        differentiates and sums T_i / n, with n the number of pieces. At the end it multiplies the
        sum by n / sum_i W_i, in fp32 at least. So half-precision gradients are as large as the
        gradient of the mean throughout, and no weight is rounded to half precision. A loss of
        several terms, each over its own weight, is differentiated as sum_k T_ik / sum_i W_ik, whose
        weights are summed first.

        If each replica trains by itself, parameters, gradients, loss and metrics are stacked, one
        entry a replica.
        """
        reduce = layout.reduce
        per_device_axes = [axis for axis in config.mesh.axis_names if axis != TENSOR]
        # The order of the results of `local`: gradients, loss parts, state of the reducer, sums of
        # bits.
        out_specs = (
            reduce.grad_specs(config, layout),
            config.axes.stack(),
            reduce.state_specs,
            PartitionSpec(*per_device_axes),
        )

        # One device, as in MPI code: its shards of the parameters, its rows, and its own gradient.
        def local(params, batch, step, rng, reducer_state):
            if config.per_replica:
                params = [x.reshape(x.shape[1:]) for x in params]
            inputs = StepInputs(params, batch, step, rng)
            grads, parts = self.device_loss.gradients(config, layout, inputs)
            sums = None
            if config.sums:
                sums = from_limbs(grads.pop()) + checksum_of(jax.tree.leaves(parts.loss))
                # a dim for each axis, so that each device keeps its own sum for the comparison
                sums = sums.reshape(*[1 for _ in per_device_axes], 2)
            # before the gradients, which are divided by the weight of all pieces
            parts = self.sum_parts(parts, config.axes)
            stored_order = functools.partial(self.device_loss.stored_order, config, layout)
            grads, reducer_state = reduce(
                config, layout, grads, parts.loss, reducer_state, stored_order
            )
            if config.per_replica:
                # A replica's results get a first dim of size 1. Its out_spec joins them to one
                # entry a replica.
                grads, parts = jax.tree.map(lambda x: x[None], (grads, parts))
            return grads, parts, reducer_state, sums

        def gradients(params, batch, step, rng, reducer_state=None):
            specs = *in_specs(config, layout, batch), reduce.state_specs
            run = per_device(local, config.mesh, in_specs=specs, out_specs=out_specs)
            grads, parts, state, sums = run(
                layout.treedef.flatten_up_to(params), batch, step, rng, reducer_state
            )
            loss, metrics = parts.divided()
            # None stands in place of frozen leaves, as in the tree that the optimizer was
            # initialised with.
            grads = layout.merge([None] * len(layout.plans), grads)
            return Gradients(grads, loss, metrics, parts.updates, state, sums)

        return gradients

    def loss(self, config: StrategyConfig, layout: Layout) -> LossFunction:
        """Return the loss of the union batch, see `Differentiate`."""

        def local(params, batch, step, rng):
            inputs = StepInputs(params, batch, step, rng)
            # The sums are equal on all devices, so the out_spec below may say replicated. Under
            # `check_vma=False` jax does not check that.
            return self.sum_parts(self.device_loss.losses(config, layout, inputs), config.axes)

        def loss(params, batch, step=None, rng=None):
            specs = in_specs(config, layout, batch)
            run = per_device(local, config.mesh, in_specs=specs, out_specs=PartitionSpec())
            return run(layout.treedef.flatten_up_to(params), batch, step, rng).divided()

        return loss

    def totals(self, config: StrategyConfig, layout: Layout) -> Callable[..., LossParts]:
        """Return the sum over the pieces that `counted` selects, see `Differentiate`."""

        def local(params, batch, step, rng, counted):
            size = num_rows(config, batch) // counted.size
            inputs = StepInputs(params, batch, step, rng, size)
            parts = self.device_loss.losses(config, layout, inputs)

            def mask_uncounted(metric):
                metric = of_rows(metric, size)

                def mask(x):
                    return counted.reshape(counted.shape + (1,) * (x.ndim - 1))

                # A choice and not a product: an uncounted row may hold NaN, and 0 * NaN is NaN. The
                # neutral value is 0 for a sum, and an infinity for a maximum or minimum.
                return jax.tree.map(
                    lambda x, default: jnp.where(mask(x), x, default), metric, neutral(metric)
                )

            metrics = {name: mask_uncounted(metric) for name, metric in parts.metrics.items()}
            return self.sum_parts(LossParts(mask_uncounted(parts.loss), metrics, {}), config.axes)

        def totals(params, batch, counted):
            specs = *in_specs(config, layout, batch), PartitionSpec(config.axes.rows)
            run = per_device(local, config.mesh, in_specs=specs, out_specs=PartitionSpec())
            return run(layout.treedef.flatten_up_to(params), batch, None, None, counted)

        return totals


class ExactSum:
    """The core's own `Reduce`: gradients are summed over the axes that the axis table names."""

    state_specs = None

    def grad_specs(self, config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
        """Return how reduced gradients are sharded: as the optimizer state."""
        sharded = config.placement.opt_state
        return [config.axes.stack(plan.data_spec(sharded=sharded)) for plan in layout.trained]

    norm = staticmethod(norm_of_shards)

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: Arrays,
        loss: Weighted,
        state: PyTree,
        stored_order: Callable[[Arrays], Arrays],
    ) -> tuple[Arrays, PyTree]:
        """Return the gradients of the union batch; there is no state."""
        # Dividing comes last, because the weight is known only after it is summed over all devices.
        remaining_factor = factor(loss, config.num_pieces)
        sums = [scale(grad, remaining_factor) for grad in _sum_over_devices(config, layout, grads)]
        return stored_order(sums), state

    def init(self) -> PyTree:
        """Return None: there is no state."""

    def specs(self) -> PyTree:
        """Return None: there is no state."""

    def join(self, opt_state: PyTree, state: PyTree) -> PyTree:
        """Return the optimizer state alone."""
        return opt_state

    def split(self, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the optimizer state, and None."""
        return opt_state, None


def exact_sum(config: StrategyConfig, trained: Sequence[LeafPlan]) -> ExactSum:
    """Return the exact sum, which is the same for all leaves: it fills the slot `reduce`."""
    return ExactSum()


def _sum_over_devices(config: StrategyConfig, layout: Layout, grads: Arrays) -> Arrays:
    """Reduce-scatter over the axes that a leaf's gradient is sharded over, unless done, and
    all-reduce over the others.
    """
    sharded = config.placement
    # ZeRO 1 scatters here, once for all micro-batches. ZeRO 2 does so in `_MicroBatches.run`, and
    # ZeRO 3 in the backward pass of its gathers.
    if sharded.opt_state and not sharded.grads:
        grads = reduce_scatter_grads(config.wire, grads, layout.trained)

    # A leaf without a dim stayed whole in the scatter, so none of its axes is done.
    def done(plan):
        return plan.shard_axes if sharded.opt_state and plan.dim is not None else ()

    # HSDP follows: the shards of data are summed here over replica, which sends 1/N of the
    # gradient.
    axes = [config.axes.gradient(plan, done=done(plan)) for plan in layout.trained]
    return all_reduce_grads(grads, layout.trained, axes)


def in_specs(config: StrategyConfig, layout: Layout, batch: PyTree) -> tuple[PyTree, ...]:
    """Return the specs of (params, batch, step, rng) in the per-device view.

    Values without rows are replicated.
    """
    params = [
        config.axes.stack(plan.data_spec(sharded=config.placement.params)) for plan in layout.plans
    ]
    return params, batch_specs(config, batch), PartitionSpec(), PartitionSpec()


class MicroBatches:
    """The core's own `DeviceLoss`: a device differentiates one micro-batch after another."""

    def gradients(
        self, config: StrategyConfig, layout: Layout, inputs: StepInputs
    ) -> tuple[Arrays, LossParts]:
        """Return the local gradients and loss parts, see `DeviceLoss`."""
        return _MicroBatches(config, layout, inputs).gradients()

    def losses(self, config: StrategyConfig, layout: Layout, inputs: StepInputs) -> LossParts:
        """Return the parts of the local loss, see `DeviceLoss`."""
        return _MicroBatches(config, layout, inputs).losses()

    def stored_order(self, config: StrategyConfig, layout: Layout, grads: Arrays) -> Arrays:
        """Return the gradients, which are in the stored order already."""
        return grads


@dataclasses.dataclass(frozen=True, eq=False)
class _MicroBatches:
    """The micro-batches of one device in one step."""

    config: StrategyConfig
    layout: Layout
    inputs: StepInputs

    def gradients(self) -> tuple[Arrays, LossParts]:
        # Without the constraint, the partitioner would replicate the accumulators over tensor.
        specs = [
            *(plan.tensor for plan in self.layout.trained),
            *[PartitionSpec()] * self.config.sums,
        ]

        def constrain_sums(sums):
            return constrain_tensor(sums, specs)

        count = self.config.loss.micro_batches
        cut_rows = functools.partial(cut, self.config)
        return accumulate(
            self.run, self.inputs.batch, count, constrain_sums, self.sum_weights, cut_rows
        )

    def run(self, micro_batch, index, weights=None):
        config = self.config
        sharded = self.config.placement
        trained = self.layout.trained_leaves(self.inputs.params)
        # Where the backward pass of a gather sums gradients, nobody sees this device's own one. So
        # it travels as the gradient of a probe.
        probe = jnp.zeros(LIMBS) if config.sums and config.gathers else None
        differentiate = jax.grad(self.objective, argnums=(0, 1), has_aux=True)
        (grads, limbs), parts = differentiate(trained, probe, micro_batch, self.key(index), weights)
        if config.sums and probe is None:
            limbs = to_limbs(checksum_of(jax.lax.optimization_barrier(grads)))
        # ZeRO 2: the loop then adds up shards, of 1/N the memory. It scatters once a micro-batch,
        # not once a step.
        if sharded.grads and not sharded.params:
            grads = reduce_scatter_grads(config.wire, grads, self.layout.trained)
        grads = _keep_in_loop(grads) if sharded.grads and config.loss.micro_batches > 1 else grads
        return [*grads, *[limbs] * config.sums], parts

    def objective(self, trained, probe, micro_batch, key, weights):
        params = self.layout.merge(self.inputs.params, trained)
        parts = loss_of_rows(self.config, self.layout, params, micro_batch, key, probe)
        # a single micro-batch has all weights
        if weights is None and isinstance(parts.loss.weight, tuple):
            weights = all_reduce(jax.lax.stop_gradient(parts.loss.weight), self.config.axes.summed)
        return objective(parts.loss, self.config.num_pieces, weights), parts

    def sum_weights(self) -> Arrays:
        return all_reduce([x.sum(0) for x in self.losses().loss.weight], self.config.axes.summed)

    def losses(self) -> LossParts:
        config = self.config
        tree = self.layout.treedef.unflatten(self.inputs.params)

        def run(rows, index):
            key = self.key(index)
            return loss_of_rows(config, self.layout, tree, rows, key, differentiated=False)

        return parts_of_micro_batches(
            run, self.inputs.batch, config.loss.micro_batches, functools.partial(cut, config)
        )

    def key(self, index: jax.Array) -> jax.Array | None:
        config = self.config
        inputs = self.inputs

        def numbers():
            count = config.loss.micro_batches
            device = jax.lax.axis_index(config.axes.rows)
            return row_numbers(device, index, count, num_rows(config, inputs.batch) // count)

        return step_key(config, inputs.step, inputs.rng, index, row_numbers=numbers)


def _keep_in_loop(grads: Arrays) -> Arrays:
    """Keep reduce-scatters in the loop over micro-batches on TPU.

    XLA's while_loop_all_reduce_code_motion would sum replicated gradients and scatter the sum. That
    sends less, but holds gradients replicated that the placement shards. It fails on sums that are
    cast back, as `scatter_dtype` casts them.
    """
    on_tpu = (device_kind() or "").startswith("TPU")
    return [jax.lax.optimization_barrier(grad) for grad in grads] if on_tpu else grads
