"""The per-device view: gather, differentiate each micro-batch, reduce once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardopt.collectives import per_device
from shardopt.core.types import PyTree
from shardopt.mesh import data_axes
from shardopt.strategies.layout import Layout
from shardopt.strategies.local_loss import num_pieces
from shardopt.strategies.loss import LossParts
from shardopt.strategies.micro_batches import micro_batch_gradients, micro_batch_losses
from shardopt.strategies.pipelined import pipelined_gradients, pipelined_losses, stored_order
from shardopt.strategies.recipe import Recipe
from shardopt.strategies.reducing import manual_specs, reduce_through
from shardopt.strategies.reduction import reduce, scale, scatter, sum_parts, sum_shared


class Differentiated(NamedTuple):
    """What one global batch gives: the gradient (None for frozen leaves) and loss of the union batch.

    `reducer` is the new state of the reducer that the gradient went through, or None.
    """

    grads: PyTree
    loss: Any
    metrics: dict[str, Any]
    updates: dict[str, Any]
    reducer: PyTree


def make_gradients(recipe: Recipe, layout: Layout) -> Callable[..., Differentiated]:
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
            grads = [scale(grad, factor * through.size) for grad in sum_shared(grads, plans, pipelined=pipelined)]
            grads, reducer_state = reduce_through(through, grads, reducer_state)
        else:
            if split.opt_state and not split.grads:
                grads = scatter(grads, plans)
            grads = reduce(grads, plans, axes, split=split.opt_state, pipelined=pipelined)
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
        return Differentiated(layout.merge([None] * len(layout.plans), grads), *finish(parts), state)

    return gradients


def make_loss(recipe: Recipe, layout: Layout) -> Callable[..., tuple[Any, dict[str, Any]]]:
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


def grad_specs(recipe: Recipe, layout: Layout) -> list[PartitionSpec]:
    """Return how gradients of the trainable leaves are split over all but tensor: as the optimizer state, if reduced so."""
    split = recipe.placement.opt_state and layout.reducer is None
    return [PartitionSpec(*recipe.rows, *plan.data_spec(split=split)) for plan in layout.plans if plan.trainable]


def batch_spec(recipe: Recipe) -> PartitionSpec:
    """Return the spec of every batch leaf: its first dim over replica and data."""
    return PartitionSpec(data_axes(recipe.mesh))


def finish(parts: LossParts) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Divide totals by weights: (loss, metrics, updates)."""
    divide = lambda one: one.total / one.weight  # noqa: E731
    return divide(parts.loss), {name: divide(one) for name, one in parts.metrics.items()}, parts.updates


def _in_specs(recipe: Recipe, layout: Layout) -> tuple[Any, ...]:
    """How (params, batch, step, rng) come into the per-device view."""
    whole = PartitionSpec()
    params = [PartitionSpec(*recipe.rows, *plan.data_spec(split=recipe.placement.params)) for plan in layout.plans]
    return params, batch_spec(recipe), whole, whole
