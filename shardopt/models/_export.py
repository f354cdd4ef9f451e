"""Export a decoder as open weights: as a Llama, or with experts as a Mixtral."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardopt.core import calling, value_error
from shardopt.models._decoder_config import DecoderConfig
from shardopt.models._families import FAMILIES
from shardopt.models._fields import Fields
from shardopt.models._inputs import Params
from shardopt.models._places import places_of
from shardopt.models._pretrained import write_weights
from shardopt.nn._memory_layout import split_parts
from shardopt.trace._primitives import words


@calling("export_safetensors")
def export_safetensors(
    directory: str | os.PathLike[str], params: Params, config: DecoderConfig
) -> Path:
    """Write a folder that transformers and `from_pretrained` read: a decoder as a Llama, one with
    experts as a Mixtral.

    Each process writes its own shards. The loads of the last step are not written.

    Args:
      directory: a new or empty folder, which all processes can write to.
      params: the parameters, on one device or sharded.
      config: the description of the model.

    Returns:
      The folder.

    Raises:
      FileExistsError: if the folder has weights already.
      ValueError: if Llama or Mixtral cannot represent the model: for example with a sigmoid router,
        or a shared expert.

    Example:
      >>> import tempfile, jax
      >>> from shardopt.models import from_pretrained, gpt
      >>> config = gpt.config(dim=32, num_layers=2)
      >>> folder = export_safetensors(tempfile.mkdtemp(), gpt.init(config, jax.random.key(0)), config)
      >>> from_pretrained(folder).config.hidden
      96
    """
    hf_config = _described(config, np.dtype(params["embedding"].dtype).name)
    family = FAMILIES[hf_config["model_type"]]
    exported = DecoderConfig(**family.read(Fields(hf_config, family.defaults)))
    _check_same_model(config, exported, hf_config["model_type"])
    return write_weights(
        directory, _unfused(config, params), places_of(exported, family), hf_config
    )


_OF_RUNS = frozenset(
    words(
        "fused loss_chunk logits_dtype recompute_activation sequence_parallel param_dtype dtype "
        "precision loads balance balance_rate z_loss chunk"
    )
)
"""Fields that say how a model is computed and trained, not which one it is."""


def _check_same_model(config: DecoderConfig, exported: DecoderConfig, family: str) -> None:
    """Refuse a model that differs from the one that its config.json describes."""
    values = _mathematics(config)
    exported_values = _mathematics(exported)
    problems = [
        f"{name} is {value!r}, must be {exported_values[name]!r}"
        for name, value in values.items()
        if value != exported_values[name]
    ]
    if problems:
        raise value_error(f"the model is none that {family} can be.", problems)


def _mathematics(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a decoder and its experts that say which model it is."""
    fields = vars(config) | {"num_kv_heads": config.kv_heads}
    experts = config.experts
    if experts is not None:
        has_biases = experts.choice_bias or experts.balance == "bias"
        fields |= experts._asdict() | {"experts": None, "choice_bias": has_biases}
    return {name: value for name, value in fields.items() if name not in _OF_RUNS}


def _unfused(config: DecoderConfig, params: Params) -> Params:
    """Return the parameters of a decoder as a decoder without fused products has them."""
    blocks = params["blocks"]
    attention = dict(blocks["attention"])
    mlp = dict(blocks["mlp"])
    if config.fused == "qkv":
        attention |= dict(zip("qkv", split_parts(attention.pop("qkv")), strict=True))
    elif config.fused == "kv":
        attention["k"], attention["v"] = jnp.split(attention.pop("kv"), 2, axis=-1)
    if config.fused and config.experts is None:
        mlp |= dict(zip(("gate", "up"), split_parts(mlp.pop("up")), strict=True))
    outer = {name: leaf for name, leaf in params.items() if not name.startswith("router_")}
    return outer | {"blocks": blocks | {"attention": attention, "mlp": mlp}}


def _described(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    experts = config.experts
    rope = config.used_kinds[0].rope
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_length,
        "rope_theta": rope.base if rope else None,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
    }
    if config.head_dim is not None:
        fields["head_dim"] = config.head_dim
    if experts is None:
        return fields | {"attention_bias": False, "mlp_bias": False}
    return fields | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": experts.hidden,
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": None,
    }
