"""The number that a loss stands for, for plain jax to differentiate."""

from typing import Any

import jax

import shardopt as so


def mean_of(loss: Any) -> jax.Array:
    """Return the quotient of a `Weighted` of one term, or the number that the loss is."""
    return loss.total / loss.weight if isinstance(loss, so.losses.Weighted) else loss
