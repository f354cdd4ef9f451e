"""Gradients of micro-batches that go through a pipeline.

Each device runs the blocks of its stage.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives import all_reduce
from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._slots import StepInputs
from shardopt.core import Arrays, PyTree, inexact_indices, plural, replaced, value_error
from shardopt.core._block_model import (
    BLOCKS,
    EMBED,
    LOSS,
    BlockModel,
    as_block_model,
    call,
    call_block,
    outer_of,
)
from shardopt.core._block_remat import checkpointed
from shardopt.core._checksum import checksum_of, to_limbs
from shardopt.core._loss_parts import LossParts
from shardopt.losses._batch_dims import num_rows
from shardopt.losses._loss import all_gather_leaves, step_key
from shardopt.losses._metrics import objective
from shardopt.losses._parts import loss_parts
from shardopt.losses._rows import row_context, with_rows
from shardopt.losses._sums import cut, reduce_scatter_grads
from shardopt.low_precision._reads import reading_in_products
from shardopt.partition import LeafPlan
from shardopt.partition._counts import Counts
from shardopt.pipeline import Schedule
from shardopt.pipeline import _uneven as uneven
from shardopt.pipeline._cut import cut_blocks
from shardopt.pipeline._executor import SumSpecs, execute, forward_only
from shardopt.pipeline._messages import Index
from shardopt.pipeline._stage import block_arguments
from shardopt.remat._gathered_block import leaves_like
from shardopt.remat._unread import stopped, unread_leaves


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A `DeviceLoss`: micro-batches go through the stages of a pipeline.

    Attributes:
      schedule: the order of the passes of each stage.
      blocks_per_stage: [V], the number of blocks of each virtual stage; None to divide them evenly.
      remat: whether only the input of each chunk is kept.
      regather: whether a block's weights are gathered in every pass, rather than once a step.
    """

    schedule: Schedule
    blocks_per_stage: Counts | None = None
    remat: bool = False
    regather: bool = True

    def counts(self, config: StrategyConfig, params: PyTree) -> Counts:
        """Return the number of blocks of each virtual stage.

        Raises:
          ValueError: if blocks cannot be divided this way.
        """
        num_blocks = jax.tree.leaves(params[BLOCKS])[0].shape[0]
        if num_blocks == 0:
            problem = (
                f"there are no blocks to cut into {plural(self.schedule.num_stages, 'stage')}."
            )
            raise value_error(problem, fix="stack at least one block a stage and chunk.")
        return cut_blocks(self.schedule, num_blocks, self.blocks_per_stage)

    def gathers_once(self, config: StrategyConfig) -> bool:
        """Return whether the weights of blocks are gathered, and their gradients scattered, once a
        step.
        """
        return config.placement.params and not self.regather

    def gradients(
        self, config: StrategyConfig, layout: Layout, inputs: StepInputs
    ) -> tuple[Arrays, LossParts]:
        """Return gradients of this stage's blocks, and of outer leaves that it uses.

        Outer parameters are gathered once a step, and their gradients scattered once. Parameters of
        blocks are gathered and scattered where they are used, as without a pipeline; or once a step
        if the config has `regather=False`.
        """
        block_plans = [plan for plan in layout.trained if plan.stacked]
        outer_plans = [plan for plan in layout.trained if not plan.stacked]
        model = self._model(config, layout, inputs)
        # Stored order -> order of the schedule. With several chunks a stage runs blocks that other
        # stages store; they move once, before the ticks. `stored_order` moves the gradients back.
        weights = self._stage_weights(config, layout, inputs.params)
        model = self._with_sum_weights(_with_unread(model, weights), weights)
        sums = execute(
            self.schedule,
            model,
            weights,
            layout.counts,
            remat=self.remat,
            specs=SumSpecs(
                *([plan.tensor for plan in plans] for plans in (block_plans, outer_plans))
            ),
        )
        # Sums leave the loop in fp32. They are cast before they are sent, so they cost as many
        # bytes as the gradients of a step without a pipeline.
        block_grads = _as_stored(sums.blocks, block_plans)
        outer_grads = _as_stored(sums.outer, outer_plans)
        # Gradients of blocks that are sharded within the loop are reduced already: their sums say
        # nothing of a device.
        local_grads = [
            *outer_grads,
            *([] if config.placement.grads and not self.gathers_once(config) else block_grads),
        ]
        limbs = (
            [to_limbs(checksum_of(jax.lax.optimization_barrier(local_grads)))]
            if config.sums
            else []
        )
        if self.gathers_once(config):
            block_grads = reduce_scatter_grads(config.wire, block_grads, block_plans)
        if config.placement.grads:
            outer_grads = reduce_scatter_grads(config.wire, outer_grads, outer_plans)
        next_block = iter(block_grads)
        next_outer = iter(outer_grads)
        grads = [next(next_block if plan.stacked else next_outer) for plan in layout.trained]
        return [*grads, *limbs], sums.parts

    def losses(self, config: StrategyConfig, layout: Layout, inputs: StepInputs) -> LossParts:
        """Return the parts of the local loss: zeros on all stages but the last block's."""
        model = self._model(config, layout, inputs)
        weights = self._stage_weights(config, layout, inputs.params)
        return forward_only(self.schedule, model, weights, layout.counts)

    def stored_order(self, config: StrategyConfig, layout: Layout, grads: Arrays) -> Arrays:
        """Return reduced gradients in the stored order of blocks, which is the model's order."""
        plans = layout.trained
        blocks = [i for i, plan in enumerate(plans) if plan.stacked]
        ordered_grads = uneven.to_model(
            self.schedule,
            layout.counts,
            [grads[i] for i in blocks],
            [plans[i] for i in blocks],
        )
        return replaced(grads, blocks, ordered_grads)

    def _stage_weights(self, config: StrategyConfig, layout: Layout, params: Arrays) -> Arrays:
        """Return the blocks of this stage, stacked in the schedule's order.

        They are gathered if blocks are gathered once a step.
        """
        plans = [plan for plan in layout.plans if plan.stacked]
        stored = [x for x, plan in zip(params, layout.plans, strict=True) if plan.stacked]
        weights = uneven.to_schedule(self.schedule, layout.counts, stored, plans)
        return all_gather_leaves(config, weights, plans) if self.gathers_once(config) else weights

    def _model(
        self, config: StrategyConfig, layout: Layout, inputs: StepInputs
    ) -> "_PipelinedModel":
        """Return the model in one step; it gathers the outer parameters."""
        model = as_block_model(with_rows(row_context(config), config.loss.loss_fn))
        assert model is not None
        params = inputs.params
        batch = inputs.batch
        micro_batches, assemble = cut(config, batch, config.loss.micro_batches)
        if config.gathers:
            outer = [i for i, plan in enumerate(layout.plans) if not plan.stacked]
            gathered = all_gather_leaves(
                config, [params[i] for i in outer], [layout.plans[i] for i in outer]
            )
            params = replaced(params, outer, gathered)
        return _PipelinedModel(
            config,
            layout,
            model,
            params,
            micro_batches,
            assemble,
            rows=num_rows(config, batch) // config.loss.micro_batches,
            inputs=inputs,
            gathers_blocks=config.gathers and not self.gathers_once(config),
        )

    def _with_sum_weights(self, model: "_PipelinedModel", weights: Arrays) -> "_PipelinedModel":
        """Return the model with the summed weights of its loss, if that has several terms."""
        parts = jax.eval_shape(model.loss, jnp.int32(0), model._x[0])
        if isinstance(parts.loss.weight, tuple):
            # The compiler removes all computations that the weights do not need.
            parts = forward_only(self.schedule, model, weights, model.layout.counts)
            sums = all_reduce([x.sum(0) for x in parts.loss.weight], model.config.axes.summed)
            model = dataclasses.replace(model, sum_weights=sums)
        return model


def _with_unread(model: "_PipelinedModel", weights: Arrays) -> "_PipelinedModel":
    """Return the model that knows which leaves of x the loss does not read."""
    x, _ = model._x
    first = jnp.int32(0)
    arguments = block_arguments(weights)
    unread = unread_leaves(
        lambda leaves: model.loss(first, leaves).loss,
        x,
        lambda: (jax.make_jaxpr(model.block)(arguments, x), arguments),
    )
    return dataclasses.replace(model, unread=unread)


def _as_stored(grads: Arrays, plans: list[LeafPlan]) -> Arrays:
    """Return gradients in the dtypes of their leaves."""
    return [grad.astype(plan.dtype) for grad, plan in zip(grads, plans, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class _PipelinedModel:
    """The model in one step: `StageFns` of lists of leaves and micro-batch numbers.

    Attributes:
      params: the leaves; outer ones are gathered, once for all micro-batches. Gradients are with
        respect to these.
      micro_batches: the leaves of the batch that have rows, each cut into micro-batches.
      assemble: makes a batch from one micro-batch of each leaf.
      rows: the number of rows of a micro-batch.
      inputs: of the step.
      gathers_blocks: whether a block gathers its weights when it runs.
      sum_weights: for a loss of several terms, their weights summed over all micro-batches and
        devices, on the stage that computes the loss.
      unread: the leaves of an input of a block that no derivative of the loss reads.
    """

    config: StrategyConfig
    layout: Layout
    model: BlockModel
    params: Arrays
    micro_batches: Arrays
    assemble: Callable[..., PyTree]
    rows: int
    inputs: StepInputs
    gathers_blocks: bool
    sum_weights: Arrays | None = None
    unread: Sequence[int] = ()

    @property
    def trained(self) -> list[int]:
        return [position for position, plan in enumerate(self._block_plans) if plan.trainable]

    @property
    def remat_blocks(self) -> bool:
        return self.model.remat == "full"

    def embed(self, m: Index) -> Arrays:
        return jax.tree.leaves(self._embed(self._trained_outer, m))

    # Embedding and loss store no residuals: their forward pass runs where their gradient is
    # computed. Otherwise each micro-batch in flight would keep its logits in a slot.
    def embed_grads(self, m: Index, dx: Arrays) -> Arrays:
        def inexact_leaves(outer):
            x = stopped(jax.tree.leaves(self._embed(outer, m)), self.unread)
            return [x[i] for i in inexact_indices(self._x[0])]

        return jax.vjp(inexact_leaves, self._trained_outer)[1](dx)[0]

    def loss(self, m: Index, x: Arrays) -> LossParts:
        return self._loss(self._trained_outer, m, x)

    def loss_grads(self, m: Index, x: Arrays) -> tuple[Arrays, Arrays, LossParts]:
        # Only floating leaves of the activation have gradients. Ids and masks travel forwards
        # alone.
        inexact = inexact_indices(self._x[0])

        def loss_total(outer, inexact_leaves):
            parts = self._loss(outer, m, stopped(replaced(x, inexact, inexact_leaves), self.unread))
            return objective(parts.loss, self.config.num_pieces, self.sum_weights), parts

        differentiate = jax.grad(loss_total, argnums=(0, 1), has_aux=True)
        (grads, dx), parts = differentiate(self._trained_outer, [x[i] for i in inexact])
        return dx, grads, parts

    def block(self, block_args: Arrays, x: Arrays) -> Arrays:
        # `number` is of the block in the model and `m` of the micro-batch. Random numbers follow
        # from both, so they do not depend on the stage or the schedule.
        (*leaves, number, m), (shapes, treedef) = block_args, self._x
        if self.gathers_blocks:
            leaves = all_gather_leaves(self.config, leaves, self._block_plans, model=self.model)

        def block(weights, x):
            return call_block(self.model, self._key(m), number, weights, x)

        run = reading_in_products(self.config.strategy, block)
        if not self.remat_blocks:  # the stage itself does "full" remat
            run = checkpointed(self.model.remat, run)
        plans = self.layout.treedef.unflatten(self.layout.plans)
        weights = jax.tree.structure(plans[BLOCKS]).unflatten(leaves)
        y = run(weights, treedef.unflatten(stopped(x, self.unread)))
        return stopped(leaves_like(self.config.strategy, shapes, treedef, y), self.unread)

    def reduce(self, dw: Arrays) -> Arrays:
        placement = self.config.placement
        # ZeRO 2 scatters here, after each backward pass. ZeRO 3 did so in the backward pass of its
        # gathers.
        if not placement.grads or placement.params:
            return dw
        return reduce_scatter_grads(
            self.config.wire, dw, [plan.of_block() for plan in self._block_plans if plan.trainable]
        )

    @property
    def _block_plans(self) -> list[LeafPlan]:
        return [plan for plan in self.layout.plans if plan.stacked]

    @property
    def _trained_outer_indices(self) -> list[int]:
        return [
            i for i, plan in enumerate(self.layout.plans) if plan.trainable and not plan.stacked
        ]

    @property
    def _trained_outer(self) -> Arrays:
        return [self.params[i] for i in self._trained_outer_indices]

    def _outer(self, trained: Arrays) -> PyTree:
        params = self.layout.treedef.unflatten(
            replaced(self.params, self._trained_outer_indices, trained)
        )
        return outer_of(params)

    def _rows(self, m: Index) -> PyTree:
        return self.assemble(
            [jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False) for x in self.micro_batches]
        )

    def _key(self, m: Index) -> jax.Array | None:
        return step_key(self.config, self.inputs.step, self.inputs.rng, m)

    def _embed(self, outer: Arrays, m: Index) -> PyTree:
        return call(self.model.embed, self._key(m), EMBED, self._outer(outer), self._rows(m))

    @functools.cached_property
    def _x(self) -> tuple[list[jax.ShapeDtypeStruct], PyTree]:
        """The shapes and the structure of the input of a block."""
        return jax.tree.flatten(jax.eval_shape(self._embed, self._trained_outer, jnp.int32(0)))

    def _loss(self, outer: Arrays, m: Index, x: Arrays) -> LossParts:
        inputs = self._x[1].unflatten(x)
        returned = call(
            self.model.loss, self._key(m), LOSS, self._outer(outer), inputs, self._rows(m)
        )
        return loss_parts(self.config.strategy, returned, self.rows)
