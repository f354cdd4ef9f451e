"""A decoder whose blocks have a mixture of experts instead of the mlp.

It can be like Mixtral, or like DeepSeek-V3 with a sigmoid router and a shared expert.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._errors import format_error, plural
from shardopt.core._rounding import Precision
from shardopt.models import decoder
from shardopt.models._decoder_config import (
    Balance,
    BlockKind,
    DecoderConfig,
    ExpertsConfig,
    not_positive,
)
from shardopt.models._inputs import Params, Tokens
from shardopt.models._latent_attention import LatentConfig
from shardopt.models._rope import Rope
from shardopt.nn._router import Score

rules = (
    ("(^|/)blocks/(attention/(q|kv)|shared/(gate|up))$", P(None, "tensor")),
    ("(^|/)(blocks/(attention/out|shared/down)|embedding|head)$", P("tensor")),
    ("(^|/)blocks/experts/(gate|up)$", P(None, None, "tensor")),
    ("(^|/)blocks/experts/down$", P(None, "tensor")),
    ("(^|/)(blocks/attention/kv|embedding|head)$", "if_divisible"),
    ("(^|/)blocks/experts/", "experts"),
    ("^router_(load|bias)$", "frozen"),
)
"""The rules of a strategy: tensor splits heads, hidden units of each expert and the vocabulary, like
the rules of the GPT. Each device of an expert axis holds its own experts. Loads and biases of
routers are not trained; the loss returns their new values.
"""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The shape of a mixture-of-experts decoder. Immutable and hashable.

    Attributes:
      vocab_size: number of token ids; 256 for bytes.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: attention heads; each has dim / num_heads components, an even number.
      num_kv_heads: heads of keys and values; must divide `num_heads`. None is `num_heads`.
      latent: sizes of latent attention (DeepSeek-V3), `moe.LatentConfig(query=1536, key=512, nope=128,
        rope=64, value=128)`. With None, queries, keys and values come directly from the residual
        stream.
      num_experts: experts of each block.
      top_k: how many experts each token goes through.
      hidden: hidden units of an expert.
      shared_hidden: hidden units of the shared expert, which every token goes through; 0 is no
        shared expert.
      score: "softmax" (Mixtral) or "sigmoid" (DeepSeek-V3).
      normalize: whether the weights of a token's experts are divided by their sum.
      groups: (number of groups, how many are open to a token), see `so.nn.mixture_of_experts`.
      scale: the factor of these weights.
      chunk: how many tokens of a device are dispatched at a time; None is all.
      loss_chunk: positions whose logits are held at a time, see `so.nn.cross_entropy`; None is all.
      balance: how experts are balanced. "bias": by `so.nn.update_router_bias`, without a loss.
        "loss": by a loss over the global batch; it does not work with micro-batches and pipelines.
        "sequence_loss": by a loss of each row; it does not work with a context axis, which splits
        rows. None: not at all.
      balance_rate: the rate of the biases, or the factor of the loss. None is 0.001 for "bias",
        0.01 for "loss" and 0.0001 for "sequence_loss".
      z_loss: factor of the mean of the router's logsumexp squared; 0 leaves it out.
      max_length: the longest sequence of `sample`.
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi.
      norm_epsilon: the number that norms add to the mean square; the narrow vectors of latent
        attention have 1e-6.
      tied: whether the embedding is also the output projection; otherwise that is the leaf "head".
      param_dtype: dtype that `init` creates.
      dtype: dtype of activations and of all products except the router's; None is the dtype of the
        parameters that the loss gets.
      precision: precision of products with block weights except the router's, as in
        `so.nn.quantized_einsum` and `so.nn.mixture_of_experts`; None is `dtype`.

    Raises:
      ValueError: if a size is not positive; if heads do not divide or have odd width; if top_k is
        above num_experts; if latent attention has values wider than its keys, or is combined with
        `num_kv_heads`.

    References:
      Jiang et al., "Mixtral of Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1. Three
      parts of DeepSeek-V3 are left out: the first blocks without experts, the prediction of a
      second token, and yarn.
    """

    vocab_size: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    latent: LatentConfig | None = None
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 384
    shared_hidden: int = 0
    score: Score = "softmax"
    normalize: bool = True
    groups: tuple[int, int] | None = None
    scale: float = 1.0
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
    precision: Precision | None = None

    def __post_init__(self):
        names = ("vocab_size", "dim", "num_layers", "num_heads", "num_experts", "top_k", "hidden")
        problems = not_positive(self, *names, "max_length", "rope_base", "norm_epsilon")
        if self.latent is not None:
            problems += self._latent_problems(self.latent)
        elif not problems and self.dim % (2 * self.num_heads):
            problems.append(
                f"dim={self.dim} cannot be cut into num_heads={self.num_heads} of even width"
            )
        if not problems and self.num_heads % self.kv_heads:
            problems.append(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.top_k > self.num_experts:
            problems.append(f"top_k={self.top_k} is above num_experts={self.num_experts}")
        if problems:
            raise ValueError(
                format_error(
                    "MoEConfig", f"{plural(len(problems), 'size')} cannot be used.", problems
                )
            )

    def _latent_problems(self, latent: LatentConfig) -> list[str]:
        problems = [
            f"latent.{name} must be positive, got {size}"
            for name, size in latent._asdict().items()
            if size <= 0
        ]
        if latent.rope % 2:
            problems.append(f"latent.rope must be even, got {latent.rope}")
        if latent.value > latent.nope + latent.rope:
            problems.append(
                f"latent.value={latent.value} is above nope + rope = {latent.nope + latent.rope}"
            )
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

    @property
    def decoder(self) -> DecoderConfig:
        """This model as a decoder."""
        names = (
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "latent",
            "loss_chunk",
            "max_length",
        )
        names += ("norm_epsilon", "tied", "param_dtype", "dtype", "precision")
        experts = (
            "top_k",
            "hidden",
            "shared_hidden",
            "score",
            "normalize",
            "groups",
            "scale",
            "chunk",
        )
        experts += ("balance", "z_loss")
        return DecoderConfig(
            **{name: getattr(self, name) for name in names},
            kinds=(BlockKind(rope=Rope(base=self.rope_base)),),
            fused="kv",
            experts=ExpertsConfig(
                self.num_experts,
                **{name: getattr(self, name) for name in experts},
                loads=True,
                balance_rate=self.rate,
            ),
        )


def init(config: MoEConfig, rng: jax.Array) -> Params:
    """Return random parameters like the GPT's: normal with standard deviation 0.02, less for last
    products; norms are ones.

    Args:
      config: the shape of the model, L blocks of width D, H heads of width K, G of keys and values,
        E experts of F hidden units.
      rng: a jax random key.

    Returns:
      A dict with "embedding" [V, D], "norm" [D], and "head" [V, D] unless tied. "router_load" [L,
      E] has the loads of the last step; "router_bias" [L, E] exists if balance is "bias". "blocks"
      has

      - "attention/norm" [L, D], "attention/q" [L, D, H, K], "attention/kv" [L, D, G, 2 K],
        "attention/out" [L, H, K, D], or the shapes of `LatentConfig.shapes`;
      - "mlp/norm" [L, D], "router/kernel" [L, D, E];
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
    return decoder.init(config.decoder, rng)


def num_parameters(config: MoEConfig, *, active: bool = False) -> int:
    """Return the number of trained parameters, or with `active` the number that one token goes
    through.
    """
    return decoder.num_parameters(config.decoder, active=active)


def model(config: MoEConfig, *, remat: Remat = None) -> BlockModel:
    """Return the decoder as a `BlockModel`.

    Its loss is the mean cross-entropy of the next token in nats, plus balance terms.

    Args:
      config: the shape of the model.
      remat: what the backward pass recomputes, as in `BlockModel`. Blocks name "qkv", "attention"
        and "attention_out" like the GPT, and "router", "dispatched" and "experts" like
        `so.nn.mixture_of_experts`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> config = MoEConfig(dim=32, num_layers=2, num_experts=4, hidden=16)
      >>> params = init(config, jax.random.key(0))
      >>> loss, aux = jax.jit(lambda p, b: model(config).loss_fn(p, b))(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05), aux["routers"].values["router_load"].shape
      (True, (2, 4))

    A batch is the same as for `decoder.model`. Give strategies `rules=moe.rules`. The loss returns
    `so.losses.Updated` with "router_load", each expert's share of the choices in this step, and
    with "router_bias". Metrics:

    - "cross_entropy", without the balance terms;
    - "load_imbalance" of the previous step: the load of the busiest expert over the mean, averaged
      over blocks; 1 if balanced;
    - "router_entropy" of the previous step: the entropy of the loads in nats over log(E); 1 if
      balanced.

    **Equivalence**: exact on any mesh, with micro-batches and in pipelines. balance="loss" needs
    the whole batch at once, and is refused there. In a pipeline a batch with weights cannot have a
    balance loss, since a pipeline takes only one term.
    """
    return decoder.block_model(config.decoder, remat, "moe")


def logits_of(config: MoEConfig, params: Params, tokens: Tokens) -> Float[Array, "B T V"]:
    """Return the logits after each token.

    Args:
      config: the shape of the model.
      params: the parameters.
      tokens: [B, T], token ids.

    Returns:
      [B, T, V], in float32 at least.
    """
    return decoder.logits_of(config.decoder, params, tokens)
