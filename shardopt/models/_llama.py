"""Convert the GPT to and from a Llama of Hugging Face: tensor names and config.json.

The GPT is a Llama with as many key heads as query heads: RMS norms of 1e-6, SwiGLU, rotary positions on the two halves of a
head, no biases. Only names and the order of dims differ: a Llama weight is [out, in], and every block has its own weights.
"""

from pathlib import Path
from typing import Any, NamedTuple

from shardopt.core._errors import format_error
from shardopt.models.gpt import GPTConfig

_EPSILON = 1e-6


class Place(NamedTuple):
    """The place of a file's tensor in a model.

    Attributes:
      path: the leaf of the model.
      leaf_index: the tensor is `leaf[leaf_index]`; inside blocks it is transposed.
      shape: the shape of the tensor in the file.
    """

    path: str
    leaf_index: tuple[int | slice, ...]
    shape: tuple[int, ...]


def tensor_places(config: GPTConfig) -> dict[str, Place]:
    """Return the place of each tensor in the GPT."""
    D, F, V = config.dim, config.hidden, config.vocab_size
    places = {"embed_tokens": Place("embedding", (), (V, D)), "norm": Place("norm", (), (D,))}
    for i in range(config.num_layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        places[f"layers.{i}.input_layernorm"] = Place("blocks/attention/norm", (i,), (D,))
        places[f"layers.{i}.post_attention_layernorm"] = Place("blocks/mlp/norm", (i,), (D,))
        for c, name in enumerate("qkv"):
            places[f"{attention}.{name}_proj"] = Place("blocks/attention/qkv", (i, slice(None), c), (D, D))
        places[f"{attention}.o_proj"] = Place("blocks/attention/out", (i,), (D, D))
        for c, name in enumerate(("gate", "up")):
            places[f"{mlp}.{name}_proj"] = Place("blocks/mlp/up", (i, slice(None), c), (F, D))
        places[f"{mlp}.down_proj"] = Place("blocks/mlp/down", (i,), (D, F))
    head = {} if config.tied else {"lm_head.weight": Place("head", (), (V, D))}
    return {f"model.{name}.weight": place for name, place in places.items()} | head


def described(config: GPTConfig, dtype: str) -> dict[str, object]:
    """Return the content of config.json."""
    return {
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
        "rms_norm_eps": _EPSILON,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def config_of(folder: Path, hf_config: dict[str, Any]) -> GPTConfig:
    """Return the config that a config.json describes; refuse it with all reasons if the model cannot be it."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [f"{name} is missing" for name in sizes if not isinstance(hf_config.get(name), int)]:
        raise ValueError(format_error("import_safetensors", f"{folder / 'config.json'} describes no Llama.", missing))
    dim, hidden, layers, heads, vocab = (hf_config[name] for name in sizes)
    rope = hf_config.get("rope_parameters") or {}
    required = {
        "model_type": ("llama", hf_config.get("model_type")),
        "num_key_value_heads": (heads, hf_config.get("num_key_value_heads", heads)),
        "head_dim": (dim // heads, hf_config.get("head_dim") or dim // heads),
        "hidden_act": ("silu", hf_config.get("hidden_act", "silu")),
        "rms_norm_eps": (_EPSILON, hf_config.get("rms_norm_eps", _EPSILON)),
        "attention_bias": (False, hf_config.get("attention_bias", False)),
        "mlp_bias": (False, hf_config.get("mlp_bias", False)),
        "rope_scaling": (None, hf_config.get("rope_scaling")),
        "rope_type": ("default", rope.get("rope_type", "default")),
    }
    problems = [
        f"{name} is {actual!r}, must be {required_value!r}"
        for name, (required_value, actual) in required.items()
        if actual != required_value
    ]
    if hidden % dim:
        problems += [f"intermediate_size is {hidden}, must be a multiple of hidden_size {dim}"]
    if problems:
        raise ValueError(format_error("import_safetensors", f"{folder} holds a model that gpt cannot be.", problems))
    return GPTConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        mlp_multiple=hidden // dim,
        max_length=hf_config.get("max_position_embeddings", 1024),
        rope_base=hf_config.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        tied=hf_config.get("tie_word_embeddings", False),
    )
