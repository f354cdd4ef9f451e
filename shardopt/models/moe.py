"""A decoder whose blocks have a mixture of experts instead of the mlp.

It can be like Mixtral, or like DeepSeek-V3 with a sigmoid router and a shared expert.
"""

from typing import Any

from jax.sharding import PartitionSpec as P

from shardopt.models import decoder
from shardopt.models._decoder_config import Balance, BlockKind, DecoderConfig, ExpertsConfig
from shardopt.models._rope import Rope

init = decoder.init
model = decoder.model
logits_of = decoder.logits_of
num_parameters = decoder.num_parameters

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

_RATES = {"bias": 1e-3, "loss": 1e-2, "sequence_loss": 1e-4}


def config(
    vocab_size: int = 256,
    dim: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    hidden: int = 384,
    balance: Balance | None = "bias",
    balance_rate: float | None = None,
    rope_base: float = 10_000.0,
    **fields: Any,
) -> DecoderConfig:
    """Return the description of a decoder with experts, for `init`, `model` and the other functions
    of `shardopt.models`.

    Args:
      vocab_size: number of token ids; 256 for bytes.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: attention heads.
      num_experts: experts of each block.
      top_k: how many experts each token goes through.
      hidden: hidden units of an expert.
      balance: how experts are balanced. "bias": by `so.nn.update_router_bias`, without a loss.
        "loss": by a loss over the global batch; it does not work with micro-batches and pipelines.
        "sequence_loss": by a loss of each row; it does not work with a context axis, which splits
        rows. None: not at all.
      balance_rate: the rate of the biases, or the factor of the loss. None is 0.001 for "bias",
        0.01 for "loss" and 0.0001 for "sequence_loss".
      rope_base: the longest wavelength of the rotary positions, divided by 2 pi.
      **fields: other fields of `decoder.ExpertsConfig`, such as `shared_hidden`, `score` and
        `z_loss`, and of `decoder.DecoderConfig`, such as `num_kv_heads`, `latent` and `dtype`.
        DeepSeek-V3 has `latent=decoder.LatentConfig(query=1536, key=512, nope=128, rope=64,
        value=128)`.

    Raises:
      ValueError: if sizes do not fit together, or a choice is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardopt.models import moe
      >>> small = moe.config(dim=32, num_layers=2, num_experts=4, hidden=16)
      >>> params = moe.init(small, jax.random.key(0))
      >>> params["blocks"]["experts"]["up"].shape
      (2, 4, 32, 16)
      >>> loss, aux = jax.jit(moe.model(small).loss_fn)(params, {"tokens": jnp.arange(68).reshape(4, 17)})
      >>> bool(abs(loss - jnp.log(256)) < 0.05), aux["routers"].values["router_load"].shape
      (True, (2, 4))

    Give strategies `rules=moe.rules`. The loss is the mean cross-entropy of the next token in nats,
    plus balance terms. It returns `so.losses.Updated` with "router_load", each expert's share of
    the choices in this step, and with "router_bias". Metrics:

    - "cross_entropy", without the balance terms;
    - "load_imbalance" of the previous step: the load of the busiest expert over the mean, averaged
      over blocks; 1 if balanced;
    - "router_entropy" of the previous step: the entropy of the loads in nats over log(E); 1 if
      balanced.

    **Equivalence**: exact on any mesh, with micro-batches and in pipelines. balance="loss" needs
    the whole batch at once, and is refused there. In a pipeline a batch with weights cannot have a
    balance loss, since a pipeline takes only one term.

    References:
      Jiang et al., "Mixtral of Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1. Two
      parts of DeepSeek-V3 are left out: the prediction of a second token, and yarn.
    """
    of_experts = {name: fields.pop(name) for name in ExpertsConfig._fields if name in fields}
    rate = _RATES.get(balance or "", 0.0) if balance_rate is None else balance_rate
    return DecoderConfig(
        vocab_size,
        dim,
        num_layers,
        num_heads,
        kinds=(BlockKind(rope=Rope(base=rope_base)),),
        fused="kv",
        experts=ExpertsConfig(
            num_experts, top_k, hidden, loads=True, balance=balance, balance_rate=rate, **of_experts
        ),
        **fields,
    )
