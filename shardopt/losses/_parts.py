"""The loss and metrics of some rows as sums, read from the values that a loss returns."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardopt.core import (
    Max,
    Metric,
    Min,
    PyTree,
    Sum,
    Updated,
    Weighted,
    calling,
    format_error,
    is_array_like,
    is_inexact,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
    wide_dtype,
    widened,
)
from shardopt.core._loss_parts import LossParts
from shardopt.partition import LeafPlan

RESERVED = ("loss", "grad_norm")


def loss_parts(caller: str, returned: PyTree, rows: int) -> LossParts:
    """Convert the result of a loss, `scalar | Weighted`, alone or with an aux dict, to `LossParts`.

    Args:
      caller: the function that the user called, for messages.
      returned: the result of the loss function.
      rows: the number of rows of its batch. Both parts of a `Weighted` are divided by it, which
        leaves their quotient unchanged and makes the total as large as a mean.

    Raises:
      TypeError: if the loss is no number, or aux is not a dict of arrays, `Weighted`, `Sum`, `Max`,
        `Min` and `Updated`. If a metric of integers has no kind, so that its parts cannot be
        combined.
      ValueError: if the loss is not a scalar, `Weighted` has different numbers of totals and
        weights, or aux has a reserved name.
    """
    with calling(caller):
        loss_value, aux = _loss_and_aux(returned)
        metrics = {name: value for name, value in aux.items() if not isinstance(value, Updated)}
        _check_metrics(metrics)
        if isinstance(loss_value, Sum | Max | Min) or not _is_metric(loss_value):
            problem = f"loss_fn must return a number, got {type(loss_value).__name__}."
            fix = "return a scalar, so.losses.Weighted, or (that, aux dict)."
            raise type_error(problem, fix=fix)
        updates = [
            leaf
            for value in aux.values()
            if isinstance(value, Updated)
            for leaf in leaves_with_paths(value.values)
        ]
        return LossParts(
            loss=_loss(loss_value, rows),
            metrics={name: _metric(value, rows) for name, value in metrics.items()},
            updates={path: jax.lax.stop_gradient(value) for path, value in updates},
        )


def _loss_and_aux(returned: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
    """Return the loss and the aux dict of the result of a loss function."""
    loss_value = returned
    aux = None
    if isinstance(returned, tuple) and not isinstance(returned, Metric):
        if len(returned) != 2:
            problem = f"loss_fn must return loss or (loss, aux), got a tuple of {len(returned)}."
            raise type_error(problem)
        loss_value, aux = returned
    if aux is None:
        return loss_value, {}
    if not isinstance(aux, dict):
        problem = f"the aux value of loss_fn must be a dict of metrics, got {type(aux).__name__}."
        fix = (
            "return (loss, {'name': value}); or so.losses.Weighted(total, weight) for a mean of total /"
            " weight."
        )
        raise type_error(problem, fix=fix)
    reserved_names = [name for name in RESERVED if name in aux]
    if reserved_names:
        problem = f"metric names that shardopt itself reports: {reserved_names}."
        raise value_error(problem, fix="rename it in the aux dict of loss_fn.")
    return loss_value, aux


def _check_metrics(metrics: dict[str, PyTree]) -> None:
    wrong_metrics = [
        f"{name}: {type(value).__name__}"
        for name, value in metrics.items()
        if not _is_metric(value) or not isinstance(name, str)
    ]
    if wrong_metrics:
        problem = (
            "aux values of loss_fn must be numbers, arrays, so.losses.Weighted, so.losses.Sum, so.losses.Max, so.losses.Min or"
            " so.losses.Updated."
        )
        raise type_error(
            problem, wrong_metrics, "give each number a string of its own as its name."
        )
    plain_metrics = [
        (name, jnp.asarray(value))
        for name, value in metrics.items()
        if not isinstance(value, Metric)
    ]
    discrete = [
        f"{name}: {x.dtype}{list(x.shape)}" for name, x in plain_metrics if not is_inexact(x)
    ]
    if discrete:
        problem = f"{plural(len(discrete), 'metric')} of integers or booleans: a count, or a mean?"
        fix = (
            "say which: so.losses.Sum(x), so.losses.Max(x), so.losses.Min(x), so.losses.Weighted(total, weight), or"
            " x.astype(float) for the mean."
        )
        raise type_error(problem, discrete, fix)
    for name, value in metrics.items():
        _check_terms(f"metric {name!r}", value)


def _check_terms(name: str, value: PyTree) -> None:
    if isinstance(value, Weighted):
        totals, weights = (len(x) if isinstance(x, tuple) else 1 for x in value)
        if totals != weights:
            problem = (
                f"{name} is so.losses.Weighted of {plural(totals, 'total')} and"
                f" {plural(weights, 'weight')}."
            )
            fix = "give each total a weight: so.losses.Weighted((a, b), (wa, wb))."
            raise value_error(problem, fix=fix)


def _is_metric(value: PyTree) -> bool:
    parts: list[PyTree] = [value]
    if isinstance(value, Weighted):
        parts = [part for x in value for part in (x if isinstance(x, tuple) else (x,))]
    elif isinstance(value, Sum | Max | Min):
        parts = [value.value]

    def numeric(dtype):
        return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)

    return all(
        isinstance(part, int | float) or (is_array_like(part) and numeric(part.dtype))
        for part in parts
    )


def _metric(value: ArrayLike | Metric, rows: int) -> Metric:
    """Return a metric as its kind; a plain number is a mean, of weight 1."""
    if isinstance(value, Sum | Max | Min):
        x = jnp.asarray(value.value)
        sum_dtype = jnp.int32 if x.dtype == bool else x.dtype
        x = x.astype(wide_dtype(x.dtype) if is_inexact(x) else sum_dtype)
        return type(value)(jax.lax.stop_gradient(x))
    return jax.tree.map(jax.lax.stop_gradient, _per_row(value, rows))


def _per_row(value: ArrayLike | Weighted, rows: int) -> Weighted:
    """Return a `Weighted` with total and weight divided by the rows, or a plain number as a mean,
    of weight 1.
    """
    total, weight = value if isinstance(value, Weighted) else (value, 1.0)
    if isinstance(total, tuple) and isinstance(weight, tuple):
        terms = [_per_row(Weighted(*term), rows) for term in zip(total, weight, strict=True)]
        return Weighted(tuple(term.total for term in terms), tuple(term.weight for term in terms))
    total = widened(jnp.asarray(total))
    weight = jnp.asarray(weight).astype(total.dtype)
    return (
        Weighted(total / rows, weight / rows)
        if isinstance(value, Weighted)
        else Weighted(total, weight)
    )


def _loss(loss_value: ArrayLike | Weighted, rows: int) -> Weighted:
    _check_terms("the loss", loss_value)
    for total in jax.tree.leaves(
        loss_value.total if isinstance(loss_value, Weighted) else loss_value
    ):
        if not jnp.issubdtype(dtype := jnp.asarray(total).dtype, jnp.floating):
            raise type_error(f"loss_fn must return a real floating number, got dtype {dtype}.")
    loss = _per_row(loss_value, rows)
    for name, values in loss._asdict().items():
        for value in jax.tree.leaves(values):
            if value.shape != ():
                problem = f"loss_fn must return a scalar, but its {name} has shape {value.shape}."
                fix = "reduce it with .mean() over the examples, or return so.losses.Weighted(sum, weight)."
                raise value_error(problem, fix=fix)
    return loss


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating, jax.dtypes.prng_key)
"""The kinds of dtypes. Each holds the numbers of those before it, but keys hold none."""


def _kind(dtype: jnp.dtype) -> int:
    return next(kind for kind, types in enumerate(_KINDS) if jnp.issubdtype(dtype, types))


def _loses_numbers(dtype: jnp.dtype, leaf_dtype: jnp.dtype) -> bool:
    """Return whether a cast to the dtype of a leaf loses an imaginary part, or a fraction."""
    if _kind(leaf_dtype) == len(_KINDS) - 1:  # keys of two implementations differ
        return dtype != leaf_dtype
    return _kind(dtype) > _kind(leaf_dtype)


def check_updated(caller: str, plans: Sequence[LeafPlan], updates: Mapping[str, jax.Array]) -> None:
    """Refuse, by a ValueError, updates of a loss (`so.losses.Updated`) that fit no frozen leaf.

    An update fits a leaf of its path and shape, if a cast to the dtype of the leaf loses no numbers.
    """
    frozen = {plan.path: plan for plan in plans if not plan.trainable}
    wrong_updates = [
        f"{path}: not a frozen parameter leaf" for path in updates if path not in frozen
    ]
    wrong_updates += [
        f"{path}: shape {value.shape}, the parameter has {frozen[path].shape}"
        for path, value in updates.items()
        if path in frozen and value.shape != frozen[path].shape
    ]
    wrong_updates += [
        f"{path}: {value.dtype}, the parameter is {frozen[path].dtype}"
        for path, value in updates.items()
        if path in frozen and _loses_numbers(value.dtype, frozen[path].dtype)
    ]
    if wrong_updates:
        fix = (
            "return so.losses.Updated with the parameters' own nesting, for leaves that rules freeze or of"
            " integer type."
        )
        raise ValueError(
            format_error(
                caller, "so.losses.Updated does not fit the parameters.", wrong_updates, fix
            )
        )
