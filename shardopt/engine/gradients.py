"""The per-device view: gather, differentiate each micro-batch, reduce once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.collectives import per_device
from shardopt.core.types import PyTree, wide_dtype
from shardopt.engine.compression import compress_mean, manual_specs
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout
from shardopt.engine.loss import LossParts, cut, local_loss, num_pieces, step_key
from shardopt.engine.pipelined import pipelined_gradients, pipelined_losses, stored_order
from shardopt.engine.reductions import all_reduce_grads, all_reduce_outer, reduce_scatter_grads, scale, sum_parts
from shardopt.mesh import data_axes
from shardopt.partition import LeafPlan

# Gradients of one micro-batch after another, in a scan.


def micro_batch_gradients(
    recipe: StrategyConfig, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any
) -> tuple[list[Any], LossParts]:
    """Return the local gradients of the trained leaves, summed over micro-batches, and parts [micro_batches, ...].

    Where the placement splits gradients they come reduce-scattered over data.
    """
    trained = [i for i, plan in enumerate(layout.plans) if plan.trainable]
    plans, pieces, split = [layout.plans[i] for i in trained], num_pieces(recipe), recipe.placement

    def total(train_leaves, micro_batch, key):
        parts = local_loss(recipe, layout, layout.merge(params, train_leaves), micro_batch, key)
        return parts.loss.total / pieces, parts

    def one_micro_batch(micro_batch, index):
        key = step_key(recipe, step, rng, index)
        grads, parts = jax.grad(total, has_aux=True)([params[i] for i in trained], micro_batch, key)
        return reduce_scatter_grads(grads, plans) if split.grads and not split.params else grads, parts

    return _accumulate(one_micro_batch, batch, recipe.micro_batches, plans)


def micro_batch_losses(
    recipe: StrategyConfig, layout: Layout, params: list[Any], batch: PyTree, step: Any, rng: Any
) -> LossParts:
    """Return the parts of the local loss, [micro_batches, ...]; no keys if rng is None."""
    tree = layout.treedef.unflatten(params)

    @jax.checkpoint  # a line search differentiates this: one micro-batch at a time then, too
    def one_micro_batch(micro_batch, index):
        key = None if rng is None else step_key(recipe, step, rng, index)
        return local_loss(recipe, layout, tree, micro_batch, key)

    def body(_, micro_batch_and_index):
        return None, one_micro_batch(*micro_batch_and_index)

    if recipe.micro_batches == 1:
        return jax.tree.map(lambda x: x[None], one_micro_batch(batch, jnp.int32(0)))
    return jax.lax.scan(body, None, cut(batch, recipe.micro_batches))[1]


def _accumulate(one_micro_batch: Callable[..., Any], batch: PyTree, count: int, plans: Sequence[LeafPlan]) -> Any:
    """Sum gradients over micro-batches in a scan, in fp32 at least; parts come stacked [count, ...]."""
    if count == 1:
        grads, parts = one_micro_batch(batch, jnp.int32(0))
        return grads, jax.tree.map(lambda x: x[None], parts)

    def body(sums, micro_batch_and_index):
        grads, parts = one_micro_batch(*micro_batch_and_index)
        return keep([total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]), parts

    # Left alone, the partitioner would keep the accumulators whole over tensor.
    def keep(sums):
        return [jax.lax.with_sharding_constraint(x, plan.tensor) for x, plan in zip(sums, plans, strict=True)]

    micro_batches = cut(batch, count)
    shapes, _ = jax.eval_shape(one_micro_batch, *jax.tree.map(lambda x: x[0], micro_batches))
    zeros = keep([jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in shapes])
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    return [total.astype(one.dtype) for total, one in zip(sums, shapes, strict=True)], parts


class Gradients(NamedTuple):
    """What one global batch gives: the gradient (None for frozen leaves) and loss of the union batch.

    `reducer` is the new state of the reducer that the gradient went through, or None.
    """

    grads: PyTree
    loss: Any
    metrics: dict[str, Any]
    updates: dict[str, Any]
    reducer: PyTree


def make_gradients(recipe: StrategyConfig, layout: Layout) -> Callable[..., Gradients]:
    """Return `gradients(params, batch, step, rng, reducer_state=None)`, to be called in the global view.

    With T_i, W_i the total and weight of the loss on device and micro-batch i (a plain mean has W_i = 1), the
    gradient is that of sum_i T_i / sum_i W_i. What is differentiated and summed is T_i / n, with n the number of
    pieces, and the sum is multiplied by n / sum_i W_i at the end, in fp32 at least: half-precision gradients then
    are of the size of the mean's all the way, and no weight is rounded to half precision.

    Where replicas train apart, parameters, gradients, loss and metrics have a first dim, one row a replica.
    """
    plans = [plan for plan in layout.plans if plan.trainable]
    axes, pieces, split = recipe.axes, num_pieces(recipe), recipe.placement
    pipelined = recipe.schedule is not None
    differentiate = pipelined_gradients if pipelined else micro_batch_gradients
    through = layout.reducer

    def sums(params, batch, step, rng, reducer_state):
        grads, parts = differentiate(recipe, layout, params, batch, step, rng)
        parts = sum_parts(parts, axes, pipelined=pipelined)
        factor = pieces / parts.loss.weight
        if through is not None:
            # The mean over N devices of N times a device's part of the sum.
            grads = [scale(grad, factor * through.size) for grad in all_reduce_outer(grads, plans, pipelined=pipelined)]
            grads, reducer_state = compress_mean(through, grads, reducer_state)
        else:
            if split.opt_state and not split.grads:
                grads = reduce_scatter_grads(grads, plans)
            grads = all_reduce_grads(grads, plans, axes, split=split.opt_state, pipelined=pipelined)
            grads = [scale(grad, factor) for grad in grads]
        if pipelined:
            grads = stored_order(recipe, layout, grads)
        return grads, parts, reducer_state

    def local(params, *rest):
        if not recipe.apart:
            return sums(params, *rest)
        grads, parts, reducer_state = sums([x.reshape(x.shape[1:]) for x in params], *rest)
        return *jax.tree.map(lambda x: x[None], (grads, parts)), reducer_state

    state_specs = None if through is None else manual_specs(through)
    run = per_device(
        local,
        recipe.mesh,
        in_specs=(*_in_specs(recipe, layout), state_specs),
        out_specs=(grad_specs(recipe, layout), PartitionSpec(*recipe.rows), state_specs),
    )

    def gradients(params, batch, step, rng, reducer_state=None):
        grads, parts, state = run(layout.treedef.flatten_up_to(params), batch, step, rng, reducer_state)
        return Gradients(layout.merge([None] * len(layout.plans), grads), *finish(parts), state)

    return gradients


def make_loss(recipe: StrategyConfig, layout: Layout) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return `loss(params, batch, step=None, rng=None) -> (loss, metrics)` of the union batch.

    With a step and rng it is the very function that `make_gradients` differentiates, with the same keys and
    micro-batches; without them the loss gets no key.
    """
    axes, pipelined = recipe.axes, recipe.schedule is not None
    losses = pipelined_losses if pipelined else micro_batch_losses

    def local(params, batch, step, rng):
        return sum_parts(losses(recipe, layout, params, batch, step, rng), axes, pipelined=pipelined)

    run = per_device(local, recipe.mesh, in_specs=_in_specs(recipe, layout), out_specs=PartitionSpec())

    def loss(params, batch, step=None, rng=None):
        return finish(run(layout.treedef.flatten_up_to(params), batch, step, rng))[:2]

    return loss


def grad_specs(recipe: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
    """Return how gradients of the trainable leaves are split over all but tensor: as the optimizer state, if reduced so."""
    split = recipe.placement.opt_state and layout.reducer is None
    return [PartitionSpec(*recipe.rows, *plan.data_spec(split=split)) for plan in layout.plans if plan.trainable]


def batch_spec(recipe: StrategyConfig) -> PartitionSpec:
    """Return the spec of every batch leaf: its first dim over replica and data."""
    return PartitionSpec(data_axes(recipe.mesh))


def finish(parts: LossParts) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Divide totals by weights: (loss, metrics, updates)."""
    divide = lambda one: one.total / one.weight  # noqa: E731
    return divide(parts.loss), {name: divide(one) for name, one in parts.metrics.items()}, parts.updates


def _in_specs(recipe: StrategyConfig, layout: Layout) -> tuple[Any, ...]:
    """How (params, batch, step, rng) come into the per-device view."""
    whole = PartitionSpec()
    params = [PartitionSpec(*recipe.rows, *plan.data_spec(split=recipe.placement.params)) for plan in layout.plans]
    return params, batch_spec(recipe), whole, whole
