"""A decoder whose blocks have a mixture of experts instead of the mlp.

It can be like Mixtral, or like DeepSeek-V3 with a sigmoid router and a shared expert.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt import nn
from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._errors import format_error, plural
from shardopt.core._types import Loss, PyTree, Updated, Weighted
from shardopt.losses._rows import batch_mean
from shardopt.models import _layers as layers
from shardopt.models._inputs import mean_loss, read_inputs
from shardopt.models._latent_attention import Latent, latent_attention
from shardopt.models.gpt import Batch, Params, Tokens
from shardopt.nn._router import Score

rules = (
    ("^blocks/(attention/(q|kv)|shared/(gate|up))$", P(None, "tensor")),
    ("^(blocks/(attention/out|shared/down)|embedding|head)$", P("tensor")),
    ("^blocks/experts/(gate|up)$", P(None, None, "tensor")),
    ("^blocks/experts/down$", P(None, "tensor")),
)
"""Tensor rules that shard heads, hidden units of each expert and the vocabulary, like the rules of the GPT."""

expert_leaves = ("^blocks/experts/",)
"""Leaves of experts, for the `expert_leaves` of a strategy: each device of an expert axis holds its own experts."""

frozen = ("^router_(load|bias)$",)
"""Leaves that are not trained, for the `frozen` of a strategy; the loss returns their new values."""

Balance = Literal["bias", "loss", "sequence_loss"]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The shape of a mixture-of-experts decoder. Immutable and hashable.

    Attributes:
      vocab_size: number of token ids; 256 for bytes.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: attention heads; each has dim / num_heads components, an even number.
      num_kv_heads: heads of keys and values; must divide `num_heads`. None is `num_heads`.
      latent: sizes of latent attention (DeepSeek-V3), `moe.Latent(query=1536, key=512, nope=128, rope=64, value=128)`. With None,
        queries, keys and values come directly from the residual stream.
      num_experts: experts of each block.
      top_k: how many experts each token goes through.
      hidden: hidden units of an expert.
      shared_hidden: hidden units of the shared expert, which every token goes through; 0 is no shared expert.
      score: "softmax" (Mixtral) or "sigmoid" (DeepSeek-V3).
      normalize: whether the weights of a token's experts are divided by their sum.
      groups: (number of groups, how many are open to a token), see `so.nn.mixture_of_experts`.
      scale: the factor of these weights.
      capacity_factor: None drops no token.
      chunk: how many tokens of a device are dispatched at a time; None is all.
      loss_chunk: positions whose logits are held at a time, see `so.nn.cross_entropy`; None is all.
      balance: how experts are balanced. "bias": by `so.nn.update_router_bias`, without a loss. "loss": by a loss over the global
        batch; it does not work with micro-batches and pipelines. "sequence_loss": by a loss of each row; it does not work
        with a context axis, which splits rows. None: not at all.
      balance_rate: the rate of the biases, or the factor of the loss. None is 0.001 for "bias", 0.01 for "loss" and 0.0001 for
        "sequence_loss".
      z_loss: factor of the mean of the router's logsumexp squared; 0 leaves it out.
      max_length: the longest sequence of `sample`.
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi.
      norm_epsilon: the number that norms add to the mean square.
      tied: whether the embedding is also the output projection; otherwise that is the leaf "head".
      param_dtype: dtype that `init` creates.
      dtype: dtype of activations and of all products except the router's; None is the dtype of the parameters that the loss gets.

    Raises:
      ValueError: if a size is not positive; if heads do not divide or have odd width; if top_k is above num_experts; if latent
        attention has values wider than its keys, or is combined with `num_kv_heads`.

    References:
      Jiang et al., "Mixtral of Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1. Three parts of
      DeepSeek-V3 are left out: the first blocks without experts, the prediction of a second token, and yarn.
    """

    vocab_size: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    latent: Latent | None = None
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 384
    shared_hidden: int = 0
    score: Score = "softmax"
    normalize: bool = True
    groups: tuple[int, int] | None = None
    scale: float = 1.0
    capacity_factor: float | None = None
    chunk: int | None = None
    loss_chunk: int | None = None
    balance: Balance | None = "bias"
    balance_rate: float | None = None
    z_loss: float = 0.0
    max_length: int = 1024
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    tied: bool = False
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike | None = None

    def __post_init__(self):
        names = [
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_experts",
            "top_k",
            "hidden",
            "max_length",
            "rope_base",
            "norm_epsilon",
        ]
        problems = [f"{name} must be positive, got {getattr(self, name)}" for name in names if getattr(self, name) <= 0]
        if self.latent is not None:
            problems += self._latent_problems(self.latent)
        elif not problems and self.dim % (2 * self.num_heads):
            problems.append(f"dim={self.dim} cannot be cut into num_heads={self.num_heads} of even width")
        if not problems and self.num_heads % self.kv_heads:
            problems.append(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        if self.top_k > self.num_experts:
            problems.append(f"top_k={self.top_k} is above num_experts={self.num_experts}")
        if problems:
            raise ValueError(format_error("MoEConfig", f"{plural(len(problems), 'size')} cannot be used.", problems))

    def _latent_problems(self, latent: Latent) -> list[str]:
        problems = [
            f"latent.{name} must be positive, got {size}" for name, size in latent._asdict().items() if size <= 0
        ]
        if latent.rope % 2:
            problems.append(f"latent.rope must be even, got {latent.rope}")
        if latent.value > latent.nope + latent.rope:
            problems.append(f"latent.value={latent.value} is above nope + rope = {latent.nope + latent.rope}")
        if self.num_kv_heads is not None:
            problems.append(f"num_kv_heads={self.num_kv_heads} is for attention that is not latent")
        return problems

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def rate(self) -> float:
        """The rate of the biases, or the factor of the balance loss."""
        default_rate = {"bias": 1e-3, "loss": 1e-2, "sequence_loss": 1e-4, None: 0.0}[self.balance]
        return default_rate if self.balance_rate is None else self.balance_rate


def init(config: MoEConfig, rng: jax.Array) -> Params:
    """Return random parameters like the GPT's: normal with standard deviation 0.02, less for last products; norms are ones.

    Args:
      config: the shape of the model, L blocks of width D, H heads of width K, G of keys and values, E experts of F hidden units.
      rng: a jax random key.

    Returns:
      A dict with "embedding" [V, D], "norm" [D], and "head" [V, D] unless tied. "router_load" [L, E] has the loads of the last
      step; "router_bias" [L, E] exists if balance is "bias". "blocks" has

      - "attention/norm" [L, D], "attention/q" [L, D, H, K], "attention/kv" [L, D, G, 2 K], "attention/out" [L, H, K, D], or the
        shapes of `Latent.shapes`;
      - "router/norm" [L, D], "router/kernel" [L, D, E];
      - "experts/gate" and "experts/up" [L, E, D, F], "experts/down" [L, E, F, D];
      - for a shared expert "shared/gate" and "shared/up" [L, D, F'], "shared/down" [L, F', D].

    Example:
      >>> import jax
      >>> config = MoEConfig(dim=32, num_layers=2, num_experts=4, hidden=16)
      >>> params = init(config, jax.random.key(0))
      >>> params["blocks"]["experts"]["up"].shape
      (2, 4, 32, 16)
      >>> num_parameters(config) == sum(leaf.size for path, leaf in params.items() if path in ("embedding", "norm", "head")) + sum(
      ...     leaf.size for leaf in jax.tree.leaves(params["blocks"]))
      True
    """
    L, D, H, K, G = config.num_layers, config.dim, config.num_heads, config.head_dim, config.kv_heads
    E, F, S = config.num_experts, config.hidden, config.shared_hidden
    keys = iter(jax.random.split(rng, 16))
    branch_scale, wide = 0.02 / (2 * L) ** 0.5, jnp.promote_types(config.param_dtype, jnp.float32)

    def normal(*shape: int, scale: float = 0.02) -> Array:
        return scale * jax.random.normal(next(keys), shape, config.param_dtype)

    def ones(*shape: int) -> Array:
        return jnp.ones(shape, config.param_dtype)

    def mlp(*experts: int, hidden: int) -> Params:
        inner, outer = (L, *experts, D, hidden), (L, *experts, hidden, D)
        return {"gate": normal(*inner), "up": normal(*inner), "down": normal(*outer, scale=branch_scale)}

    shapes = {"q": (D, H, K), "kv": (D, G, 2 * K), "out": (H, K, D)}
    if config.latent is not None:
        shapes = config.latent.shapes(D, H)
    blocks = {
        "attention": {"norm": ones(L, D)}
        | {
            name: ones(L, *shape)
            if len(shape) == 1
            else normal(L, *shape, scale=branch_scale if name == "out" else 0.02)
            for name, shape in shapes.items()
        },
        "router": {"norm": ones(L, D), "kernel": normal(L, D, E)},
        "experts": mlp(E, hidden=F),
    }
    if S:
        blocks["shared"] = mlp(hidden=S)
    params = {
        "embedding": normal(config.vocab_size, D, scale=1 / D if config.tied else 0.02),
        "blocks": blocks,
        "norm": ones(D),
        "router_load": jnp.zeros((L, E), wide),
    }
    if config.balance == "bias":
        params["router_bias"] = jnp.zeros((L, E), wide)
    if not config.tied:
        params["head"] = normal(config.vocab_size, D)
    return params


def num_parameters(config: MoEConfig, *, active: bool = False) -> int:
    """Return the number of trained parameters, or with `active` the number that one token goes through."""
    D, heads = config.dim, config.num_heads + config.kv_heads
    experts = config.top_k if active else config.num_experts
    mlp = 3 * D * (experts * config.hidden + config.shared_hidden)
    attention = 2 * D * heads * config.head_dim
    if config.latent is not None:
        attention = sum(map(math.prod, config.latent.shapes(D, config.num_heads).values()))
    block = attention + D * config.num_experts + mlp + 2 * D
    return config.vocab_size * D * (1 if config.tied else 2) + config.num_layers * block + D


class Routed(NamedTuple):
    """The values that go from block to block: activations, the marks of tokens, and the statistics of routers.

    Attributes:
      x: [B, T, D].
      segment_ids: [B, T] or None.
      positions: [B, T] or None.
      order: [B, T] or None.
      bias: [L, E], the routers' biases, beginning with the next block's; or None.
      load: [B, L, E], the routers' loads, ending with the previous block's.
      statistics: other statistics that the loss reads, by name, in the same form as `load`.
    """

    x: Array
    segment_ids: Array | None
    positions: Array | None
    order: Array | None
    bias: Array | None
    load: Array
    statistics: dict[str, Array]


def model(config: MoEConfig, *, remat: Remat = None) -> BlockModel:
    """Return the decoder as a `BlockModel`; its loss is the mean cross-entropy of the next token in nats, plus balance terms.

    Args:
      config: the shape of the model.
      remat: what the backward pass recomputes, as in `BlockModel`. Blocks name "qkv", "attention" and "attention_out" like the GPT,
        and "router", "dispatched" and "experts" like `so.nn.mixture_of_experts`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> config = MoEConfig(dim=32, num_layers=2, num_experts=4, hidden=16)
      >>> params = init(config, jax.random.key(0))
      >>> loss, aux = jax.jit(lambda p, b: model(config).loss_fn(p, b))(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05), aux["routers"].values["router_load"].shape
      (True, (2, 4))

    A batch is the same as for `gpt.model`. Give strategies `expert_leaves=moe.expert_leaves`, `frozen=moe.frozen` and, over tensor,
    `rules=moe.rules`. The loss returns `so.Updated` with "router_load", each expert's share of the choices in this step, and with
    "router_bias". Metrics:

    - "cross_entropy", without the balance terms;
    - "load_imbalance" of the previous step: the load of the busiest expert over the mean, averaged over blocks; 1 if balanced;
    - "router_entropy" of the previous step: the entropy of the loads in nats over log(E); 1 if balanced;
    - "dropped", the share of the choices without a place, with a `capacity_factor`.

    **Equivalence**: exact on any mesh, with micro-batches and in pipelines. balance="loss" needs the whole batch at once, and is
    refused there. In a pipeline a batch with weights cannot have a balance loss, since a pipeline takes only one term.
    """
    return BlockModel(
        functools.partial(_embed, config),
        functools.partial(_block, config),
        functools.partial(_loss, config),
        remat,
        tables=() if config.tied else ("embedding",),
    )


def _embed(config: MoEConfig, outer: Params, batch: Batch) -> Routed:
    inputs = read_inputs("moe", batch)
    return _initial_routed(config, outer, inputs.tokens)._replace(
        segment_ids=inputs.segment_ids, positions=inputs.positions, order=inputs.order
    )


def _initial_routed(config: MoEConfig, outer: Params, tokens: Tokens) -> Routed:
    x = nn.embedding(layers.cast(outer["embedding"], config.dtype), jnp.asarray(tokens, jnp.int32))
    B, L, E = x.shape[0], config.num_layers, config.num_experts
    wide = jnp.promote_types(x.dtype, jnp.float32)
    needed = {"probability": config.balance in ("loss", "sequence_loss"), "z_loss": bool(config.z_loss)}
    needed["dropped"] = config.capacity_factor is not None
    shapes = {"probability": (B, L, E), "z_loss": (B, L), "dropped": (B, L)}
    statistics = {name: jnp.zeros(shapes[name], wide) for name, is_needed in needed.items() if is_needed}
    return Routed(x, None, None, None, _current_bias(config, outer), jnp.zeros((B, L, E), wide), statistics)


def _current_bias(config: MoEConfig, outer: Params) -> Array | None:
    """Return the bias of this step: the last step's bias, moved by the last step's loads."""
    if config.balance != "bias":
        return None
    return nn.update_router_bias(outer["router_bias"], outer["router_load"], config.rate)


def _block(config: MoEConfig, weights: Params, routed: Routed) -> Routed:
    attention = layers.cast(weights["attention"], config.dtype)
    normed = layers.rms_norm(routed.x, attention["norm"], config.norm_epsilon)
    marks = {"segment_ids": routed.segment_ids, "positions": routed.positions, "order": routed.order}
    attention_args = {"rope_base": config.rope_base, **marks}
    if config.latent is None:
        x = routed.x + layers.grouped_attention(attention, normed, **attention_args)
    else:
        x = routed.x + latent_attention(attention, normed, config.latent, epsilon=config.norm_epsilon, **attention_args)
    normed = layers.rms_norm(x, layers.cast(weights["router"]["norm"], config.dtype), config.norm_epsilon)
    mixed, statistics = nn.mixture_of_experts(
        layers.cast(weights["experts"], config.dtype),
        normed,
        weights["router"]["kernel"],
        top_k=config.top_k,
        capacity_factor=config.capacity_factor,
        score=config.score,
        normalize=config.normalize,
        bias=None if routed.bias is None else routed.bias[0],
        groups=config.groups,
        scale=config.scale,
        shared=layers.cast(weights["shared"], config.dtype) if "shared" in weights else None,
        chunk=config.chunk,
    )
    return routed._replace(
        x=x + mixed,
        bias=None if routed.bias is None else jnp.roll(routed.bias, -1, axis=0),
        load=_append(routed.load, statistics.load),
        statistics={name: _append(old, getattr(statistics, name)) for name, old in routed.statistics.items()},
    )


def _append(old: Array, new: Array) -> Array:
    """Return [B, L, ...] without its first entry, and with `new` at the end. After L blocks it holds the entries of all blocks."""
    return jnp.concatenate([old[:, 1:], new[:, None].astype(old.dtype)], axis=1)


def _loss(config: MoEConfig, outer: Params, routed: Routed, batch: Batch) -> Loss:
    inputs = read_inputs("moe", batch)
    nats = nn.cross_entropy(*_final_norm_and_head(config, outer, routed.x), inputs.targets, chunk=config.loss_chunk)
    cross_entropy = mean_loss(nats, inputs)
    loads = outer["router_load"]
    updates = {"router_load": jnp.mean(routed.load, axis=0).astype(loads.dtype)}
    bias = _current_bias(config, outer)
    if bias is not None:
        updates["router_bias"] = bias
    entropy = jnp.sum(jax.scipy.special.entr(loads), axis=1)
    aux = {
        "routers": Updated(updates),
        "cross_entropy": cross_entropy,
        "load_imbalance": jnp.mean(jnp.max(loads, axis=1)) * config.num_experts,
        "router_entropy": jnp.mean(entropy) / math.log(config.num_experts),
    }
    if "dropped" in routed.statistics:
        aux["dropped"] = jnp.mean(routed.statistics["dropped"])
    return _add_terms(cross_entropy, _balance_terms(config, routed)), aux


def _balance_terms(config: MoEConfig, routed: Routed) -> list[Float[Array, " B"]]:
    """Return the balance terms of the loss, each with one number per row; the term is their mean."""
    terms = []
    if config.balance in ("loss", "sequence_loss"):
        means = routed.load, routed.statistics["probability"]
        if config.balance == "loss":
            means = [
                jnp.broadcast_to(mean[None], row_means.shape)
                for mean, row_means in zip(_batch_mean(means), means, strict=True)
            ]
        terms.append(config.rate * jnp.mean(nn.load_balancing_loss(*means), axis=1))
    if config.z_loss:
        terms.append(config.z_loss * jnp.mean(routed.statistics["z_loss"], axis=1))
    return terms


def _batch_mean(x: PyTree) -> PyTree:
    try:
        return batch_mean(x)
    except ValueError as error:
        remedy = "or balance='bias', which needs no other rows"
        raise ValueError(f"{str(error).removesuffix('.')}, {remedy}.") from error


def _add_terms(loss: Array | Weighted, terms: Sequence[Float[Array, " B"]]) -> Array | Weighted:
    """Return the loss plus the means of the terms; a weighted loss gets them as a second term with its own weight."""
    if not terms:
        return loss
    row_sums = functools.reduce(jnp.add, terms)
    if not isinstance(loss, Weighted):
        return loss + jnp.mean(row_sums)
    rows = jnp.asarray(row_sums.shape[0], row_sums.dtype)
    return Weighted((loss.total, jnp.sum(row_sums)), (loss.weight, rows))


def _final_norm_and_head(config: MoEConfig, outer: Params, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
    norm, head = layers.cast((outer["norm"], outer["embedding" if config.tied else "head"]), config.dtype)
    return layers.rms_norm(x, norm, config.norm_epsilon), head


def logits_of(config: MoEConfig, params: Params, tokens: Tokens) -> Float[Array, "B T V"]:
    """Return the logits after each token.

    Args:
      config: the shape of the model.
      params: the parameters.
      tokens: [B, T], token ids.

    Returns:
      [B, T, V], in float32 at least.
    """
    outer = {name: value for name, value in params.items() if name != "blocks"}
    block = lambda routed, weights: (_block(config, weights, routed), None)  # noqa: E731
    routed, _ = jax.lax.scan(block, _initial_routed(config, outer, tokens), params["blocks"])
    normed, head = _final_norm_and_head(config, outer, routed.x)
    return jnp.einsum("btd,vd->btv", normed, head, preferred_element_type=jnp.promote_types(normed.dtype, jnp.float32))
