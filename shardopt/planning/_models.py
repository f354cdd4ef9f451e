"""Decoder-only transformers described by their sizes, with closed-form costs, and published models
by name.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from shardopt.core import (
    LeafRole,
    PyTree,
    Rules,
    calling,
    check_count,
    leaves_with_paths,
    type_error,
    value_error,
)
from shardopt.core._block_model import BlockModel
from shardopt.planning._workload import (
    AttentionSizes,
    Bytes,
    ExpertSizes,
    NamedValue,
    Workload,
    tensor_sums,
)

RULES: tuple[tuple[str, LeafRole], ...] = (
    ("^blocks/(q|kv)$", P(None, "tensor", None)),
    ("^blocks/out$", P("tensor", None, None)),
    ("^blocks/up$", P(None, None, "tensor")),
    ("^blocks/down$", P("tensor", None)),
    ("^(embedding|head)$", P("tensor", None)),
)
"""Column then row sharding, so each half of a block needs one sum over tensor (Shoeybi et al.,
2019, section 3).
"""
_EXPERT_RULES: tuple[tuple[str, LeafRole], ...] = (
    ("^blocks/experts_(gate|up)$", P(None, None, "tensor")),
    ("^blocks/experts_down$", P(None, "tensor", None)),
    ("^blocks/experts_", "experts"),
)


class LatentSizes(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values
    through narrow products.

    Attributes:
      query: width of the compressed vector that queries are computed from.
      key: width of the compressed vector that keys and values are computed from.
      rope: rotary dims of a head, in addition to `Transformer.head_dim`; all heads share their
        keys.
    """

    query: int
    key: int
    rope: int


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder-only transformer: rotary or no position parameters, one norm before
    each half of a block.

    Attributes:
      name: for tables.
      dim: D, width of the residual stream.
      num_layers: L, blocks.
      num_heads: H, query heads.
      num_kv_heads: G, key and value heads; None is as many as query heads.
      hidden: F, hidden units of the mlp.
      vocab_size: V.
      length: T, tokens of a row.
      head_dim: K, width of a head; None is D / H.
      gated: whether the mlp has a gate (SwiGLU): three matrices instead of two.
      tied: whether the output projection is the embedding.
      positions: learned positions, as rows of a table of width D; 0 without.
      fused_attention: whether attention skips masked blocks and writes no scores to memory
        (FlashAttention). Otherwise all T x T scores are computed, in fp32.
      num_experts: E, experts of F hidden units each that replace the mlp; 0 for one mlp.
      top_k: K, experts of a token.
      shared_experts: additional experts that every token goes through.
      expert_chunk: tokens per device in one dispatch, see `so.nn.mixture_of_experts`; None is all.
      latent: sizes of latent attention; None computes queries, keys and values from the residual
        stream.
      param_dtype: dtype of the parameters (the masters).
      dtype: dtype of activations and inner products.

    Raises:
      ValueError: if a size is not positive, or `num_kv_heads` does not divide `num_heads`.

    Example:
      >>> shape = Transformer("tiny", dim=64, num_layers=2, num_heads=4, hidden=192, vocab_size=256, length=32)
      >>> shape.num_parameters
      139584
    """

    name: str
    dim: int
    num_layers: int
    num_heads: int
    hidden: int
    vocab_size: int
    length: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    tied: bool = False
    positions: int = 0
    fused_attention: bool = True
    num_experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    expert_chunk: int | None = None
    latent: LatentSizes | None = None
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.bfloat16

    @calling("Transformer")
    def __post_init__(self):
        for name in (
            "dim",
            "num_layers",
            "num_heads",
            "kv_heads",
            "hidden",
            "vocab_size",
            "length",
            "width",
        ):
            check_count(name, getattr(self, name))
        problem = ""
        if self.num_heads % self.kv_heads:
            problem = f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.kv_heads}"
        elif self.num_experts and not 0 < self.top_k <= self.num_experts:
            problem = f"top_k must be from 1 to num_experts={self.num_experts}, got {self.top_k}"
        if problem:
            raise value_error(f"{problem}.")

    @property
    def kv_heads(self) -> int:
        """G, key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """K, width of a head."""
        return self.dim // max(self.num_heads, 1) if self.head_dim is None else self.head_dim

    @property
    def mlps(self) -> int:
        """The number of mlps of F hidden units that every token goes through."""
        return self.shared_experts if self.num_experts else 1

    @property
    def num_parameters(self) -> int:
        """L (2 D H K + 2 D G K + (3 or 2) D F + 2 D) + V D (twice if untied) + D, and positions.

        With experts D E for the router is added, and each expert has the (3 or 2) D F of an mlp.
        """
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params()))

    @property
    def rules(self) -> Rules:
        """The rules, as strategies take them."""
        paths = [path for path, _ in leaves_with_paths(self.abstract_params())]
        return tuple(
            rule
            for rule in (*RULES, *_EXPERT_RULES)
            if any(re.search(rule[0], path) for path in paths)
        )

    def abstract_params(self) -> dict[str, PyTree]:
        """Return shapes and dtypes of the parameters, blocks stacked."""
        L = self.num_layers
        D = self.dim
        H = self.num_heads
        G = self.kv_heads
        K = self.width
        F = self.hidden

        def leaf(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, self.param_dtype)

        params: dict[str, PyTree] = {
            "embedding": leaf(self.vocab_size, D),
            "blocks": {"norms": leaf(L, 2, D), "out": leaf(L, H, K, D)},
            "norm": leaf(D),
        }
        blocks = params["blocks"]
        if self.latent is None:
            blocks |= {"q": leaf(L, D, H, K), "kv": leaf(L, D, G, 2 * K)}
        else:
            q, kv, rope = self.latent
            blocks |= {
                "q_down": leaf(L, D, q),
                "q": leaf(L, q, H, K + rope),
                "kv_down": leaf(L, D, kv + rope),
            }
            blocks |= {"kv": leaf(L, kv, G, 2 * K), "latent_norms": leaf(L, q + kv)}
        if self.mlps:
            blocks |= {
                "up": leaf(L, D, 1 + self.gated, self.mlps * F),
                "down": leaf(L, self.mlps * F, D),
            }
        E = self.num_experts
        if E:
            blocks |= {"experts_up": leaf(L, E, D, F), "experts_down": leaf(L, E, F, D)}
            blocks |= {"experts_gate": leaf(L, E, D, F)} if self.gated else {}
            blocks["router"] = leaf(L, D, E)
        if not self.tied:
            params["head"] = leaf(self.vocab_size, D)
        if self.positions:
            params["positions"] = leaf(self.positions, D)
        return params

    def workload(self) -> Workload:
        """Return the costs of one row.

        Note:
          - Forward flops of a block: 2 T D (2 H K + 2 G K + (3 or 2) F) for weights and 4 T^2 H K
            for attention. Fused attention counts half of the latter.
          - Forward flops of the head: 2 T D V.
          - Residuals of a block per token, replicated over tensor: the input, the middle of the
            residual stream and both norms (4 D).
          - Residuals of a block per token, sharded over tensor: queries, keys, values and the
            result of attention (2 H K + 2 G K), and the mlp (6 F, for SwiGLU and for GELU; jax 0.12
            stores 5 F for GELU).
          - In a pipeline and under fsdp a block stores the results of inner products alone: 2 D, 2
            H K + 2 G K, and for the mlp 2 F, without a gate F.
          - Values that remat can save by name: "qkv" (H K + 2 G K), "attention" (H K),
            "attention_out" (D) and "mlp_hidden" (2 F, without a gate F). Each avoids the product
            that computes it, "attention" half of the T^2 flops.
          - Experts: each token goes through `top_k` experts and the shared ones instead of one mlp.
            The router adds 2 T D E flops. Residuals are the arriving tokens (D per expert of a
            token, replicated over tensor) and the hidden units (2 F per expert of a token, with a
            gate). Tokens that are dispatched in chunks are computed again instead. The name of
            these values is "dispatched".
          - Latent attention: its narrow products are counted in addition.
        """
        T = self.length
        D = self.dim
        F = self.hidden
        mlps = self.mlps
        params = self.abstract_params()
        token_bytes = self._token_bytes
        attention = self._attention()
        blocks = params["blocks"].items()
        weight_flops = (
            2 * T * sum(math.prod(leaf.shape[1:]) for name, leaf in blocks if name in _PRODUCTS)
        )
        weight_flops += 2 * T * D * (2 + self.gated) * F * self._chosen_experts
        block_flops = weight_flops + attention.flops
        head_flops = 2 * T * D * self.vocab_size
        # a stage stores the results of products; its weight gradient does not read the mixed values
        products = Bytes(
            token_bytes * 2 * D, token_bytes * (self._qkv_width + (1 + self.gated) * mlps * F)
        )
        mixed = Bytes(sharded=attention.queries)
        scores = Bytes(sharded=attention.scores)
        residuals = (
            Bytes(token_bytes * 4 * D, token_bytes * (self._qkv_width + 6 * mlps * F))
            .plus(mixed)
            .plus(scores)
        )
        stage_residuals = products.plus(mixed).plus(scores)
        deferred = products
        # cotangents at the widest point of a block, and of the scores
        working = Bytes(token_bytes * 2 * D, token_bytes * 2 * mlps * F).plus(scores)
        experts = self._experts() if self.num_experts else None
        if experts is not None:
            working = working.plus(experts.working)
            if experts.saves_buffers:
                residuals, stage_residuals, deferred = (
                    stored.plus(experts.buffers)
                    for stored in (residuals, stage_residuals, deferred)
                )
            else:
                working = working.plus(experts.buffers)
        return Workload(
            name=self.name,
            params=params,
            rules=self.rules,
            tokens=T,
            block_flops=block_flops,
            recompute_flops=block_flops - 2 * T * F * D * (mlps + self._chosen_experts),
            ends_flops=head_flops,
            boundary_bytes=token_bytes * D,
            residuals=residuals,
            stage_residuals=stage_residuals,
            deferred=deferred,
            working=working,
            # logits in fp32; their gradient overwrites them
            ends_working=Bytes(sharded=_FP32_BYTES * T * self.vocab_size),
            tensor_sums=tensor_sums(params, self.rules),
            model_flops=3 * (self.num_layers * (weight_flops + self._score_flops / 2) + head_flops),
            itemsize=jnp.dtype(self.dtype).itemsize,
            loss_reads=("norm", "embedding" if self.tied else "head"),
            tables=() if self.tied else ("embedding",),
            table_ids=0.0 if self.tied else float(T),
            table_numbers=0.0 if self.tied else float(T * D),
            attention=attention,
            experts=experts,
            named=self._named_values(),
        )

    @property
    def _token_bytes(self) -> int:
        """Bytes of one number for each token of a row."""
        return jnp.dtype(self.dtype).itemsize * self.length

    @property
    def _qkv_width(self) -> int:
        """H K + 2 G K, the width of queries, keys and values together."""
        return (self.num_heads + 2 * self.kv_heads) * self.width

    @property
    def _chosen_experts(self) -> int:
        return self.top_k if self.num_experts else 0

    @property
    def _score_flops(self) -> float:
        """Flops of all T x T scores, and of mixing the values by them."""
        rope = 0 if self.latent is None else self.latent.rope
        return 2 * self.length**2 * self.num_heads * (2 * self.width + rope)

    def _attention(self) -> AttentionSizes:
        head_bytes = self._token_bytes * self.width
        return AttentionSizes(
            queries=head_bytes * self.num_heads,
            keys=head_bytes * self.kv_heads,
            kv_heads=self.kv_heads,
            scores=0 if self.fused_attention else _FP32_BYTES * self.num_heads * self.length**2,
            flops=self._score_flops / (2 if self.fused_attention else 1),
        )

    def _experts(self) -> ExpertSizes:
        token_bytes = self._token_bytes
        D = self.dim
        F = self.hidden
        share = self.top_k * (
            1.0 if self.expert_chunk is None else min(1.0, self.expert_chunk / self.length)
        )
        buffers = Bytes(share * token_bytes * D, share * token_bytes * (1 + self.gated) * F)
        return ExpertSizes(
            self.num_experts,
            self.top_k,
            tokens=token_bytes * D,
            buffers=buffers,
            working=buffers.plus(Bytes(sharded=share * 2 * token_bytes * F)),
            # rows, gradients of results and gradients of rows, each as it travels and as products
            # read it
            exchange_working=Bytes(6 * buffers.replicated).plus(buffers, -1),
            saves_buffers=self.expert_chunk is None,
        )

    def _named_values(self) -> tuple[NamedValue, ...]:
        T = self.length
        D = self.dim
        H = self.num_heads
        K = self.width
        token_bytes = self._token_bytes
        qkv_width = self._qkv_width
        hidden_width = self.mlps * (1 + self.gated) * self.hidden
        values = (
            NamedValue("qkv", Bytes(0, token_bytes * qkv_width), 2.0 * T * D * qkv_width, 0),
            NamedValue("attention", Bytes(0, token_bytes * H * K), 2.0 * T * T * H * K, 0),
            NamedValue("attention_out", Bytes(token_bytes * D, 0), 2.0 * T * D * H * K, 1),
            NamedValue(
                "mlp_hidden", Bytes(0, token_bytes * hidden_width), 2.0 * T * D * hidden_width, 0
            ),
        )
        return values if self.mlps else values[:-1]


_FP32_BYTES = 4
_PRODUCTS = ("q", "kv", "out", "up", "down", "q_down", "kv_down", "router")


def _published(name: str, sizes: dict[str, Any]) -> Transformer:
    latent = sizes.pop("latent", None)
    return Transformer(name, **sizes, latent=latent and LatentSizes(**latent))


_FILE = Path(__file__).with_name("models.json")
MODELS = {
    name: _published(name, sizes)
    for name, sizes in json.loads(_FILE.read_text(encoding="utf-8")).items()
}
"""Published models by name, with the sequence length of their training.

References:
  GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2;
  released sizes. Llama 2: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models",
  2023, and its published configuration. Llama 3: Grattafiori et al., "The Llama 3 Herd of Models",
  2024, table 3. Mixtral: Jiang et al., "Mixtral of Experts", 2024, table 1; row length as in the
  published training configuration. DeepSeek-V3: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
  section 4.2, without its 3 leading dense layers.
"""


def find_model(name: Any) -> Transformer:
    """Return the published model with this name; return a `Transformer` unchanged.

    Raises:
      TypeError: if `name` is neither a string nor a `Transformer`.
      ValueError: if there is no such name.

    Example:
      >>> round(find_model("llama3-8b").num_parameters / 1e9, 2)
      8.03
    """
    if isinstance(name, Transformer):
        return name
    if not isinstance(name, str):
        fix = (
            "pass a name such as 'llama3-8b', a so.planning.Transformer, or"
            " so.planning.trace(model, ...)."
        )
        shown = repr(name) if isinstance(name, int | float | None) else type(name).__name__
        if isinstance(name, BlockModel):
            fix = (
                "pass so.planning.trace(model, abstract_params, abstract_batch), which counts what"
                " a row costs."
            )
        elif callable(name):
            fix = (
                "make a so.BlockModel of the loss, and pass so.planning.trace(model,"
                " abstract_params, abstract_batch); of a loss without blocks so.planning.aot compiles one"
                " layout."
            )
        raise type_error(
            f"model must be a name, a Transformer or a Workload, got {shown}.", fix=fix
        )
    normalized_name = (
        name.lower().strip().replace("llama-", "llama").replace("llama3.1-", "llama3-")
    )
    if normalized_name not in MODELS:
        fix = f"use one of {', '.join(MODELS)}, or describe it with so.planning.Transformer."
        raise value_error(f"unknown model {name!r}.", fix=fix)
    return MODELS[normalized_name]
