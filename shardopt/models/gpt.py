"""A decoder-only GPT: rotary positions, RMS norm, SwiGLU, and products that are fused where they
can be.
"""

from typing import Any

from shardopt.models import decoder
from shardopt.models._decoder_config import BlockKind, DecoderConfig
from shardopt.models._rope import Rope

init = decoder.init
model = decoder.model
logits_of = decoder.logits_of
num_parameters = decoder.num_parameters


def config(
    vocab_size: int = 256,
    dim: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    *,
    mlp_multiple: int = 3,
    rope_base: float = 10_000.0,
    **fields: Any,
) -> DecoderConfig:
    """Return the description of a GPT, for `init`, `model` and the other functions of
    `shardopt.models`.

    Args:
      vocab_size: number of token ids; 256 for bytes.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: attention heads; each has dim / num_heads components, an even number.
      mlp_multiple: hidden units of the mlp, in multiples of `dim`.
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi.
      **fields: other fields of `decoder.DecoderConfig`, such as `tied`, `dtype` and `max_length`.

    Raises:
      ValueError: if sizes do not fit together, or a choice is unknown.

    Example:
      >>> import jax
      >>> from shardopt.models import gpt
      >>> small = gpt.config(dim=32, num_layers=2)
      >>> params = gpt.init(small, jax.random.key(0))
      >>> params["blocks"]["attention"]["qkv"].shape
      (2, 32, 3, 4, 8)
    """
    return DecoderConfig(
        vocab_size,
        dim,
        num_layers,
        num_heads,
        hidden=mlp_multiple * dim,
        kinds=(BlockKind(rope=Rope(base=rope_base)),),
        fused="qkv",
        **fields,
    )


rules = decoder.rules(config())
"""Tensor rules that shard heads, hidden units and the vocabulary; each block then needs two
all-reduces over the axis.

The first product of attention and mlp is sharded by column, the second by row (Shoeybi, Patwary,
Puri, LeGresley, Casper and Catanzaro, "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", 2019, section 3). Specs are for one block, without the stacked dim.
The rules match below a prefix such as "base/" too. """

matrices = decoder.matrices(config())
"""The leaves that `so.optimizers` treats as matrices: the products of the blocks.

Queries, keys and values are separate matrices, and so are gate and up. AdamW updates embedding,
head and norms, as in Jordan et al., "Muon", 2024. """
