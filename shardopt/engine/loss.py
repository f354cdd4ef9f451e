"""The loss of the rows at hand: parameters gathered on the way, a random key of its own, sums returned.

In the per-device view these are the rows of one micro-batch on one device, in the global view those of all devices.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from shardopt.collectives import SMALL_BUCKET_BYTES, all_gather
from shardopt.core.block_model import BLOCKS, as_block_model, call, plain_block, run_blocks, takes_rng
from shardopt.core.errors import format_error, plural
from shardopt.core.types import (
    Max,
    Metric,
    Min,
    PyTree,
    Sum,
    Updated,
    Weighted,
    is_array_like,
    leaves_with_paths,
    wide_dtype,
)
from shardopt.engine.batch_dims import num_rows
from shardopt.engine.config import StrategyConfig
from shardopt.engine.constraints import GATHERED, gather_leaves, shard_activations
from shardopt.engine.explain import explained
from shardopt.engine.layout import Layout
from shardopt.engine.metrics import value_of
from shardopt.engine.rows import row_context, with_rows
from shardopt.nn.embedding import ColumnTable
from shardopt.partition import LeafPlan
from shardopt.remat.gathered_block import gathered_block

RESERVED = ("loss", "grad_norm")


class Gradients(NamedTuple):
    """What one global batch gives.

    Attributes:
      grads: the gradient of the loss of the union batch; None for frozen leaves.
      loss: that loss, scalar.
      metrics: name -> value on the union batch; `Sum`, `Max` and `Min` still say that they are.
      updates: key path -> new value of a frozen leaf.
      reducer: the new state of the reducer that the gradient went through, or None.
    """

    grads: PyTree
    loss: jax.Array
    metrics: dict[str, jax.Array | Metric]
    updates: dict[str, jax.Array]
    reducer: PyTree = None


class LossParts(NamedTuple):
    """A loss as sums: they add up over micro-batches and devices, and are divided at the very end.

    Attributes:
      loss: the loss as total and weight per row, or a tuple of each; a plain scalar is a mean, of weight 1.
      metrics: the aux dict without updates, each value as its kind; a plain number is a mean, of weight 1, and what is
        `Weighted` is taken per row.
      updates: key path -> new value of a frozen leaf.
    """

    loss: Weighted
    metrics: dict[str, Metric]
    updates: dict[str, jax.Array]

    def divided(self) -> tuple[jax.Array, dict[str, jax.Array | Metric]]:
        """Return the loss and metrics: totals divided by weights; `Sum`, `Max` and `Min` as they are."""
        metrics = {name: value_of(one) if isinstance(one, Weighted) else one for name, one in self.metrics.items()}
        return value_of(self.loss), metrics


def loss_of_rows(
    config: StrategyConfig, layout: Layout, params: PyTree, batch: PyTree, key: jax.Array | None
) -> LossParts:
    """Return the loss of these rows; parameters that are sharded, or cast to travel, are gathered on the way."""
    with explained(config, num_rows(config, batch)):
        return _loss_of_rows(config, layout, params, batch, key)


def _loss_of_rows(
    config: StrategyConfig, layout: Layout, params: PyTree, batch: PyTree, key: jax.Array | None
) -> LossParts:
    plans = layout.treedef.unflatten(layout.plans)
    rows, loss_fn = num_rows(config, batch), config.loss_fn
    if config.view == "per_device":
        loss_fn = with_rows(row_context(config), loss_fn)
    model = as_block_model(loss_fn)
    gathers = config.placement.params or config.gather_dtype is not None
    if model is not None:
        hooks = {}
        if gathers:
            outer_plans = {name: value for name, value in plans.items() if name != BLOCKS}
            tables = layout.tables.intersection(model.tables)  # a model that is evaluated may have none
            hooks["gather_outer"] = lambda outer: all_gather_leaves(config, outer, outer_plans, tables=tables)
            gather_one = lambda block: all_gather_leaves(config, block, plans[BLOCKS], of_block=True)  # noqa: E731
            hooks["run_block"] = gathered_block(config.strategy, model, gather_one)
            if config.expert_leaves and tables and config.view == "per_device":
                # the table is none that the loss reads, and gathers that only one of the two reads are one
                hooks["before_loss"] = lambda outer, x: _scattered_first(hooks["gather_outer"], outer, x)
        if config.view == "global":
            hooks["run_block"] = shard_activations(config, hooks.get("run_block", plain_block(model)), batch)
        return loss_parts(config.strategy, run_blocks(model, params, batch, key, **hooks), rows)
    if not gathers:
        return loss_parts(config.strategy, call(loss_fn, key, 0, params, batch), rows)

    def gathered_loss(params, batch):
        gathered = all_gather_leaves(config, params, plans, bucket_bytes=0)  # or all would be held at the same time
        return loss_parts(config.strategy, call(loss_fn, key, 0, gathered, batch), rows)

    if config.micro_batches > 1:
        # Or the compiler sees that every micro-batch gathers the same, and keeps the whole model through the loop.
        params, batch = _tied_together((params, batch))
        batch = jax.lax.stop_gradient(batch)  # the barrier gives it tangents, which callbacks refuse
    if jax.debug_nans.value:  # a checkpoint would hide the place of a NaN
        return gathered_loss(params, batch)
    # The backward pass gathers again what it needs rather than keeping every gathered weight from the forward pass.
    return jax.checkpoint(gathered_loss, policy=_save_all_but_gathers)(params, batch)


def all_gather_leaves(
    config: StrategyConfig,
    tree: PyTree,
    plans: PyTree,
    *,
    of_block: bool = False,
    tables: Collection[str] = (),
    bucket_bytes: int = SMALL_BUCKET_BYTES,
) -> PyTree:
    """All-gather the leaves of a tree over data, each cast to what travels; one block of them if `of_block`.

    Those among `tables` stay where they are, as `ColumnTable`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flat: list[LeafPlan] = treedef.flatten_up_to(plans)
    if of_block:
        flat = [plan.of_block() for plan in flat]
    if config.view == "global":
        return treedef.unflatten(gather_leaves(config, leaves, flat))
    # Only what is trained: running statistics would stop moving in half precision.
    cast = [plan.trainable and jnp.issubdtype(plan.dtype, jnp.floating) for plan in flat]
    dtypes = [config.gather_dtype if one else None for one in cast]
    where = [None if plan.path in tables else plan.dim for plan in flat], [plan.tensor for plan in flat]
    scattered = [config.wire_dtype(plan.dtype) for plan in flat]
    axes = [plan.axes for plan in flat]
    how = {"scatter_dtypes": scattered, "bucket_bytes": bucket_bytes}
    # as dense models are compiled is measured in many places (benchmarks/pod_compiles.py): only those with experts are changed
    in_place = of_block and bool(config.expert_leaves)
    gathered = all_gather(leaves, *where, axes=axes, dtypes=dtypes, cast_in_place=in_place, **how)
    return treedef.unflatten(
        [
            _table(leaf, plan, sums) if plan.path in tables else checkpoint_name(leaf, GATHERED)
            for leaf, plan, sums in zip(gathered, flat, scattered, strict=True)
        ]
    )


def _scattered_first(gather: Callable[[PyTree], PyTree], outer: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Return what the loss reads, and x, whose gradient waits for that of the former to be scattered.

    Left alone, XLA:TPU may scatter last: DeepSeek-V3 held its logits' gradient, 2.1 GB, while all blocks were differentiated.
    """
    leaves, treedef = jax.tree.flatten((outer, x))
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    @jax.custom_vjp
    def together(some: list[jax.Array]) -> list[jax.Array]:
        return some

    together.defvjp(lambda some: (some, None), lambda _, grads: (jax.lax.optimization_barrier(grads),))
    for i, leaf in zip(moving, together([leaves[i] for i in moving]), strict=True):
        leaves[i] = leaf
    outer, x = treedef.unflatten(leaves)
    return gather(outer), x


def _table(shard: jax.Array, plan: LeafPlan, scattered: DTypeLike | None) -> ColumnTable:
    return ColumnTable(shard, plan.axes, plan.tensor, (scattered or plan.dtype) if plan.trainable else None)


def _save_all_but_gathers(primitive: jax.extend.core.Primitive, *_: object, **params: object) -> bool:
    """Say, as a `jax.checkpoint` policy, that the backward pass recomputes weight gathers and nothing else.

    Every step from the gather (of bits, in half precision) to its named result is refused: one that was saved
    would keep the gathered weight, and make recomputing the rest free.
    """
    gathers = ("all_gather", "bitcast_convert_type", "sharding_constraint")
    return primitive.name not in gathers and params.get("name") != GATHERED


def _tied_together(tree: PyTree) -> PyTree:
    """Return the tree behind one barrier, so that nothing computed from a part of it moves ahead of the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    plain = [i for i, leaf in enumerate(leaves) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    for i, leaf in zip(plain, jax.lax.optimization_barrier([leaves[i] for i in plain]), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def step_key(
    config: StrategyConfig, step: jax.Array, rng: jax.Array, micro_batch: ArrayLike, device: ArrayLike | None = None
) -> jax.Array | None:
    """A key of its own for each step, device along the data axes (by default this one), and micro-batch."""
    if not takes_rng(config.loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    key = jax.random.fold_in(
        key, jax.lax.axis_index((*config.axes.rows, *config.axes.positions)) if device is None else device
    )
    return jax.random.fold_in(key, micro_batch)


def loss_parts(who: str, returned: PyTree, rows: int) -> LossParts:
    """Bring to one form `scalar | Weighted`, alone or with an aux dict.

    Args:
      who: the function that the user called, for messages.
      returned: what the loss function returned.
      rows: how many rows it was given. What is `Weighted` is taken per row, both parts, which leaves its quotient
        and makes its size that of a mean.

    Raises:
      TypeError: if the loss is no number, aux is not a dict of arrays, `Weighted`, `Sum`, `Max`, `Min` and `Updated`,
        or a metric is of integers and does not say how its parts become one.
      ValueError: if the loss is not a scalar, `Weighted` has as many totals as weights not, or aux has a reserved name.
    """
    main, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted | Sum | Max | Min):
        if len(returned) != 2:
            raise TypeError(f"{who}: loss_fn must return loss or (loss, aux), got a tuple of {len(returned)}.")
        main, aux = returned
    if aux is None:
        aux = {}
    if not isinstance(aux, dict):
        what = f"the aux value of loss_fn must be a dict of metrics, got {type(aux).__name__}."
        fix = "return (loss, {'name': value}); or so.Weighted(total, weight) for a mean of total / weight."
        raise TypeError(format_error(who, what, fix=fix))
    if taken := [name for name in RESERVED if name in aux]:
        fix = "rename it in the aux dict of loss_fn."
        raise ValueError(format_error(who, f"metric names that shardopt itself reports: {taken}.", fix=fix))
    updates = [leaf for value in aux.values() if isinstance(value, Updated) for leaf in leaves_with_paths(value.values)]
    metrics = {name: value for name, value in aux.items() if not isinstance(value, Updated)}
    _check_metrics(who, metrics)
    if isinstance(main, Sum | Max | Min) or not _is_metric(main):
        what = f"loss_fn must return a number, got {type(main).__name__}."
        raise TypeError(format_error(who, what, fix="return a scalar, so.Weighted, or (that, aux dict)."))
    return LossParts(
        loss=_loss(who, main, rows),
        metrics={name: _metric(value, rows) for name, value in metrics.items()},
        updates={path: jax.lax.stop_gradient(value) for path, value in updates},
    )


def _check_metrics(who: str, metrics: dict[str, PyTree]) -> None:
    if strange := [f"{name}: {type(value).__name__}" for name, value in metrics.items() if not _is_metric(value)]:
        what = "aux values of loss_fn must be numbers, arrays, so.Weighted, so.Sum, so.Max, so.Min or so.Updated."
        raise TypeError(format_error(who, what, strange, "give each number a name of its own."))
    plain = {name: jnp.asarray(x) for name, x in metrics.items() if not isinstance(x, Weighted | Sum | Max | Min)}
    shown = {name: f"{name}: {x.dtype}{list(x.shape)}" for name, x in plain.items()}
    if whole := [shown[name] for name, x in plain.items() if not jnp.issubdtype(x.dtype, jnp.inexact)]:
        what = f"{plural(len(whole), 'metric')} of integers or booleans: a count, or a mean?"
        fix = "say which: so.Sum(x), so.Max(x), so.Min(x), so.Weighted(total, weight), or x.astype(float) for the mean."
        raise TypeError(format_error(who, what, whole, fix))
    for name, value in metrics.items():
        _check_terms(who, f"metric {name!r}", value)


def _check_terms(who: str, what: str, value: PyTree) -> None:
    if isinstance(value, Weighted):
        totals, weights = (len(x) if isinstance(x, tuple) else 1 for x in value)
        if totals != weights:
            what = f"{what} is so.Weighted of {plural(totals, 'total')} and {plural(weights, 'weight')}."
            raise ValueError(format_error(who, what, fix="give each total a weight: so.Weighted((a, b), (wa, wb))."))


def _is_metric(value: PyTree) -> bool:
    parts: list[PyTree] = [value]
    if isinstance(value, Weighted):
        parts = [part for x in value for part in (x if isinstance(x, tuple) else (x,))]
    elif isinstance(value, Sum | Max | Min):
        parts = [value.value]
    numeric = lambda dtype: jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)  # noqa: E731
    return all(isinstance(part, int | float) or (is_array_like(part) and numeric(part.dtype)) for part in parts)


def _metric(value: ArrayLike | Metric, rows: int) -> Metric:
    """Return a metric as its kind; a number is a mean, of weight 1."""
    if isinstance(value, Sum | Max | Min):
        x = jnp.asarray(value.value)
        whole = jnp.int32 if x.dtype == bool else x.dtype
        x = x.astype(wide_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else whole)
        return type(value)(jax.lax.stop_gradient(x))
    return jax.tree.map(jax.lax.stop_gradient, _per_row(value, rows))


def _per_row(value: ArrayLike | Weighted, rows: int) -> Weighted:
    """Return what is `Weighted` as totals and weights per row, and a number as a mean, of weight 1."""
    total, weight = value if isinstance(value, Weighted) else (value, 1.0)
    if isinstance(total, tuple) and isinstance(weight, tuple):
        terms = [_per_row(Weighted(*term), rows) for term in zip(total, weight, strict=True)]
        return Weighted(tuple(one.total for one in terms), tuple(one.weight for one in terms))
    total, weight = jnp.asarray(total), jnp.asarray(weight)
    total = total.astype(wide_dtype(total.dtype))
    weight = weight.astype(total.dtype)
    return Weighted(total / rows, weight / rows) if isinstance(value, Weighted) else Weighted(total, weight)


def _loss(who: str, main: ArrayLike | Weighted, rows: int) -> Weighted:
    _check_terms(who, "the loss", main)
    for total in jax.tree.leaves(main.total if isinstance(main, Weighted) else main):
        if not jnp.issubdtype(dtype := jnp.asarray(total).dtype, jnp.floating):
            raise TypeError(f"{who}: loss_fn must return a real floating number, got dtype {dtype}.")
    loss = _per_row(main, rows)
    for name, values in loss._asdict().items():
        for value in jax.tree.leaves(values):
            if value.shape != ():
                what = f"loss_fn must return a scalar, but its {name} has shape {value.shape}."
                fix = "reduce it with .mean() over the examples, or return so.Weighted(sum, weight)."
                raise ValueError(format_error(who, what, fix=fix))
    return loss
