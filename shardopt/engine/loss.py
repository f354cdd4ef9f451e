"""The loss of some rows: it gathers parameters when they are needed, makes a random key, and returns sums.

In the per-device view these are the rows of one micro-batch on one device; in the global view, the rows of all devices.
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
    """The gradient, loss and metrics of one global batch.

    Attributes:
      grads: the gradient of the loss of the union batch; None for frozen leaves.
      loss: the loss, a scalar.
      metrics: name -> value on the union batch; `Sum`, `Max` and `Min` keep their kinds.
      updates: key path -> new value of a frozen leaf.
      reducer: the new state of the reducer of the gradient, or None.
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
      metrics: the aux dict without updates, each value as its kind. A plain number is a mean, of weight 1; the parts of a
        `Weighted` are divided by the number of rows.
      updates: key path -> new value of a frozen leaf.
    """

    loss: Weighted
    metrics: dict[str, Metric]
    updates: dict[str, jax.Array]

    def divided(self) -> tuple[jax.Array, dict[str, jax.Array | Metric]]:
        """Return the loss and metrics: totals divided by weights; `Sum`, `Max` and `Min` are not changed."""
        metrics = {
            name: value_of(metric) if isinstance(metric, Weighted) else metric for name, metric in self.metrics.items()
        }
        return value_of(self.loss), metrics


def loss_of_rows(
    config: StrategyConfig, layout: Layout, params: PyTree, batch: PyTree, key: jax.Array | None
) -> LossParts:
    """Return the loss of these rows; parameters that are sharded, or cast before the wire, are gathered when they are needed."""
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
            tables = layout.tables.intersection(model.tables)  # the model of evaluation may have no tables
            hooks["gather_outer"] = lambda outer: all_gather_leaves(config, outer, outer_plans, tables=tables)
            gather_one = lambda block: all_gather_leaves(config, block, plans[BLOCKS], of_block=True)  # noqa: E731
            hooks["run_block"] = gathered_block(config.strategy, model, gather_one)
            if config.expert_leaves and tables and config.view == "per_device":
                # The loss does not read the table. Other outer leaves are read by embed or by the loss, and gathered once.
                hooks["before_loss"] = lambda outer, x: _scatter_first(hooks["gather_outer"], outer, x)
        if config.view == "global":
            hooks["run_block"] = shard_activations(config, hooks.get("run_block", plain_block(model)), batch)
        return loss_parts(config.strategy, run_blocks(model, params, batch, key, **hooks), rows)
    if not gathers:
        return loss_parts(config.strategy, call(loss_fn, key, 0, params, batch), rows)

    def gathered_loss(params, batch):
        # without buckets, because a bucket would hold all leaves at the same time
        gathered = all_gather_leaves(config, params, plans, bucket_bytes=0)
        return loss_parts(config.strategy, call(loss_fn, key, 0, gathered, batch), rows)

    if config.micro_batches > 1:
        # Otherwise the compiler sees that all micro-batches gather the same weights, and keeps the gathered model.
        params, batch = _behind_barrier((params, batch))
        batch = jax.lax.stop_gradient(batch)  # the barrier gives it tangents, which callbacks refuse
    if jax.debug_nans.value:  # a checkpoint would hide the source of a NaN
        return gathered_loss(params, batch)
    # The backward pass gathers weights again, so that gathered weights of the forward pass need not be kept.
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
    """All-gather the leaves of a tree over data, each cast to `gather_dtype`; with `of_block` the leaves of one block.

    Leaves named in `tables` stay sharded, as `ColumnTable`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaf_plans: list[LeafPlan] = treedef.flatten_up_to(plans)
    if of_block:
        leaf_plans = [plan.of_block() for plan in leaf_plans]
    if config.view == "global":
        return treedef.unflatten(gather_leaves(config, leaves, leaf_plans))
    # Only trained leaves: running statistics would stop changing in half precision.
    is_cast = [plan.trainable and jnp.issubdtype(plan.dtype, jnp.floating) for plan in leaf_plans]
    dtypes = [config.gather_dtype if cast else None for cast in is_cast]
    dims = [None if plan.path in tables else plan.dim for plan in leaf_plans]
    tensor_specs = [plan.tensor for plan in leaf_plans]
    scatter_dtypes = [config.wire_dtype(plan.dtype) for plan in leaf_plans]
    gathered = all_gather(
        leaves,
        dims,
        tensor_specs,
        axes=[plan.axes for plan in leaf_plans],
        dtypes=dtypes,
        # Benchmarks of dense models (benchmarks/pod_compiles.py) were measured without it: only models with experts get it.
        cast_in_place=of_block and bool(config.expert_leaves),
        scatter_dtypes=scatter_dtypes,
        bucket_bytes=bucket_bytes,
    )
    return treedef.unflatten(
        [
            _column_table(leaf, plan, scatter_dtype) if plan.path in tables else checkpoint_name(leaf, GATHERED)
            for leaf, plan, scatter_dtype in zip(gathered, leaf_plans, scatter_dtypes, strict=True)
        ]
    )


def _scatter_first(gather: Callable[[PyTree], PyTree], outer: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Return the gathered outer leaves, and x; in the backward pass the gradient of x waits until theirs is scattered.

    Otherwise XLA:TPU may scatter last: DeepSeek-V3 held its logits' gradient, 2.1 GB, while all blocks were differentiated.
    """
    leaves, treedef = jax.tree.flatten((outer, x))
    inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    @jax.custom_vjp
    def identity(arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays

    identity.defvjp(lambda arrays: (arrays, None), lambda _, grads: (jax.lax.optimization_barrier(grads),))
    for i, leaf in zip(inexact, identity([leaves[i] for i in inexact]), strict=True):
        leaves[i] = leaf
    outer, x = treedef.unflatten(leaves)
    return gather(outer), x


def _column_table(shard: jax.Array, plan: LeafPlan, scatter_dtype: DTypeLike | None) -> ColumnTable:
    return ColumnTable(shard, plan.axes, plan.tensor, (scatter_dtype or plan.dtype) if plan.trainable else None)


def _save_all_but_gathers(primitive: jax.extend.core.Primitive, *_: object, **params: object) -> bool:
    """Return whether a value may be saved, as a `jax.checkpoint` policy: the backward pass recomputes weight gathers only.

    No step from the gather (of bits, in half precision) to its named result may be saved. A saved step would keep the
    gathered weight, and recomputing the remaining steps would cost nothing.
    """
    gathers = ("all_gather", "bitcast_convert_type", "sharding_constraint")
    return primitive.name not in gathers and params.get("name") != GATHERED


def _behind_barrier(tree: PyTree) -> PyTree:
    """Return the tree behind one barrier, so that no computation on one part of it moves ahead of the other parts."""
    leaves, treedef = jax.tree.flatten(tree)
    barrier_indices = [i for i, leaf in enumerate(leaves) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    for i, leaf in zip(
        barrier_indices, jax.lax.optimization_barrier([leaves[i] for i in barrier_indices]), strict=True
    ):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def step_key(
    config: StrategyConfig, step: jax.Array, rng: jax.Array, micro_batch: ArrayLike, device: ArrayLike | None = None
) -> jax.Array | None:
    """Return a different key for each step, micro-batch, and device along the data axes (by default this device)."""
    if not takes_rng(config.loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    key = jax.random.fold_in(
        key, jax.lax.axis_index((*config.axes.rows, *config.axes.positions)) if device is None else device
    )
    return jax.random.fold_in(key, micro_batch)


def loss_parts(caller: str, returned: PyTree, rows: int) -> LossParts:
    """Convert the result of a loss, `scalar | Weighted`, alone or with an aux dict, to `LossParts`.

    Args:
      caller: the function that the user called, for messages.
      returned: the result of the loss function.
      rows: the number of rows of its batch. Both parts of a `Weighted` are divided by it, which leaves their quotient
        unchanged and makes the total as large as a mean.

    Raises:
      TypeError: if the loss is no number, or aux is not a dict of arrays, `Weighted`, `Sum`, `Max`, `Min` and `Updated`. If a
        metric of integers has no kind, so that its parts cannot be combined.
      ValueError: if the loss is not a scalar, `Weighted` has different numbers of totals and weights, or aux has a reserved
        name.
    """
    loss_value, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted | Sum | Max | Min):
        if len(returned) != 2:
            raise TypeError(f"{caller}: loss_fn must return loss or (loss, aux), got a tuple of {len(returned)}.")
        loss_value, aux = returned
    if aux is None:
        aux = {}
    if not isinstance(aux, dict):
        problem = f"the aux value of loss_fn must be a dict of metrics, got {type(aux).__name__}."
        fix = "return (loss, {'name': value}); or so.Weighted(total, weight) for a mean of total / weight."
        raise TypeError(format_error(caller, problem, fix=fix))
    if reserved_names := [name for name in RESERVED if name in aux]:
        fix = "rename it in the aux dict of loss_fn."
        raise ValueError(format_error(caller, f"metric names that shardopt itself reports: {reserved_names}.", fix=fix))
    updates = [leaf for value in aux.values() if isinstance(value, Updated) for leaf in leaves_with_paths(value.values)]
    metrics = {name: value for name, value in aux.items() if not isinstance(value, Updated)}
    _check_metrics(caller, metrics)
    if isinstance(loss_value, Sum | Max | Min) or not _is_metric(loss_value):
        problem = f"loss_fn must return a number, got {type(loss_value).__name__}."
        raise TypeError(format_error(caller, problem, fix="return a scalar, so.Weighted, or (that, aux dict)."))
    return LossParts(
        loss=_loss(caller, loss_value, rows),
        metrics={name: _metric(value, rows) for name, value in metrics.items()},
        updates={path: jax.lax.stop_gradient(value) for path, value in updates},
    )


def _check_metrics(caller: str, metrics: dict[str, PyTree]) -> None:
    if wrong_metrics := [f"{name}: {type(value).__name__}" for name, value in metrics.items() if not _is_metric(value)]:
        problem = "aux values of loss_fn must be numbers, arrays, so.Weighted, so.Sum, so.Max, so.Min or so.Updated."
        raise TypeError(format_error(caller, problem, wrong_metrics, "give each number a name of its own."))
    plain_metrics = {
        name: jnp.asarray(x) for name, x in metrics.items() if not isinstance(x, Weighted | Sum | Max | Min)
    }
    descriptions = {name: f"{name}: {x.dtype}{list(x.shape)}" for name, x in plain_metrics.items()}
    if discrete := [
        descriptions[name] for name, x in plain_metrics.items() if not jnp.issubdtype(x.dtype, jnp.inexact)
    ]:
        problem = f"{plural(len(discrete), 'metric')} of integers or booleans: a count, or a mean?"
        fix = "say which: so.Sum(x), so.Max(x), so.Min(x), so.Weighted(total, weight), or x.astype(float) for the mean."
        raise TypeError(format_error(caller, problem, discrete, fix))
    for name, value in metrics.items():
        _check_terms(caller, f"metric {name!r}", value)


def _check_terms(caller: str, name: str, value: PyTree) -> None:
    if isinstance(value, Weighted):
        totals, weights = (len(x) if isinstance(x, tuple) else 1 for x in value)
        if totals != weights:
            problem = f"{name} is so.Weighted of {plural(totals, 'total')} and {plural(weights, 'weight')}."
            raise ValueError(
                format_error(caller, problem, fix="give each total a weight: so.Weighted((a, b), (wa, wb)).")
            )


def _is_metric(value: PyTree) -> bool:
    parts: list[PyTree] = [value]
    if isinstance(value, Weighted):
        parts = [part for x in value for part in (x if isinstance(x, tuple) else (x,))]
    elif isinstance(value, Sum | Max | Min):
        parts = [value.value]
    numeric = lambda dtype: jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)  # noqa: E731
    return all(isinstance(part, int | float) or (is_array_like(part) and numeric(part.dtype)) for part in parts)


def _metric(value: ArrayLike | Metric, rows: int) -> Metric:
    """Return a metric as its kind; a plain number is a mean, of weight 1."""
    if isinstance(value, Sum | Max | Min):
        x = jnp.asarray(value.value)
        sum_dtype = jnp.int32 if x.dtype == bool else x.dtype
        x = x.astype(wide_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else sum_dtype)
        return type(value)(jax.lax.stop_gradient(x))
    return jax.tree.map(jax.lax.stop_gradient, _per_row(value, rows))


def _per_row(value: ArrayLike | Weighted, rows: int) -> Weighted:
    """Return a `Weighted` with total and weight divided by the rows, or a plain number as a mean, of weight 1."""
    total, weight = value if isinstance(value, Weighted) else (value, 1.0)
    if isinstance(total, tuple) and isinstance(weight, tuple):
        terms = [_per_row(Weighted(*term), rows) for term in zip(total, weight, strict=True)]
        return Weighted(tuple(term.total for term in terms), tuple(term.weight for term in terms))
    total, weight = jnp.asarray(total), jnp.asarray(weight)
    total = total.astype(wide_dtype(total.dtype))
    weight = weight.astype(total.dtype)
    return Weighted(total / rows, weight / rows) if isinstance(value, Weighted) else Weighted(total, weight)


def _loss(caller: str, loss_value: ArrayLike | Weighted, rows: int) -> Weighted:
    _check_terms(caller, "the loss", loss_value)
    for total in jax.tree.leaves(loss_value.total if isinstance(loss_value, Weighted) else loss_value):
        if not jnp.issubdtype(dtype := jnp.asarray(total).dtype, jnp.floating):
            raise TypeError(f"{caller}: loss_fn must return a real floating number, got dtype {dtype}.")
    loss = _per_row(loss_value, rows)
    for name, values in loss._asdict().items():
        for value in jax.tree.leaves(values):
            if value.shape != ():
                problem = f"loss_fn must return a scalar, but its {name} has shape {value.shape}."
                fix = "reduce it with .mean() over the examples, or return so.Weighted(sum, weight)."
                raise ValueError(format_error(caller, problem, fix=fix))
    return loss
