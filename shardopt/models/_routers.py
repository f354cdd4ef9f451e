"""The statistics that routers of experts pass from block to block, and the balance and metrics that
the loss makes of them.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.core import PyTree, Updated, Weighted, wide_dtype
from shardopt.losses._rows import batch_mean
from shardopt.models._decoder_config import ExpertsConfig
from shardopt.models._inputs import Params


class Routers(NamedTuple):
    """The statistics of routers, for L blocks with experts.

    Attributes:
      bias: [L, E], the routers' biases, beginning with the next block's; or None.
      load: [B, L, E], the routers' loads, ending with the previous block's.
      statistics: other statistics that the loss reads, by name, in the same form as `load`.
    """

    bias: Array | None
    load: Array
    statistics: dict[str, Array]

    def after_block(self, new: Any) -> "Routers":
        """Return the statistics after a block whose router has the `new` ones."""
        return Routers(
            None if self.bias is None else jnp.roll(self.bias, -1, axis=0),
            _append(self.load, new.load),
            {name: _append(old, getattr(new, name)) for name, old in self.statistics.items()},
        )


def _append(old: Array, new: Array) -> Array:
    """Return [B, L, ...] without its first entry, and with `new` at the end.

    After L blocks it holds the entries of all blocks.
    """
    return jnp.concatenate([old[:, 1:], new[:, None].astype(old.dtype)], axis=1)


def first_routers(experts: ExpertsConfig, outer: Params, x: Float[Array, "B T D"]) -> Routers:
    """Return the statistics before the first block with experts."""
    B, (L, E) = x.shape[0], outer["router_load"].shape
    wide = wide_dtype(x.dtype)
    statistics = {}
    if experts.balance in ("loss", "sequence_loss"):
        statistics["probability"] = jnp.zeros((B, L, E), wide)
    if experts.z_loss:
        statistics["z_loss"] = jnp.zeros((B, L), wide)
    return Routers(_current_bias(experts, outer), jnp.zeros((B, L, E), wide), statistics)


def _current_bias(experts: ExpertsConfig, outer: Params) -> Array | None:
    """Return the bias of this step: the last step's bias, moved by the last step's loads."""
    if experts.balance != "bias":
        return None
    return nn.update_router_bias(outer["router_bias"], outer["router_load"], experts.balance_rate)


def balanced_loss(
    experts: ExpertsConfig, outer: Params, routers: Routers, cross_entropy: Array | Weighted
) -> tuple[Array | Weighted, dict[str, PyTree]]:
    """Return the loss with its balance terms, and the metrics and new values of `moe.model`."""
    loads = outer["router_load"]
    updates = {"router_load": jnp.mean(routers.load, axis=0).astype(loads.dtype)}
    bias = _current_bias(experts, outer)
    if bias is not None:
        updates["router_bias"] = bias
    entropy = jnp.sum(jax.scipy.special.entr(loads), axis=1)
    aux = {
        "routers": Updated(updates),
        "cross_entropy": cross_entropy,
        "load_imbalance": jnp.mean(jnp.max(loads, axis=1)) * experts.number,
        "router_entropy": jnp.mean(entropy) / math.log(experts.number),
    }
    return _add_terms(cross_entropy, _balance_terms(experts, routers)), aux


def _balance_terms(experts: ExpertsConfig, routers: Routers) -> list[Float[Array, " B"]]:
    """Return the balance terms of the loss, each with one number per row.

    The term is their mean.
    """
    terms = []
    if experts.balance in ("loss", "sequence_loss"):
        means = routers.load, routers.statistics["probability"]
        if experts.balance == "loss":
            means = [
                jnp.broadcast_to(mean[None], row_means.shape)
                for mean, row_means in zip(_batch_mean(means), means, strict=True)
            ]
        terms.append(experts.balance_rate * jnp.mean(nn.load_balancing_loss(*means), axis=1))
    if experts.z_loss:
        terms.append(experts.z_loss * jnp.mean(routers.statistics["z_loss"], axis=1))
    return terms


def _batch_mean(x: PyTree) -> PyTree:
    try:
        return batch_mean(x)
    except ValueError as error:
        remedy = "or balance='bias', which needs no other rows"
        raise ValueError(f"{str(error).removesuffix('.')}, {remedy}.") from error


def _add_terms(loss: Array | Weighted, terms: Sequence[Float[Array, " B"]]) -> Array | Weighted:
    """Return the loss plus the means of the terms.

    A weighted loss gets them as a second term with its own weight.
    """
    if not terms:
        return loss
    row_sums = functools.reduce(jnp.add, terms)
    if not isinstance(loss, Weighted):
        return loss + jnp.mean(row_sums)
    rows = jnp.asarray(row_sums.shape[0], row_sums.dtype)
    return Weighted((loss.total, jnp.sum(row_sums)), (loss.weight, rows))
