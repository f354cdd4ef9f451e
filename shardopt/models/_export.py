"""Export the example models as open weights: a GPT as a Llama, a decoder with experts as a Mixtral."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardopt.core._errors import calling, error_text
from shardopt.models._decoder_config import DecoderConfig
from shardopt.models._families import FAMILIES
from shardopt.models._fields import Fields
from shardopt.models._inputs import Params
from shardopt.models._places import places_of
from shardopt.models._pretrained import write_weights
from shardopt.models.gpt import GPTConfig
from shardopt.models.moe import MoEConfig
from shardopt.nn._memory_layout import split_parts


@calling("export_safetensors")
def export_safetensors(
    directory: str | os.PathLike[str], params: Params, config: GPTConfig | MoEConfig
) -> Path:
    """Write a folder that transformers and `from_pretrained` read: a GPT as a Llama, a moe as a
    Mixtral.

    Each process writes its own shards. The loads of a moe's last step are not written.

    Args:
      directory: a new or empty folder, which all processes can write to.
      params: the parameters, on one device or sharded.
      config: the shape of the model.

    Returns:
      The folder.

    Raises:
      FileExistsError: if the folder has weights already.
      ValueError: if Mixtral cannot represent a moe: for example with a sigmoid router, biases or a
        shared expert.

    Example:
      >>> import tempfile, jax
      >>> from shardopt.models import from_pretrained, gpt
      >>> config = gpt.GPTConfig(dim=32, num_layers=2)
      >>> folder = export_safetensors(tempfile.mkdtemp(), gpt.init(config, jax.random.key(0)), config)
      >>> from_pretrained(folder).config.hidden
      96
    """
    hf_config = _described(config, np.dtype(params["embedding"].dtype).name)
    family = FAMILIES[hf_config["model_type"]]
    places = places_of(DecoderConfig(**family.read(Fields(hf_config, family.defaults))), family)
    return write_weights(directory, _unfused(config.decoder, params), places, hf_config)


def _unfused(config: DecoderConfig, params: Params) -> Params:
    """Return the parameters of a decoder with fused products as parameters without."""
    blocks = params["blocks"]
    attention, mlp = dict(blocks["attention"]), dict(blocks["mlp"])
    if config.fused == "qkv":
        attention |= dict(zip("qkv", split_parts(attention.pop("qkv")), strict=True))
    else:
        attention["k"], attention["v"] = jnp.split(attention.pop("kv"), 2, axis=-1)
    if config.experts is None:
        mlp |= dict(zip(("gate", "up"), split_parts(mlp.pop("up")), strict=True))
    outer = {name: leaf for name, leaf in params.items() if not name.startswith("router_")}
    return outer | {"blocks": blocks | {"attention": attention, "mlp": mlp}}


def _described(config: GPTConfig | MoEConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json; refuse a model that Mixtral cannot represent."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_base,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
    }
    if isinstance(config, GPTConfig):
        return fields | {"attention_bias": False, "mlp_bias": False}
    defaults = MoEConfig()
    fixed_fields = ("shared_hidden", "score", "normalize", "groups", "scale", "latent")
    problems = [
        f"{name} is {getattr(config, name)!r}, must be {getattr(defaults, name)!r}"
        for name in fixed_fields
        if getattr(config, name) != getattr(defaults, name)
    ]
    if config.balance == "bias":
        problems.append("balance is 'bias', and Mixtral's router has none")
    if problems:
        raise ValueError(error_text("the model is none that Mixtral can be.", problems))
    return fields | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_key_value_heads": config.kv_heads,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "rms_norm_eps": config.norm_epsilon,
        "sliding_window": None,
    }
