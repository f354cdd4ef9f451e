"""Gradients of micro-batches that go through a pipeline; each device runs the blocks of its stage."""

import jax
import jax.numpy as jnp

from shardopt.core._block_model import BLOCKS, as_block_model, call
from shardopt.core._block_remat import checkpointed
from shardopt.core._errors import format_error
from shardopt.core._types import PyTree
from shardopt.engine._batch_dims import num_rows
from shardopt.engine._config import StrategyConfig
from shardopt.engine._layout import Layout
from shardopt.engine._loss import LossParts, all_gather_leaves, loss_parts, step_key
from shardopt.engine._micro_batches import cut
from shardopt.engine._reductions import reduce_scatter_grads
from shardopt.engine._rows import row_context, with_rows
from shardopt.pipeline import Schedule
from shardopt.pipeline import _messages as messages
from shardopt.pipeline import _uneven as uneven
from shardopt.pipeline._cut import is_even
from shardopt.pipeline._executor import execute, forward_only
from shardopt.pipeline._stage import StageFns
from shardopt.remat._gathered_block import leaves_like
from shardopt.remat._split_backward import floating


def pipelined_gradients(
    config: StrategyConfig,
    layout: Layout,
    params: list[jax.Array],
    batch: PyTree,
    step: jax.Array,
    rng: jax.Array | None,
) -> tuple[list[jax.Array], LossParts]:
    """Return what `micro_batch_gradients` returns: gradients of this stage's blocks, and of outer leaves that it uses.

    Outer parameters are gathered once a step, and their gradients scattered once. Parameters of blocks are gathered and
    scattered where they are used, as without a pipeline; or once a step if the config has `regather=False`.
    """
    schedule = config.schedule
    assert schedule is not None
    blocks, outer = _block_and_outer(layout)
    trained_blocks = [i for i in blocks if layout.plans[i].trainable]
    trained_outer = [i for i in outer if layout.plans[i].trainable]
    fns = _stage_fns(config, layout, params, batch, step, rng)
    sums = execute(
        schedule,
        fns,
        _stage_weights(config, layout, schedule, params),
        layout.counts,
        remat=config.remat,
        block_specs=[layout.plans[i].tensor for i in trained_blocks],
        outer_specs=[layout.plans[i].tensor for i in trained_outer],
    )
    block_grads = [g.astype(layout.plans[i].dtype) for i, g in zip(trained_blocks, sums.blocks, strict=True)]
    if config.gathers_once:
        block_grads = reduce_scatter_grads(config, block_grads, [layout.plans[i] for i in trained_blocks])
    grads = dict(zip(trained_blocks, block_grads, strict=True))
    outer_grads = [g.astype(layout.plans[i].dtype) for i, g in zip(trained_outer, sums.outer, strict=True)]
    if config.placement.grads:
        outer_grads = reduce_scatter_grads(config, outer_grads, [layout.plans[i] for i in trained_outer])
    grads |= dict(zip(trained_outer, outer_grads, strict=True))
    return [grads[i] for i in sorted(grads)], sums.parts


def stored_order(schedule: Schedule, layout: Layout, grads: list[jax.Array]) -> list[jax.Array]:
    """Return reduced gradients in the stored order of blocks, which is the model's order."""
    plans = layout.trained
    blocks = [i for i, plan in enumerate(plans) if plan.stacked]
    result, block_grads = list(grads), [grads[i] for i in blocks]
    tensor_specs = [plans[i].tensor for i in blocks]
    if is_even(layout.counts):
        ordered_grads = messages.to_model(schedule, block_grads, tensor_specs)
    else:
        ordered_grads = uneven.to_model(
            schedule, layout.counts, block_grads, [plans[i].spread for i in blocks], tensor_specs
        )
    for i, grad in zip(blocks, ordered_grads, strict=True):
        result[i] = grad
    return result


def pipelined_losses(
    config: StrategyConfig,
    layout: Layout,
    params: list[jax.Array],
    batch: PyTree,
    step: jax.Array,
    rng: jax.Array | None,
) -> LossParts:
    """Return what `micro_batch_losses` returns; the parts are zeros on all stages but the last block's."""
    schedule = config.schedule
    assert schedule is not None
    fns = _stage_fns(config, layout, params, batch, step, rng)
    return forward_only(schedule, fns, _stage_weights(config, layout, schedule, params), layout.counts)


def _stage_weights(
    config: StrategyConfig, layout: Layout, schedule: Schedule, params: list[jax.Array]
) -> list[jax.Array]:
    """Return the blocks of this stage, stacked in the schedule's order; gathered if blocks are gathered once a step."""
    plans = [plan for plan in layout.plans if plan.stacked]
    stored, tensor_specs = [params[i] for i in _block_and_outer(layout)[0]], [plan.tensor for plan in plans]
    if is_even(layout.counts):
        weights = messages.to_schedule(schedule, stored, tensor_specs)
    else:
        weights = uneven.to_schedule(schedule, layout.counts, stored, [plan.spread for plan in plans], tensor_specs)
    return all_gather_leaves(config, weights, plans) if config.gathers_once else weights


def _block_and_outer(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the indices of the leaves of blocks, and of the outer leaves."""
    blocks = [i for i, plan in enumerate(layout.plans) if plan.stacked]
    return blocks, [i for i, plan in enumerate(layout.plans) if not plan.stacked]


def _stage_fns(
    config: StrategyConfig,
    layout: Layout,
    params: list[jax.Array],
    batch: PyTree,
    step: jax.Array,
    rng: jax.Array | None,
) -> StageFns:
    """Return the model as functions of lists of leaves and micro-batch numbers.

    Outer parameters are gathered here, once for all micro-batches; the gradients are with respect to the gathered leaves.
    """
    model, sharded = as_block_model(with_rows(row_context(config), config.loss_fn)), config.placement
    assert model is not None
    gathers = sharded.params or config.gather_dtype is not None
    blocks, outer_indices = _block_and_outer(layout)
    plans = layout.treedef.unflatten(layout.plans)
    block_treedef, num_blocks = jax.tree.structure(plans[BLOCKS]), layout.plans[blocks[0]].shape[0]
    micro_batches, assemble = cut(config, batch, config.micro_batches)
    rows, pieces = num_rows(config, batch) // config.micro_batches, config.num_pieces

    outer = [params[i] for i in outer_indices]
    trained_positions = [position for position, i in enumerate(outer_indices) if layout.plans[i].trainable]
    if gathers:
        outer = all_gather_leaves(config, outer, [layout.plans[i] for i in outer_indices])

    def outer_with(leaves):
        outer_leaves, all_leaves = list(outer), list(params)
        for position, leaf in zip(trained_positions, leaves, strict=True):
            outer_leaves[position] = leaf
        for i, leaf in zip(outer_indices, outer_leaves, strict=True):
            all_leaves[i] = leaf
        return {name: value for name, value in layout.treedef.unflatten(all_leaves).items() if name != BLOCKS}

    def rows_of(m):
        return assemble([jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False) for x in micro_batches])

    def key_of(m):
        return None if rng is None else step_key(config, step, rng, m)

    def embed_tree(leaves, m):
        return call(model.embed, key_of(m), num_blocks, outer_with(leaves), rows_of(m))

    trained_outer = [outer[position] for position in trained_positions]
    x_shapes, x_treedef = jax.tree.flatten(jax.eval_shape(embed_tree, trained_outer, jnp.int32(0)))
    inexact = floating(x_shapes)

    def loss_of(leaves, m, x):
        returned = call(model.loss, key_of(m), num_blocks + 1, outer_with(leaves), x_treedef.unflatten(x), rows_of(m))
        parts = loss_parts(config.strategy, returned, rows)
        if isinstance(parts.loss.total, tuple):
            problem = (
                "a loss of several terms needs the weights of all micro-batches before the first is differentiated."
            )
            fix = "use one total and weight in a pipeline, or a mesh with pipeline=1."
            raise ValueError(format_error(config.strategy, problem, fix=fix))
        return parts

    def embed_grads(m, dx):
        def inexact_leaves(leaves):
            x = jax.tree.leaves(embed_tree(leaves, m))
            return [x[i] for i in inexact]

        return jax.vjp(inexact_leaves, trained_outer)[1](dx)[0]

    def loss_grads(m, x):
        def loss_total(leaves, inexact_leaves):
            inputs = list(x)
            for i, leaf in zip(inexact, inexact_leaves, strict=True):
                inputs[i] = leaf
            parts = loss_of(leaves, m, inputs)
            return parts.loss.total / pieces, parts

        (grads, dx), parts = jax.grad(loss_total, argnums=(0, 1), has_aux=True)(trained_outer, [x[i] for i in inexact])
        return dx, grads, parts

    def block(block_args, x):
        *leaves, number, m = block_args
        weights = block_treedef.unflatten(leaves)
        if gathers and not config.gathers_once:
            weights = all_gather_leaves(config, weights, plans[BLOCKS], of_block=True)

        def run(weights, x):
            return call(model.block, key_of(m), number, weights, x)

        if model.remat != "full":  # the stage itself does "full" remat
            run = checkpointed(model.remat, run)
        return leaves_like(config.strategy, x_shapes, x_treedef, run(weights, x_treedef.unflatten(x)))

    def reduce(dw):
        if not sharded.grads or sharded.params:
            return dw
        return reduce_scatter_grads(
            config, dw, [layout.plans[i].of_block() for i in blocks if layout.plans[i].trainable]
        )

    return StageFns(
        embed=lambda m: jax.tree.leaves(embed_tree(trained_outer, m)),
        embed_grads=embed_grads,
        loss=lambda m, x: loss_of(trained_outer, m, x),
        loss_grads=loss_grads,
        block=block,
        trained=[position for position, i in enumerate(blocks) if layout.plans[i].trainable],
        reduce=reduce,
        remat_blocks=model.remat == "full",
    )
