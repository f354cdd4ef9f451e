"""A decoder-only GPT: rotary positions, RMS norm, SwiGLU, and products that are fused where they
can be.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.core._errors import format_error, plural
from shardopt.core._rounding import Precision
from shardopt.low_precision._numbers import check_precision
from shardopt.models import decoder
from shardopt.models._decoder_config import BlockKind, DecoderConfig, not_positive
from shardopt.models._inputs import Params, Tokens
from shardopt.models._rope import Rope


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
      dtype: dtype of activations and products; None is the dtype of the parameters that the loss
        gets.
      logits_dtype: the dtype of the logits in the loss, as in `so.nn.cross_entropy`.
      precision: precision of products with block weights: "int8" or "fp8" as in
        `so.nn.quantized_einsum`; None is `dtype`.

    Raises:
      ValueError: if a size is not positive, `num_heads` does not divide `dim`, heads have odd
        width, or the precision is unknown.
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
    logits_dtype: DTypeLike | None = None
    precision: Precision | None = None

    def __post_init__(self):
        check_precision("GPTConfig", self.precision)
        problems = not_positive(
            self,
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "mlp_multiple",
            "max_length",
            "rope_base",
        )
        if not problems and self.dim % (2 * self.num_heads):
            problems = [
                f"dim={self.dim} cannot be cut into num_heads={self.num_heads} of even width"
            ]
        if problems:
            fix = "choose positive sizes, and dim a multiple of 2 * num_heads."
            raise ValueError(
                format_error(
                    "GPTConfig", f"{plural(len(problems), 'size')} cannot be used.", problems, fix
                )
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def hidden(self) -> int:
        """Hidden units of the mlp."""
        return self.mlp_multiple * self.dim

    @property
    def decoder(self) -> DecoderConfig:
        """The GPT as a decoder."""
        names = ("vocab_size", "dim", "num_layers", "num_heads", "hidden", "max_length", "tied")
        dtypes = ("param_dtype", "dtype", "logits_dtype", "precision")
        kinds = (BlockKind(rope=Rope(base=self.rope_base)),)
        return DecoderConfig(
            **{name: getattr(self, name) for name in names + dtypes}, kinds=kinds, fused="qkv"
        )


rules = decoder.rules(GPTConfig().decoder)
"""Tensor rules that shard heads, hidden units and the vocabulary; each block then needs two
all-reduces over the axis.

The first product of attention and mlp is sharded by column, the second by row (Shoeybi, Patwary,
Puri, LeGresley, Casper and Catanzaro, "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", 2019, section 3). Specs are for one block, without the stacked dim.
The rules match below a prefix such as "base/" too. """

matrices = decoder.matrices(GPTConfig().decoder)
"""The leaves that `so.optimizers` treats as matrices: the products of the blocks.

Queries, keys and values are separate matrices, and so are gate and up. AdamW updates embedding,
head and norms, as in Jordan et al., "Muon", 2024. """


def init(config: GPTConfig, rng: jax.Array) -> Params:
    """Return random normal parameters, so that the loss starts at the loss of a uniform guess.

    Norms are ones.

    The standard deviation is 0.02; it is 0.02 / sqrt(2 num_layers) for the last product of each
    branch, and 1 / dim for a tied embedding.

    Args:
      config: the shape of the model, L blocks of width D with H heads of width K and F hidden
        units.
      rng: a jax random key.

    Returns:
      A dict with "embedding" [V, D], "norm" [D], and "head" [V, D] unless tied. Its "blocks" have
      "attention/norm" [L, D], "attention/qkv" [L, D, 3, H, K], "attention/out" [L, H, K, D],
      "mlp/norm" [L, D], "mlp/up" [L, D, 2, F] and "mlp/down" [L, F, D].

    Example:
      >>> import jax
      >>> config = GPTConfig(dim=32, num_layers=2)
      >>> params = init(config, jax.random.key(0))
      >>> params["blocks"]["attention"]["qkv"].shape
      (2, 32, 3, 4, 8)
      >>> sum(leaf.size for leaf in jax.tree.leaves(params)) == num_parameters(config)
      True
    """
    return decoder.init(config.decoder, rng)


def num_parameters(config: GPTConfig) -> int:
    """Return the number of parameters: V D (twice if untied) + L (4 D^2 + 3 D F + 2 D) + D."""
    return decoder.num_parameters(config.decoder)


def model(config: GPTConfig, *, remat: Remat = None) -> BlockModel:
    """Return the GPT as a `BlockModel`.

    Its loss is the mean cross-entropy of the next token, in nats.

    Args:
      config: the shape of the model.
      remat: what the backward pass recomputes, as in `BlockModel`; blocks name the same values as
        `decoder.model`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> config = GPTConfig(dim=32, num_layers=2)
      >>> params = init(config, jax.random.key(0))
      >>> loss = jax.jit(model(config).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05)
      True

    A batch is the same as for `decoder.model`.
    """
    return decoder.block_model(config.decoder, remat, "gpt")


def logits_of(config: GPTConfig, params: Params, tokens: Tokens) -> Float[Array, "B T V"]:
    """Return the logits after each token.

    Args:
      config: the shape of the model.
      params: the parameters, on one device or sharded.
      tokens: [B, T], token ids.

    Returns:
      [B, T, V], in float32 at least.
    """
    return decoder.logits_of(config.decoder, params, tokens)
