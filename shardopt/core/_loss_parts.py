"""The loss and metrics of some rows as sums, which add up and are divided at the end; and the
gradient of a batch.
"""

from typing import Any, NamedTuple

import jax

from shardopt.core._types import Metric, PyTree, Weighted

StepMetrics = dict[str, jax.Array | Metric]
"""Metrics by name, with their kinds."""


class Gradients(NamedTuple):
    """The gradient, loss and metrics of one global batch.

    Attributes:
      grads: the gradient of the loss of the union batch; None for frozen leaves.
      loss: the loss, a scalar.
      metrics: name -> value on the union batch; `Sum`, `Max` and `Min` keep their kinds.
      updates: key path -> new value of a frozen leaf.
      reducer: the new state of the reducer of the gradient, or None.
      sums: the sum of the bits of each device's own gradient, before any reduction; None unless the
        config asks for it.
    """

    grads: PyTree
    loss: jax.Array
    metrics: StepMetrics
    updates: dict[str, jax.Array]
    reducer: PyTree = None
    sums: jax.Array | None = None


class LossParts(NamedTuple):
    """A loss as sums: they add up over micro-batches and devices, and are divided at the very end.

    Attributes:
      loss: the loss as total and weight per row, or a tuple of each; a plain scalar is a mean, of
        weight 1.
      metrics: the aux dict without updates, each value as its kind. A plain number is a mean, of
        weight 1; the parts of a `Weighted` are divided by the number of rows.
      updates: key path -> new value of a frozen leaf.
    """

    loss: Weighted
    metrics: dict[str, Metric]
    updates: dict[str, jax.Array]

    def divided(self) -> tuple[jax.Array, StepMetrics]:
        """Return the loss and metrics: totals divided by weights.

        `Sum`, `Max` and `Min` are not changed.
        """
        metrics = {
            name: value_of(metric) if isinstance(metric, Weighted) else metric
            for name, metric in self.metrics.items()
        }
        return value_of(self.loss), metrics


def value_of(metric: Metric) -> Any:
    """Return the value of a metric: its totals divided by its weights and summed, or its array."""
    if not isinstance(metric, Weighted):
        return metric.value
    if not isinstance(metric.total, tuple):
        return metric.total / metric.weight
    return sum(total / weight for total, weight in zip(*metric, strict=True))
