"""What a loss function may return, brought to one form: totals, weights, metrics, updated leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.errors import complaint
from shardopt.core.types import Updated, Weighted
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


def loss_parts(who: str, returned: Any) -> LossParts:
    """Bring to one form `scalar | Weighted`, alone or with an aux dict.

    Raises:
      TypeError: if the loss is no number, or aux is not a dict of arrays, `Weighted` and `Updated`.
      ValueError: if the loss is not a scalar, or aux has a reserved name.
    """
    main, aux = returned, {}
    if isinstance(returned, tuple) and not isinstance(returned, Weighted):
        if len(returned) != 2:
            raise TypeError(f"{who}: loss_fn must return loss or (loss, aux), got a tuple of {len(returned)}.")
        main, aux = returned
    if not isinstance(aux, dict):
        raise TypeError(f"{who}: the aux value of loss_fn must be a dict of metrics, got {type(aux).__name__}.")
    if taken := [name for name in RESERVED if name in aux]:
        fix = "rename it in the aux dict of loss_fn."
        raise ValueError(complaint(who, f"metric names that shardopt itself reports: {taken}.", fix=fix))
    updates = [leaf for value in aux.values() if isinstance(value, Updated) for leaf in leaves_with_paths(value.values)]
    metrics = {name: value for name, value in aux.items() if not isinstance(value, Updated)}
    return LossParts(
        loss=_scalar(who, main),
        metrics={name: _stopped(_weighted(value)) for name, value in metrics.items()},
        updates={path: jax.lax.stop_gradient(value) for path, value in updates},
    )


def _weighted(value: Any) -> Weighted:
    total, weight = value if isinstance(value, Weighted) else (value, 1.0)
    total, weight = _wide(jnp.asarray(total)), jnp.asarray(weight)
    return Weighted(total, jax.lax.stop_gradient(weight.astype(total.dtype)))


def _wide(x: Any) -> Any:
    """Sums over a global batch are kept in fp32 at least, also of integers and of half-precision losses."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _stopped(value: Weighted) -> Weighted:
    return Weighted(jax.lax.stop_gradient(value.total), value.weight)


def _scalar(who: str, main: Any) -> Weighted:
    dtype = jnp.asarray(main.total if isinstance(main, Weighted) else main).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{who}: loss_fn must return a real floating number, got dtype {dtype}.")
    loss = _weighted(main)
    for name, value in loss._asdict().items():
        if value.shape != ():
            what = f"loss_fn must return a scalar, but its {name} has shape {value.shape}."
            fix = "reduce it with .mean() over the examples, or return so.Weighted(sum, weight)."
            raise ValueError(complaint(who, what, fix=fix))
    return loss
