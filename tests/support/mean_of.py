"""The number that a loss stands for, for plain jax to differentiate."""

from typing import Any

import jax

import shardopt as so
from shardopt.core._types import leaves_with_paths


def mean_of(loss: Any) -> jax.Array:
    """Return the quotient of a `Weighted` of one term, or the number that the loss is."""
    return loss.total / loss.weight if isinstance(loss, so.losses.Weighted) else loss


def mean_and_updated(returned: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the number that a loss stands for, and the new values of its `Updated`, by key path."""
    is_pair = isinstance(returned, tuple) and not isinstance(returned, so.losses.Weighted)
    loss, aux = returned if is_pair else (returned, {})
    updated = [value.values for value in aux.values() if isinstance(value, so.losses.Updated)]
    return mean_of(loss), {path: leaf for tree in updated for path, leaf in leaves_with_paths(tree)}
