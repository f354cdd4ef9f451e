"""The description of a decoder: sizes, and the choices that differ between open models."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from shardopt.core import format_error, plural
from shardopt.core._rounding import Precision
from shardopt.low_precision._numbers import check_precision
from shardopt.models._latent_attention import LatentConfig
from shardopt.models._rope import Rope, not_positive
from shardopt.nn._norm import Norm
from shardopt.nn._residual import Residual
from shardopt.nn._router import Score

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
QKNorm = Literal["head", "all"]
Balance = Literal["bias", "loss", "sequence_loss"]


def _clamped_swiglu(x: Array) -> Array:
    """Return (up + 1) gate sigmoid(1.702 gate) of neighbouring pairs (gate, up), clamped to 7: half
    as many units (GPT-OSS).
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    gate = jnp.minimum(pairs[..., 0], 7.0)
    up = jnp.clip(pairs[..., 1], -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "clamped_swiglu": _clamped_swiglu,
}


class BlockKind(NamedTuple):
    """What differs between the blocks of a decoder; their weights have the same shapes.

    Attributes:
      window: the most positions that a query sees, as in `so.nn.attention`; None sees all.
      rope: the rotary positions; None rotates nothing.
    """

    window: int | None = None
    rope: Rope | None = Rope()


class ExpertsConfig(NamedTuple):
    """The mixture of experts of a decoder, in the terms of `so.nn.mixture_of_experts`.

    Attributes:
      number: experts of a block.
      top_k: experts of a token.
      hidden: hidden units of an expert.
      shared_hidden: hidden units of the shared expert; 0 is none.
      shared_gate: whether each token weights the shared expert by a sigmoid of its own,
        "router/shared_gate" (Qwen 2 MoE).
      score: "softmax" or "sigmoid".
      normalize: whether the weights of a token's experts are divided by their sum.
      groups: (number of groups, how many are open to a token).
      scale: the factor of these weights.
      choice_bias: whether the choice has a bias for each expert, the leaf "router/choice_bias".
      biases: whether the router and the products of experts have biases.
      num_first: blocks without experts, before the others; their hidden units are
        `DecoderConfig.hidden`.
      chunk: how many tokens of a device are dispatched at a time; None is all.
      loads: whether the leaf "router_load" holds the loads of the last step. The loss then returns
        metrics and new loads, see `moe.model`.
      balance: how experts are balanced, as in `moe.config`; it needs `loads`.
      balance_rate: the rate of the biases, or the factor of the balance loss.
      z_loss: factor of the mean of the router's logsumexp squared; it needs `loads`.
    """

    number: int
    top_k: int
    hidden: int
    shared_hidden: int = 0
    shared_gate: bool = False
    score: Score = "softmax"
    normalize: bool = True
    groups: tuple[int, int] | None = None
    scale: float = 1.0
    choice_bias: bool = False
    biases: bool = False
    num_first: int = 0
    chunk: int | None = None
    loads: bool = False
    balance: Balance | None = None
    balance_rate: float = 0.0
    z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder as data. Immutable and hashable.

    Attributes:
      vocab_size: number of token ids.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: attention heads.
      num_kv_heads: heads of keys and values; None is `num_heads`.
      head_dim: width of a head; None is `dim / num_heads`.
      hidden: hidden units of the mlp.
      kinds: the kinds of blocks.
      pattern: the kind of each block as an index into `kinds`; empty if all are the first.
      positions: rows of the table of learned positions; 0 is no table.
      norm: "rms" or "layer", which also subtracts the mean and has a bias. In "rms_plus_one"
        (Gemma) the factor is 1 + w.
      norm_epsilon: the number that norms add to the mean square.
      pre_norms: whether attention and mlp get normed inputs.
      post_norms: whether their outputs are normed, before they are added.
      qk_norm: norms of queries and keys: "head" norms each head, "all" norms all heads of a token together; None is none.
      qkv_bias: whether queries, keys and values have biases.
      out_bias: whether the last product of attention has a bias.
      mlp_bias: whether the products of the mlp have biases.
      activation: the activation of the mlp. "clamped_swiglu" is that of GPT-OSS: "up" then has two
        columns for each hidden unit.
      gated: whether the mlp is gated.
      attention_scale: the factor of attention scores; None is 1 / sqrt(head_dim).
      attention_softcap: the cap of attention scores, as in `so.nn.attention`.
      logits_softcap: the cap of logits, as in `so.nn.cross_entropy`.
      sinks: whether each head has a sink, as in `so.nn.attention`.
      embedding_scale: the factor of embeddings.
      tied: whether the embedding is also the output projection; otherwise that is the leaf "head".
      latent: sizes of latent attention (DeepSeek), a `LatentConfig`; None is grouped attention.
      experts: the mixture of experts; None is an mlp in each block.
      max_length: the longest sequence of `sample`.
      loss_chunk: positions whose logits are held at a time, see `so.nn.cross_entropy`; None is all.
      logits_dtype: the dtype of the logits in the loss, see `so.nn.cross_entropy`.
      fused: which products of a block are one product: "kv" is keys and values [D, G, 2 K], "qkv"
        is also queries [D, 3, H, K]. Either also fuses gate and up of the mlp, [D, 2, F]. One
        product is faster than several.
      recompute_activation: whether the backward pass computes the activation of the mlp again, and
        stores its inputs alone.
      sequence_parallel: whether tensor shards the positions of block inputs, block outputs and
        norms. tensor must divide the positions. A block stores 1 / tensor of its input. An
        all-gather and a reduce-scatter of as many bytes replace each all-reduce. On TPU a dense
        block computes half of a device's rows while the other half is sent. The step is the same,
        up to summation order. `so.plan` does not plan for it.
      param_dtype: dtype that `init` creates and `from_pretrained` loads.
      dtype: dtype of activations and products; None is the dtype of the parameters that the loss
        gets.
      precision: precision of products with block weights, as in `so.nn.quantized_einsum`; None is
        `dtype`. Router and experts keep `dtype`.

    Raises:
      ValueError: if sizes do not fit together, or a choice is unknown.

    References:
      Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
      section 4.2.2, for `sequence_parallel`.
    """

    vocab_size: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int = 768
    kinds: tuple[BlockKind, ...] = (BlockKind(),)
    pattern: tuple[int, ...] = ()
    positions: int = 0
    norm: Norm = "rms"
    norm_epsilon: float = 1e-6
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: QKNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    sinks: bool = False
    embedding_scale: float = 1.0
    tied: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    max_length: int = 1024
    loss_chunk: int | None = None
    logits_dtype: DTypeLike | None = None
    fused: Literal["kv", "qkv"] | None = None
    recompute_activation: bool = True
    sequence_parallel: bool = False
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike | None = None
    precision: Precision | None = None

    def __post_init__(self):
        check_precision("DecoderConfig", self.precision)
        problems = self._problems()
        if problems:
            raise ValueError(
                format_error(
                    "DecoderConfig", f"{plural(len(problems), 'field')} cannot be used.", problems
                )
            )

    def _problems(self) -> list[str]:
        positive = "vocab_size", "dim", "num_layers", "num_heads", "hidden", "norm_epsilon"
        problems = not_positive(self, *positive, "max_length")
        if problems:
            return problems
        return [
            *self._problems_of_choices(),
            *self._problems_of_kinds(),
            *self._problems_of_attention(),
            *self._problems_of_experts(),
        ]

    def _problems_of_choices(self) -> Iterator[str]:
        choices = {
            "norm": get_args(Norm),
            "activation": get_args(Activation),
            "fused": ("kv", "qkv", None),
            "qk_norm": (*get_args(QKNorm), None),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                listed = ", ".join(map(str, values))
                yield f"{name} must be one of {listed}, got {getattr(self, name)!r}"

    def _problems_of_kinds(self) -> Iterator[str]:
        if self.pattern and len(self.pattern) != self.num_layers:
            yield f"pattern has {len(self.pattern)} entries for {self.num_layers} blocks"
        if not set(self.pattern) <= set(range(len(self.kinds))):
            yield (
                f"pattern names kinds from 0 to {max(self.pattern)}, and there are"
                f" {len(self.kinds)}"
            )
        ropes = [kind.rope for kind in self.kinds if kind.rope]
        widths = {rope.dims or self.rotary_dim for rope in ropes}
        if len(widths) > 1 or any(width % 2 for width in widths):
            yield f"the dims that rotate must be even and the same in all kinds, got {sorted(widths)}"

    def _problems_of_attention(self) -> Iterator[str]:
        heads = self.num_heads
        kv_heads = self.kv_heads
        if heads % kv_heads:
            yield f"num_kv_heads={self.num_kv_heads} does not divide num_heads={heads}"
        if self.latent is None and self.head_dim is None and self.dim % heads:
            yield f"dim={self.dim} cannot be cut into num_heads={heads}, so give head_dim"
        if self.fused == "qkv" and kv_heads != heads:
            yield (
                f"fused='qkv' needs as many heads of keys as of queries, got {kv_heads} and {heads}"
            )
        if self.norm == "layer" and self.qk_norm:
            yield f"norm={self.norm!r} is for models without qk_norm"
        if self.latent is None:
            return
        if min(self.latent) <= 0:
            yield f"the sizes of latent must be positive, got {self.latent}"
        if kv_heads != heads or self.qk_norm or self.qkv_bias:
            yield "num_kv_heads, qk_norm and qkv_bias are for attention that is not latent"
        if self.latent.value > self.head_width:
            yield (
                f"latent.value={self.latent.value} is wider than queries and keys, which have"
                f" {self.head_width} dims"
            )

    def _problems_of_experts(self) -> Iterator[str]:
        experts = self.experts
        if experts is None:
            return
        yield from not_positive(experts, "number", "top_k", "hidden")
        groups, num_open = experts.groups or (1, 1)
        choices_left = experts.number * num_open // groups
        if experts.top_k > choices_left:
            yield (
                f"experts.top_k={experts.top_k}, but a token can go to {choices_left} experts only"
            )
        if not 0 <= experts.num_first < self.num_layers:
            yield (
                f"experts.num_first={experts.num_first} leaves no block of {self.num_layers} with"
                " experts"
            )
        if (experts.balance or experts.z_loss) and not experts.loads:
            yield "experts.balance and experts.z_loss need experts.loads"
        if self.fused and experts.shared_gate:
            yield "fused is for models without experts.shared_gate"

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of queries and keys of a head."""
        if self.latent is not None:
            return self.latent.nope + self.latent.rope
        return self.head_dim or self.dim // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that can rotate."""
        return self.head_width if self.latent is None else self.latent.rope

    @property
    def used_kinds(self) -> tuple[BlockKind, ...]:
        """The kinds that some block has, in the order of `kinds`."""
        return tuple(self.kinds[i] for i in sorted(set(self.pattern or (0,))))

    @property
    def num_first(self) -> int:
        """Blocks without experts before the stacked blocks; 0 if no block has experts."""
        return self.experts.num_first if self.experts else 0

    @property
    def residual(self) -> Residual:
        """How the branches of a block read the residual stream, and add to it."""
        return Residual(
            self.norm, self.norm_epsilon, self.pre_norms, self.post_norms, self.sequence_parallel
        )
