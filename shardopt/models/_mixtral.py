"""Convert the decoder with experts to and from a Mixtral of Hugging Face: tensor names and config.json.

A Mixtral weight is [out, in], and every block and every expert has its own weights. w1 is the gate product, w3 the up product
and w2 the down product.
"""

from pathlib import Path
from typing import Any

from shardopt.core._errors import format_error
from shardopt.models._llama import Place
from shardopt.models.moe import MoEConfig


def tensor_places(config: MoEConfig) -> dict[str, Place]:
    """Return the place of each tensor in the decoder."""
    D, F, V, E, K = config.dim, config.hidden, config.vocab_size, config.num_experts, config.head_dim
    queries, keys, all_indices = config.num_heads * K, config.kv_heads * K, slice(None)
    places = {"embed_tokens": Place("embedding", (), (V, D)), "norm": Place("norm", (), (D,))}
    for i in range(config.num_layers):
        attention, mixture = f"layers.{i}.self_attn", f"layers.{i}.block_sparse_moe"
        places[f"layers.{i}.input_layernorm"] = Place("blocks/attention/norm", (i,), (D,))
        places[f"layers.{i}.post_attention_layernorm"] = Place("blocks/router/norm", (i,), (D,))
        places[f"{attention}.q_proj"] = Place("blocks/attention/q", (i,), (queries, D))
        for name, half in (("k", slice(0, K)), ("v", slice(K, 2 * K))):
            places[f"{attention}.{name}_proj"] = Place(
                "blocks/attention/kv", (i, all_indices, all_indices, half), (keys, D)
            )
        places[f"{attention}.o_proj"] = Place("blocks/attention/out", (i,), (D, queries))
        places[f"{mixture}.gate"] = Place("blocks/router/kernel", (i,), (E, D))
        for e in range(E):
            for name, leaf in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                shape = (D, F) if leaf == "down" else (F, D)
                places[f"{mixture}.experts.{e}.{name}"] = Place(f"blocks/experts/{leaf}", (i, e), shape)
    head = {} if config.tied else {"lm_head.weight": Place("head", (), (V, D))}
    return {f"model.{name}.weight": place for name, place in places.items()} | head


def described(config: MoEConfig, dtype: str) -> dict[str, object]:
    """Return the content of config.json; refuse a model that Mixtral cannot represent."""
    defaults = MoEConfig()
    fixed_fields = ("shared_hidden", "score", "normalize", "groups", "scale", "capacity_factor", "latent")
    problems = [
        f"{name} is {getattr(config, name)!r}, must be {getattr(defaults, name)!r}"
        for name in fixed_fields
        if getattr(config, name) != getattr(defaults, name)
    ]
    if config.balance == "bias":
        problems.append("balance is 'bias', and Mixtral's router has none")
    if problems:
        raise ValueError(format_error("export_safetensors", "the model is none that Mixtral can be.", problems))
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
    }


def config_of(folder: Path, hf_config: dict[str, Any]) -> MoEConfig:
    """Return the config that a config.json describes; refuse it with all reasons if the model cannot be it."""
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_local_experts",
        "num_experts_per_tok",
        "vocab_size",
    )
    if missing := [f"{name} is missing" for name in sizes if not isinstance(hf_config.get(name), int)]:
        raise ValueError(format_error("import_safetensors", f"{folder / 'config.json'} describes no Mixtral.", missing))
    dim, hidden, layers, heads, experts, top_k, vocab = (hf_config[name] for name in sizes)
    rope = hf_config.get("rope_parameters") or {}
    required = {
        "head_dim": (dim // heads, hf_config.get("head_dim") or dim // heads),
        "hidden_act": ("silu", hf_config.get("hidden_act", "silu")),
        "sliding_window": (None, hf_config.get("sliding_window")),
        "rope_scaling": (None, hf_config.get("rope_scaling")),
        "rope_type": ("default", rope.get("rope_type", "default")),
    }
    problems = [
        f"{name} is {actual!r}, must be {required_value!r}"
        for name, (required_value, actual) in required.items()
        if actual != required_value
    ]
    if problems:
        raise ValueError(format_error("import_safetensors", f"{folder} holds a model that moe cannot be.", problems))
    return MoEConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf_config.get("num_key_value_heads"),
        num_experts=experts,
        top_k=top_k,
        hidden=hidden,
        balance=None,
        max_length=hf_config.get("max_position_embeddings", 1024),
        rope_base=float(hf_config.get("rope_theta") or rope.get("rope_theta", 1e6)),
        norm_epsilon=hf_config.get("rms_norm_eps", 1e-5),
        tied=hf_config.get("tie_word_embeddings", False),
    )
