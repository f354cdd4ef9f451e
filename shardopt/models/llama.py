"""The GPT as a Llama of Hugging Face: names of tensors, and config.json.

The GPT is a Llama with as many key heads as query heads: RMS norms of 1e-6, SwiGLU, rotary positions on the two halves
of a head, no biases. Only names and the order of dims differ: there a weight is [out, in], and every block has its own.
"""

from pathlib import Path
from typing import Any, NamedTuple

from shardopt.core.errors import format_error
from shardopt.models.gpt import GPTConfig

_EPSILON = 1e-6


class Place(NamedTuple):
    """Where a model has a tensor of a file: `leaf[at]`, in blocks transposed; and the shape of the tensor."""

    path: str
    at: tuple[int | slice, ...]
    shape: tuple[int, ...]


def tensor_places(config: GPTConfig) -> dict[str, Place]:
    """Return where the GPT has each tensor."""
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
    """Return what config.json says."""
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


def config_of(folder: Path, said: dict[str, Any]) -> GPTConfig:
    """Return the shape that a config.json describes, or refuse it with every reason."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [f"{name} is missing" for name in sizes if not isinstance(said.get(name), int)]:
        raise ValueError(format_error("import_safetensors", f"{folder / 'config.json'} describes no Llama.", missing))
    dim, hidden, layers, heads, vocab = (said[name] for name in sizes)
    rope = said.get("rope_parameters") or {}
    wanted = {
        "model_type": ("llama", said.get("model_type")),
        "num_key_value_heads": (heads, said.get("num_key_value_heads", heads)),
        "head_dim": (dim // heads, said.get("head_dim") or dim // heads),
        "hidden_act": ("silu", said.get("hidden_act", "silu")),
        "rms_norm_eps": (_EPSILON, said.get("rms_norm_eps", _EPSILON)),
        "attention_bias": (False, said.get("attention_bias", False)),
        "mlp_bias": (False, said.get("mlp_bias", False)),
        "rope_scaling": (None, said.get("rope_scaling")),
        "rope_type": ("default", rope.get("rope_type", "default")),
    }
    wrong = [f"{name} is {found!r}, must be {want!r}" for name, (want, found) in wanted.items() if found != want]
    if hidden % dim:
        wrong += [f"intermediate_size is {hidden}, must be a multiple of hidden_size {dim}"]
    if wrong:
        raise ValueError(format_error("import_safetensors", f"{folder} holds a model that gpt cannot be.", wrong))
    return GPTConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        mlp_multiple=hidden // dim,
        max_length=said.get("max_position_embeddings", 1024),
        rope_base=said.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        tied=said.get("tie_word_embeddings", False),
    )
