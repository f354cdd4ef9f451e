"""How parts of a loss and of its metrics combine: totals over weights, sums, the largest, the
smallest.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core import Max, Metric, Min, Sum, Weighted, is_floating, is_inexact
from shardopt.core._loss_parts import value_of


def combined(
    metric: Metric,
    add: Callable[..., Any],
    largest: Callable[..., Any],
    smallest: Callable[..., Any],
    *more_metrics: Metric,
) -> Metric:
    """Return a metric of the same kind, with its arrays combined by the function for its kind.

    Args:
      metric: the metric.
      add: for totals, weights and sums.
      largest: for `Max`.
      smallest: for `Min`.
      *more_metrics: more metrics of the same kind, whose arrays are further arguments of the
        function.
    """
    function = largest if isinstance(metric, Max) else smallest if isinstance(metric, Min) else add
    return jax.tree.map(function, metric, *more_metrics)


def added(first: Metric, second: Metric) -> Metric:
    """Return the metric of two parts together, in numpy; for example of two batches."""
    return combined(first, np.add, np.maximum, np.minimum, second)


def adds_up(metric: Metric) -> bool:
    """Return whether the parts of a metric are added."""
    return isinstance(metric, Weighted | Sum)


def values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as arrays; some of them may still have a kind."""
    return {
        name: value_of(metric) if isinstance(metric, Metric) else metric
        for name, metric in metrics.items()
    }


def of_rows(metric: Any, rows: int | jax.Array) -> Any:
    """Return a metric with its totals and weights, which are per row, multiplied by the number of
    rows.
    """
    return jax.tree.map(lambda x: x * rows, metric) if isinstance(metric, Weighted) else metric


def neutral(metric: Metric) -> Metric:
    """Return a metric that changes no other metric of its kind, with the same shapes and dtypes."""

    def bound(x: jax.Array, sign: int) -> jax.Array:
        if is_floating(x):
            return jnp.full_like(x, sign * jnp.inf)
        return jnp.full_like(x, jnp.iinfo(x.dtype).max if sign > 0 else jnp.iinfo(x.dtype).min)

    return combined(metric, jnp.zeros_like, lambda x: bound(x, -1), lambda x: bound(x, 1))


def objective(loss: Weighted, pieces: int, weights: Sequence[jax.Array] | None) -> jax.Array:
    """Return the scalar to differentiate for one piece of the batch.

    Its summed gradients are then multiplied by `factor`.

    Args:
      loss: total and weight of the piece.
      pieces: the number of pieces.
      weights: for a loss of several terms, their weights summed over all pieces.
    """
    if not isinstance(loss.total, tuple):
        return loss.total / pieces
    assert weights is not None
    return functools.reduce(
        jnp.add, [total / weight for total, weight in zip(loss.total, weights, strict=True)]
    )


def factor(loss: Weighted, pieces: int) -> jax.Array:
    """Return the factor of the summed gradients of `objective`.

    `loss` is summed over all pieces.
    """
    return jnp.ones((), jnp.float32) if isinstance(loss.weight, tuple) else pieces / loss.weight


def extreme_over(
    reduce: Callable[..., jax.Array], value: jax.Array, axes: Sequence[str]
) -> jax.Array:
    """Return the maximum or minimum over devices, or NaN if one device has NaN, which XLA:CPU would
    drop.
    """
    if jax.lax.axis_size(tuple(axes)) == 1:
        return value
    extreme = reduce(value, axes)
    if not is_inexact(value):
        return extreme
    return jnp.where(jax.lax.pmax(jnp.isnan(value).astype(jnp.int32), axes) > 0, jnp.nan, extreme)
