"""How the parts of a loss and of its metrics become one: totals over weights, sums, the largest, the smallest."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.types import Max, Metric, Min, Sum, Weighted


def combined(
    metric: Metric, add: Callable[..., Any], largest: Callable[..., Any], smallest: Callable[..., Any], *others: Metric
) -> Metric:
    """Return a metric of the same kind, its arrays put through the function that its kind asks for.

    Args:
      metric: the metric.
      add: for totals, weights and sums.
      largest: for `Max`.
      smallest: for `Min`.
      *others: more of the same kind, whose arrays are further arguments.
    """
    function = largest if isinstance(metric, Max) else smallest if isinstance(metric, Min) else add
    return jax.tree.map(function, metric, *others)


def added(one: Metric, other: Metric) -> Metric:
    """Return the metric of two parts together, in numpy: of two batches, for instance."""
    return combined(one, np.add, np.maximum, np.minimum, other)


def adds_up(metric: Metric) -> bool:
    """Return whether the parts of a metric are added."""
    return isinstance(metric, Weighted | Sum)


def value_of(metric: Metric) -> Any:
    """Return what a metric comes to: the sum of its totals over their weights, or its value."""
    if not isinstance(metric, Weighted):
        return metric.value
    if not isinstance(metric.total, tuple):
        return metric.total / metric.weight
    return sum(total / weight for total, weight in zip(*metric, strict=True))


def values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as arrays, of which some still say what kind they are."""
    return {name: value_of(one) if isinstance(one, Metric) else one for name, one in metrics.items()}


def of_rows(metric: Any, rows: int | jax.Array) -> Any:
    """Return a metric with its totals and weights, which are per row, times the rows that they are of."""
    return jax.tree.map(lambda x: x * rows, metric) if isinstance(metric, Weighted) else metric


def neutral(metric: Metric) -> Metric:
    """Return what changes no other of the kind, in shapes and dtypes like the metric."""

    def bound(x: jax.Array, sign: int) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, sign * jnp.inf)
        return jnp.full_like(x, jnp.iinfo(x.dtype).max if sign > 0 else jnp.iinfo(x.dtype).min)

    return combined(metric, jnp.zeros_like, lambda x: bound(x, -1), lambda x: bound(x, 1))


def objective(loss: Weighted, pieces: int, weights: Sequence[jax.Array] | None) -> jax.Array:
    """Return what is differentiated of one of the pieces that a batch is cut into; `factor` is what is then missing.

    Args:
      loss: total and weight of the piece.
      pieces: how many there are.
      weights: of a loss of several terms, their weights summed over all pieces.
    """
    if not isinstance(loss.total, tuple):
        return loss.total / pieces
    assert weights is not None
    return functools.reduce(jnp.add, [total / weight for total, weight in zip(loss.total, weights, strict=True)])


def factor(loss: Weighted, pieces: int) -> jax.Array:
    """Return what summed gradients of `objective` are multiplied by, given the loss summed over the pieces."""
    return jnp.ones((), jnp.float32) if isinstance(loss.weight, tuple) else pieces / loss.weight
