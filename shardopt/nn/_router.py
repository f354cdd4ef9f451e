"""The router: the experts and weights of each token, and the statistics for balance.

Suffixes: B sequences, T positions, D width, E experts, K experts that a token goes to.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from shardopt.core import check_count, value_error, wide_dtype

Score = Literal["softmax", "sigmoid"]
NAME = "router"
"""The `checkpoint_name` of the router's logits."""


class RouterStatistics(NamedTuple):
    """The statistics of a router for each row, for balance and metrics, over the positions on this
    device.

    Every number is a mean over the positions of a row, so means over rows, devices and
    micro-batches are exact.

    Attributes:
      load: [B, E], each expert's share of the row's T K choices; 1/E if balanced.
      probability: [B, E], the mean probability of each expert: its softmax, or its share of the sum
        of sigmoids.
      z_loss: [B], the mean of logsumexp(logits)^2.
    """

    load: Array
    probability: Array
    z_loss: Array


class Routes(NamedTuple):
    """The experts of each token.

    Attributes:
      experts: [B, T, K], int32; E if the scores of the token are NaN.
      weights: [B, T, K], in float32 at least.
      statistics: the statistics of the router.
      is_nan: [B, T], whether the scores of a token are NaN: it chooses no expert.
    """

    experts: Array
    weights: Array
    statistics: RouterStatistics
    is_nan: Array


@dataclass(frozen=True)
class Routing:
    """How tokens choose their experts; see `mixture_of_experts` for the fields."""

    top_k: int
    score: Score = "softmax"
    normalize: bool = True
    groups: tuple[int, int] | None = None
    scale: float = 1.0

    def check(self, num_experts: int) -> None:
        """Refuse settings that do not fit this number of experts.

        Raises:
          TypeError: if a number is not an integer.
          ValueError: if the score is unknown, or a token cannot go to `top_k` experts.
        """
        check_count("top_k", self.top_k, minimum=1)
        if self.score not in get_args(Score):
            raise value_error(f"unknown score {self.score!r}.", fix="use 'softmax' or 'sigmoid'.")
        num_open = num_experts
        if self.groups is not None:
            num_groups, num_best = self.groups
            check_count("groups[0]", num_groups, minimum=1)
            check_count("groups[1]", num_best, minimum=1)
            if num_experts % num_groups or num_best > num_groups:
                problem = (
                    f"groups={self.groups}: {num_groups} groups of {num_experts} experts,"
                    f" {num_best} of them open."
                )
                fix = "take a number of groups that divides the experts, and open at most as many."
                raise value_error(problem, fix=fix)
            num_open = num_experts // num_groups * num_best
        if self.top_k > num_open:
            problem = f"top_k={self.top_k}, but a token can go to {num_open} experts only."
            raise value_error(problem, fix=f"take at most {num_open}.")


def route(
    routing: Routing,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    router_bias: Float[Array, " E"] | None,
) -> Routes:
    """Choose the experts of each token. If scores are equal, the lower index wins.

    A token whose scores are NaN goes to no expert, and is not counted in any load.
    """
    E = router.shape[1]
    top_k = routing.top_k
    wide = wide_dtype(x.dtype)
    # without this precision a TPU multiplies float32 as bfloat16
    logits = jnp.einsum(
        "btd,de->bte", x.astype(wide), router.astype(wide), precision=jax.lax.Precision.HIGHEST
    )
    if router_bias is not None:
        logits = logits + router_bias.astype(wide)[None, None]
    logits = checkpoint_name(logits, NAME)
    if routing.score == "softmax":
        scores = probability = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
        probability = scores / jnp.sum(scores, axis=-1, keepdims=True)
    # The bias chooses experts and has no gradient: it follows the load, see `_balance`.
    ranked_scores = jax.lax.stop_gradient(
        scores if bias is None else scores + bias.astype(wide)[None, None]
    )
    if routing.groups is not None:
        ranked_scores = _scores_of_best_groups(ranked_scores, *routing.groups)
    _, experts = jax.lax.top_k(ranked_scores, top_k)
    is_nan = jnp.any(jnp.isnan(ranked_scores), axis=-1)
    # E is no expert: the token takes no place at any of them.
    experts = jnp.where(is_nan[..., None], E, experts)
    # [B, T, K, E]; a mask, since the gradient of a gather would be a scatter
    is_chosen = experts[..., None] == jnp.arange(E)[None, None, None]
    weights = jnp.sum(jnp.where(is_chosen, scores[:, :, None], 0), axis=-1)
    if routing.normalize:
        # Sigmoids may all be 0; the small number keeps 0 / 0 out.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    weights = weights * routing.scale
    count = jnp.sum(is_chosen, axis=2, dtype=wide)  # [B, T, E], 0 or 1
    statistics = RouterStatistics(
        load=jnp.mean(count, axis=1) / top_k,
        probability=jnp.mean(probability, axis=1),
        z_loss=jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), axis=1),
    )
    return Routes(experts, weights, statistics, is_nan)


def _scores_of_best_groups(
    scores: Float[Array, "B T E"], num_groups: int, num_best: int
) -> Float[Array, "B T E"]:
    """Return the scores, and -inf outside of the best groups.

    A group's score is the sum of its two best experts.
    """
    B, T, E = scores.shape
    grouped = scores.reshape(B, T, num_groups, E // num_groups)
    best_scores, _ = jax.lax.top_k(grouped, min(2, E // num_groups))
    _, best_groups = jax.lax.top_k(jnp.sum(best_scores, axis=-1), num_best)
    is_open = jnp.any(best_groups[..., None] == jnp.arange(num_groups)[None, None, None], axis=2)
    return jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(B, T, E)


def dense_weights(
    experts: Int[Array, "B T K"], weights: Float[Array, "B T K"], num_experts: int
) -> Float[Array, "B T E"]:
    """Return [B, T, E], the weight of every expert for every token.

    0 for experts that the token does not use.
    """
    is_chosen = experts[..., None] == jnp.arange(num_experts)[None, None, None]
    return jnp.sum(jnp.where(is_chosen, weights[..., None], 0), axis=2)
