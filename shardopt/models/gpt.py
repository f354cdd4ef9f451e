"""A decoder-only GPT as pure functions: rotary positions, RMS norm, SwiGLU, stacked and scanned blocks; and `sample`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt import nn
from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._errors import format_error, plural
from shardopt.core._types import PyTree, Weighted
from shardopt.models import _layers as layers
from shardopt.models._inputs import attach_marks, make_block, mean_loss, plain_activations, read_inputs
from shardopt.nn._low_precision import Precision, check_precision
from shardopt.optimizers import Matrix

Params = dict[str, PyTree]
Batch = PyTree  # a dict of arrays; `read_inputs` refuses others
Tokens = Int[Array | np.ndarray, "B T"]

rules = (
    ("^blocks/attention/qkv$", P(None, None, "tensor", None)),
    ("^blocks/attention/out$", P("tensor", None, None)),
    ("^blocks/mlp/up$", P(None, None, "tensor")),
    ("^blocks/mlp/down$", P("tensor", None)),
    ("^(embedding|head)$", P("tensor", None)),
)
"""Tensor rules that shard heads, hidden units and the vocabulary; each block then needs two all-reduces over the axis.

The first product of attention and mlp is sharded by column, the second by row (Shoeybi, Patwary, Puri, LeGresley,
Casper and Catanzaro, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
2019, section 3). Specs are for one block, without the stacked dim.
"""

matrices = (
    ("^blocks/attention/qkv$", Matrix(rows=1, columns=(3, 4))),
    ("^blocks/attention/out$", Matrix(rows=(1, 2), columns=3)),
    ("^blocks/mlp/up$", Matrix(rows=1, columns=3)),
    ("^blocks/mlp/down$", Matrix(rows=1, columns=2)),
)
"""The leaves that `so.optimizers` treats as matrices: the products of the blocks.

Queries, keys and values are separate matrices, and so are gate and up. AdamW updates embedding, head and norms, as in
Jordan et al., "Muon", 2024.
"""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Immutable and hashable.

    Attributes:
      vocab_size: number of token ids; 256 for bytes.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: attention heads; each has dim / num_heads components, an even number.
      mlp_multiple: hidden units of the mlp, in multiples of `dim`.
      max_length: the longest sequence of `sample`.
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi.
      tied: whether the embedding is also the output projection; otherwise that is the leaf "head".
      param_dtype: dtype that `init` creates.
      dtype: dtype of activations and products; None is the dtype of the parameters that the loss gets.
      precision: precision of products with block weights: "int8" or "fp8" as in `so.nn.quantized_einsum`; None is `dtype`.

    Raises:
      ValueError: if a size is not positive, `num_heads` does not divide `dim`, heads have odd width, or the precision is
        unknown.
    """

    vocab_size: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    mlp_multiple: int = 3
    max_length: int = 1024
    rope_base: float = 10_000.0
    tied: bool = False
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike | None = None
    precision: Precision | None = None

    def __post_init__(self):
        check_precision("GPTConfig", self.precision)
        sizes = ("vocab_size", "dim", "num_layers", "num_heads", "mlp_multiple", "max_length", "rope_base")
        problems = [f"{name} must be positive, got {getattr(self, name)}" for name in sizes if getattr(self, name) <= 0]
        if not problems and self.dim % (2 * self.num_heads):
            problems = [f"dim={self.dim} cannot be cut into num_heads={self.num_heads} of even width"]
        if problems:
            fix = "choose positive sizes, and dim a multiple of 2 * num_heads."
            raise ValueError(
                format_error("GPTConfig", f"{plural(len(problems), 'size')} cannot be used.", problems, fix)
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def hidden(self) -> int:
        """Hidden units of the mlp."""
        return self.mlp_multiple * self.dim


def init(config: GPTConfig, rng: jax.Array) -> Params:
    """Return random normal parameters, so that the loss starts at the loss of a uniform guess; norms are ones.

    The standard deviation is 0.02; it is 0.02 / sqrt(2 num_layers) for the last product of each branch, and 1 / dim for
    a tied embedding.

    Args:
      config: the shape of the model, L blocks of width D with H heads of width K and F hidden units.
      rng: a jax random key.

    Returns:
      A dict with "embedding" [V, D], "norm" [D], and "head" [V, D] unless tied. Its "blocks" have "attention/norm"
      [L, D], "attention/qkv" [L, D, 3, H, K], "attention/out" [L, H, K, D], "mlp/norm" [L, D], "mlp/up"
      [L, D, 2, F] and "mlp/down" [L, F, D].

    Example:
      >>> import jax
      >>> config = GPTConfig(dim=32, num_layers=2)
      >>> params = init(config, jax.random.key(0))
      >>> params["blocks"]["attention"]["qkv"].shape
      (2, 32, 3, 4, 8)
      >>> sum(leaf.size for leaf in jax.tree.leaves(params)) == num_parameters(config)
      True
    """
    L, D, H, K, F = config.num_layers, config.dim, config.num_heads, config.head_dim, config.hidden
    keys = iter(jax.random.split(rng, 6))

    def normal(*shape: int, scale: float = 0.02) -> Array:
        return scale * jax.random.normal(next(keys), shape, config.param_dtype)

    def ones(*shape: int) -> Array:
        return jnp.ones(shape, config.param_dtype)

    branch_scale = 0.02 / (2 * L) ** 0.5  # the sum of 2L branches then has the variance of one branch
    # A tied embedding is also the head: with 0.02 each token would predict itself with a logit of 0.02 D.
    params = {
        "embedding": normal(config.vocab_size, D, scale=1 / D if config.tied else 0.02),
        "blocks": {
            "attention": {
                "norm": ones(L, D),
                "qkv": normal(L, D, 3, H, K),
                "out": normal(L, H, K, D, scale=branch_scale),
            },
            "mlp": {"norm": ones(L, D), "up": normal(L, D, 2, F), "down": normal(L, F, D, scale=branch_scale)},
        },
        "norm": ones(D),
    }
    if not config.tied:
        params["head"] = normal(config.vocab_size, D)
    return params


def num_parameters(config: GPTConfig) -> int:
    """Return the number of parameters: V D (twice if untied) + L (4 D^2 + 3 D F + 2 D) + D."""
    V, L, D, F = config.vocab_size, config.num_layers, config.dim, config.hidden
    return V * D * (1 if config.tied else 2) + L * (4 * D * D + 3 * D * F + 2 * D) + D


def model(config: GPTConfig, *, remat: Remat = None) -> BlockModel:
    """Return the GPT as a `BlockModel`; its loss is the mean cross-entropy of the next token, in nats.

    Args:
      config: the shape of the model.
      remat: what the backward pass recomputes, as in `BlockModel`. With T tokens, its blocks name these values:

        - "qkv" [3 T D], rotated queries and keys, and values;
        - "attention" [T D], the output of attention;
        - "attention_out" [T D], the product that follows;
        - "mlp_hidden" [2 T F], the first product of the mlp. The backward pass does not need the second product.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> config = GPTConfig(dim=32, num_layers=2)
      >>> params = init(config, jax.random.key(0))
      >>> loss = jax.jit(model(config).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True

    A batch is a dict of "tokens", integers [B, T + 1]: the first T are the input and the last T are the targets. Or it has
    "tokens" and "targets", integers [B, T] each; a context axis can split this form (`so.data.next_token` converts to it).
    It may also have, [B, T] each:

    - "weights", one per target (0 leaves it out): the loss is then a `so.Weighted`, the weighted mean over the whole global
      batch;
    - "segment_ids", integers, the document of each token in a packed row (`so.data.pack`): tokens attend to their own
      document only, and no gradient crosses from one document to another;
    - "positions", integers, the position of each token in its document, for the rotary positions alone. By default it is the
      position in the row. This gives the same result, since rotary positions act by their distances;
    - "order", integers, the position of each token in a row that was permuted (`so.nn.zigzag`). Attention then uses plain XLA,
      not the kernel of the devices. Rows in natural order need no "order", packed or not.

    A token id outside the vocabulary makes the loss NaN.
    """

    def embed(outer: Params, batch: Batch) -> PyTree:
        inputs = read_inputs("gpt", batch)
        return attach_marks(embed_tokens(config, outer, inputs.tokens), inputs)

    def run(
        one_block: Params, x: Array, segment_ids: Array | None, positions: Array | None, order: Array | None
    ) -> Array:
        return apply_block(config, one_block, x, segment_ids=segment_ids, positions=positions, order=order)[0]

    def loss(outer: Params, x: PyTree, batch: Batch) -> Float[Array, ""] | Weighted:
        inputs = read_inputs("gpt", batch)
        return mean_loss(
            nn.cross_entropy(*_final_norm_and_head(config, outer, plain_activations(x)), inputs.targets), inputs
        )

    return BlockModel(embed, make_block(run), loss, remat, tables=() if config.tied else ("embedding",))


def embed_tokens(config: GPTConfig, outer: Params, tokens: Tokens) -> Float[Array, "B T D"]:
    """Return the embedding of every token; NaN for an id outside the vocabulary."""
    return nn.embedding(layers.cast(outer["embedding"], config.dtype), jnp.asarray(tokens, jnp.int32))


def apply_block(
    config: GPTConfig,
    one_block: Params,
    x: Float[Array, "B T D"],
    cache: layers.KVCache | None = None,
    start: Int[Array, ""] | int = 0,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    order: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], layers.KVCache | None]:
    """Add the attention branch, then the mlp branch; return x and the cache that `layers.attention` returns."""
    attention, mlp = (
        layers.cast(one_block["attention"], config.dtype),
        layers.cast(one_block["mlp"], config.dtype),
    )
    normed = layers.rms_norm(x, attention["norm"])
    mixed, cache = layers.attention(
        attention,
        normed,
        rope_base=config.rope_base,
        cache=cache,
        start=start,
        segment_ids=segment_ids,
        positions=positions,
        order=order,
        precision=config.precision,
    )
    x = x + mixed
    return x + layers.swiglu(mlp, layers.rms_norm(x, mlp["norm"]), precision=config.precision), cache


def logits_of(config: GPTConfig, params: Params, tokens: Tokens) -> Float[Array, "B T V"]:
    """Return the logits after each token.

    Args:
      config: the shape of the model.
      params: the parameters, on one device or sharded.
      tokens: [B, T], token ids.

    Returns:
      [B, T, V], in float32 at least.
    """
    run_block = lambda x, block: (apply_block(config, block, x)[0], None)  # noqa: E731
    x, _ = jax.lax.scan(run_block, embed_tokens(config, params, tokens), params["blocks"])
    return _logits(config, params, x)


def _logits(config: GPTConfig, outer: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Return the logits of the next token, in float32 at least, since bfloat16 would cost a digit of the loss."""
    normed, head = _final_norm_and_head(config, outer, x)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("btd,vd->btv", normed, head, preferred_element_type=wide)


def _final_norm_and_head(config: GPTConfig, outer: Params, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
    norm, head = layers.cast((outer["norm"], outer["embedding" if config.tied else "head"]), config.dtype)
    return layers.rms_norm(x, norm), head


def empty_cache(params: Params, batch_size: int, length: int, dtype: DTypeLike | None = None) -> layers.KVCache:
    """Return a cache for `advance`: zeros, key and value [L, batch_size, length, H, K]."""
    qkv = params["blocks"]["attention"]["qkv"]
    num_layers, _, _, num_heads, head_dim = qkv.shape
    zeros = jnp.zeros((num_layers, batch_size, length, num_heads, head_dim), dtype or qkv.dtype)
    return layers.KVCache(zeros, zeros)


def advance(
    params: Params, config: GPTConfig, tokens: Tokens, cache: layers.KVCache, start: Int[Array, ""]
) -> tuple[Float[Array, "B T V"], layers.KVCache]:
    """Return the logits after each of T tokens at positions `start`, `start` + 1, ..., and the new cache."""

    def run_block(x, block_and_cache):
        one_block, block_cache = block_and_cache
        x, block_cache = apply_block(config, one_block, x, block_cache, start)
        assert block_cache is not None
        return x, block_cache

    x, new_cache = jax.lax.scan(run_block, embed_tokens(config, params, tokens), (params["blocks"], cache))
    return _logits(config, params, x), new_cache
