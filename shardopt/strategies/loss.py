"""What a loss function may return, brought to one form: totals, weights, metrics, updated leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.errors import complaint
from shardopt.core.types import Updated, Weighted, is_array_like, wide_dtype
from shardopt.partition.paths import leaves_with_paths

RESERVED = ("loss", "grad_norm")


class LossParts(NamedTuple):
    """A loss as sums: they add up over micro-batches and devices, and are divided at the very end.

    Attributes:
      loss: the loss as total and weight; a plain scalar is a mean, of weight 1.
      metrics: the aux dict without updates, each value as total and weight.
      updates: key path -> new value of a frozen leaf.
    """

    loss: Weighted
    metrics: dict[str, Weighted]
    updates: dict[str, Any]


def loss_parts(who: str, returned: Any, rows: int) -> LossParts:
    """Bring to one form `scalar | Weighted`, alone or with an aux dict.

    Args:
      who: the function that the user called, for messages.
      returned: what the loss function returned.
      rows: how many rows it was given. A `Weighted` loss is taken per row, both parts, which leaves its quotient
        and makes its size that of a mean.

    Raises:
      TypeError: if the loss is no number, or aux is not a dict of arrays, `Weighted` and `Updated`.
      ValueError: if the loss is not a scalar, or aux has a reserved name.
    """
    main, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted):
        if len(returned) != 2:
            raise TypeError(f"{who}: loss_fn must return loss or (loss, aux), got a tuple of {len(returned)}.")
        main, aux = returned
    if aux is None:
        aux = {}
    if not isinstance(aux, dict):
        raise TypeError(f"{who}: the aux value of loss_fn must be a dict of metrics, got {type(aux).__name__}.")
    if taken := [name for name in RESERVED if name in aux]:
        fix = "rename it in the aux dict of loss_fn."
        raise ValueError(complaint(who, f"metric names that shardopt itself reports: {taken}.", fix=fix))
    updates = [leaf for value in aux.values() if isinstance(value, Updated) for leaf in leaves_with_paths(value.values)]
    metrics = {name: value for name, value in aux.items() if not isinstance(value, Updated)}
    if strange := [f"{name}: {type(value).__name__}" for name, value in metrics.items() if not _is_metric(value)]:
        what = "aux values of loss_fn must be numbers, arrays, so.Weighted or so.Updated."
        raise TypeError(complaint(who, what, strange, "give each number a name of its own."))
    if not _is_metric(main):
        what = f"loss_fn must return a number, got {type(main).__name__}."
        raise TypeError(complaint(who, what, fix="return a scalar, so.Weighted, or (that, aux dict)."))
    return LossParts(
        loss=_scalar(who, main, rows),
        metrics={name: _stopped(_weighted(value)) for name, value in metrics.items()},
        updates={path: jax.lax.stop_gradient(value) for path, value in updates},
    )


def _is_metric(value: Any) -> bool:
    parts = value if isinstance(value, Weighted) else (value,)
    numeric = lambda dtype: jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)  # noqa: E731
    return all(isinstance(part, int | float) or (is_array_like(part) and numeric(part.dtype)) for part in parts)


def _weighted(value: Any) -> Weighted:
    total, weight = value if isinstance(value, Weighted) else (value, 1.0)
    total, weight = jnp.asarray(total), jnp.asarray(weight)
    total = total.astype(wide_dtype(total.dtype))
    return Weighted(total, jax.lax.stop_gradient(weight.astype(total.dtype)))


def _stopped(value: Weighted) -> Weighted:
    return Weighted(jax.lax.stop_gradient(value.total), value.weight)


def _scalar(who: str, main: Any, rows: int) -> Weighted:
    dtype = jnp.asarray(main.total if isinstance(main, Weighted) else main).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{who}: loss_fn must return a real floating number, got dtype {dtype}.")
    loss = _weighted(main)
    for name, value in loss._asdict().items():
        if value.shape != ():
            what = f"loss_fn must return a scalar, but its {name} has shape {value.shape}."
            fix = "reduce it with .mean() over the examples, or return so.Weighted(sum, weight)."
            raise ValueError(complaint(who, what, fix=fix))
    return Weighted(loss.total / rows, loss.weight / rows) if isinstance(main, Weighted) else loss
