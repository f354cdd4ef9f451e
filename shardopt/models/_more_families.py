"""More families of open models as data: dense and with experts, in the blocks of Llama."""

from typing import Any

from shardopt.models import _families as base
from shardopt.models._decoder_config import BlockKind, Experts
from shardopt.models._families import Family
from shardopt.models._fields import Fields


def kinds_of(blocks: list[BlockKind]) -> dict[str, Any]:
    """Return `kinds` and `pattern` of a `DecoderConfig` from the kind of each block."""
    kinds = tuple(dict.fromkeys(blocks))
    return {"kinds": kinds, "pattern": tuple(map(kinds.index, blocks)) if len(kinds) > 1 else ()}


def _smollm3(fields: Fields) -> dict[str, Any]:
    L, every = fields.size("num_hidden_layers"), fields["no_rope_layer_interval"]
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    rotates = fields["no_rope_layers"] or [(i + 1) % every != 0 for i in range(L)]
    types = fields["layer_types"] or ["full_attention" if has_rope else "sliding_attention" for has_rope in rotates]
    rope = base.rope(fields)
    blocks = [
        BlockKind(window if kind == "sliding_attention" else None, rope if has_rope else None)
        for kind, has_rope in zip(types, rotates, strict=True)
    ]
    return base.llama(fields) | kinds_of(blocks)


def _gemma(fields: Fields) -> dict[str, Any]:
    fields.require("use_bidirectional_attention", None, False)
    fields.require("hidden_activation", None, "gelu_pytorch_tanh")
    fields.require("hidden_act", "gelu", "gelu_pytorch_tanh")  # both are the approximation by tanh
    bias = bool(fields["attention_bias"])
    return {
        **base.sizes(fields),
        **fields.kinds(None, None, lambda kind: base.rope(fields, kind)),
        "activation": "gelu_tanh",
        "norm": "rms_plus_one",
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_scale": fields.size("hidden_size") ** 0.5,
    }


def _olmo3(fields: Fields) -> dict[str, Any]:
    L = fields.size("num_hidden_layers")
    types = fields["layer_types"] or ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(L)]

    def rope(kind: str) -> Any:
        changes = {"rope_scaling": {}} if kind == "sliding_attention" else {}
        return fields.rope(base.head_dim(fields), kind, **changes)

    return base.olmo2(fields) | fields.kinds(types, fields["sliding_window"], rope)


def _exaone4(fields: Fields) -> dict[str, Any]:
    L, window, types = fields.size("num_hidden_layers"), fields["sliding_window"], fields["layer_types"]
    every = fields["sliding_window_pattern"]
    if window is None:
        types = None
    elif types is None and isinstance(every, int):
        types = ["full_attention" if (i + 1) % every == 0 or i == L - 1 else "sliding_attention" for i in range(L)]
    elif types is None:
        fields.problems.append(f"sliding_window_pattern is {every!r}, must be an integer if there are no layer_types")
    hides_positions = types is not None  # blocks that see all rotate nothing, next to blocks with windows
    kinds = fields.kinds(
        types, window, lambda kind: None if hides_positions and kind == "full_attention" else base.rope(fields, kind)
    )
    return base.sizes(fields) | kinds | {"pre_norms": False, "post_norms": True, "qk_norm": "head"}


def _seed_oss(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {"out_bias": bool(fields["attention_out_bias"])}


def _arcee(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {"gated": False}


def _glm(fields: Fields) -> dict[str, Any]:
    rope = fields.rope(base.head_dim(fields), interleaved=True)
    return base.sizes(fields) | {"kinds": (BlockKind(rope=rope),), "qkv_bias": bool(fields["attention_bias"])}


def _glm4(fields: Fields) -> dict[str, Any]:
    return _glm(fields) | {"post_norms": True}


def _ernie(fields: Fields) -> dict[str, Any]:
    rope, bias = fields.rope(base.head_dim(fields), interleaved=True), bool(fields["use_bias"])
    return base.sizes(fields) | {"kinds": (BlockKind(rope=rope),), "qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


def _stablelm(fields: Fields) -> dict[str, Any]:
    fields.require("qk_layernorm", False)
    norm = {
        "parallel": "norm" if fields["use_parallel_residual"] else None,
        "norm": "layer",
        "norm_epsilon": fields["layer_norm_eps"],
        "qkv_bias": bool(fields["use_qkv_bias"]),
    }
    return base.sizes(fields) | fields.kinds(None, None, lambda kind: base.rope(fields, kind)) | norm


def _starcoder2(fields: Fields) -> dict[str, Any]:
    fields.require("mlp_type", None, "default")
    fields.require("norm_type", None, "layer_norm")
    bias = bool(fields["use_bias"])
    changes = {"norm": "layer", "norm_epsilon": fields["norm_epsilon"], "gated": False}
    return base.mistral(fields) | changes | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


def olmoe(fields: Fields) -> dict[str, Any]:
    fields.require("clip_qkv", None)
    number = fields.size("num_experts" if fields["num_experts"] is not None else "num_local_experts")
    hidden, normalize = fields.size("intermediate_size"), bool(fields["norm_topk_prob"])
    experts = Experts(number, fields.size("num_experts_per_tok"), hidden, normalize=normalize)
    return base.llama(fields) | {"qk_norm": "all", "experts": experts}


_DEFAULTS = base.LLAMA_DEFAULTS
_GLM_DEFAULTS = _DEFAULTS | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
NORM_BIASES = {
    "input_layernorm.bias": "attention/norm_bias",
    "post_attention_layernorm.bias": "mlp/norm_bias",
}
LAYER_NORM_OUTER = base.OUTER | {"model.norm.bias": "norm_bias"}
_FUSED_MLP = {"mlp.gate_up_proj.weight": ("mlp/gate", "mlp/up"), "mlp.down_proj.weight": "mlp/down"}
_GLM_BLOCK = base.QKV | {"self_attn.o_proj.weight": "attention/out"} | _FUSED_MLP
_GLM4_NORMS = base.PRE_NORMS | {
    "post_self_attn_layernorm.weight": "attention/post_norm",
    "post_mlp_layernorm.weight": "mlp/post_norm",
}
_STARCODER2_MLP = {
    f"mlp.{name}.{kind}": f"mlp/{leaf}{suffix}"
    for name, leaf in (("c_fc", "up"), ("c_proj", "down"))
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}

FAMILIES: dict[str, Family] = base.FAMILIES | {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _DEFAULTS
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        _smollm3,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _DEFAULTS
        | {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        _gemma,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        _olmo3,
        base.OUTER,
        base.POST_NORM_BLOCK,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _DEFAULTS
        | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        _exaone4,
        base.OUTER,
        base.POST_NORM_BLOCK,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _DEFAULTS
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True},
        _seed_oss,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        _DEFAULTS | {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        _arcee,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "glm": Family("GlmForCausalLM", _GLM_DEFAULTS, _glm, base.OUTER, base.PRE_NORMS | _GLM_BLOCK),
    "glm4": Family("Glm4ForCausalLM", _GLM_DEFAULTS, _glm4, base.OUTER, _GLM4_NORMS | _GLM_BLOCK),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        _DEFAULTS
        | {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        _ernie,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        _DEFAULTS
        | {
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "partial_rotary_factor": 0.25,
        },
        _stablelm,
        LAYER_NORM_OUTER,
        base.LLAMA_BLOCK | NORM_BIASES,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _DEFAULTS
        | {
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        _starcoder2,
        LAYER_NORM_OUTER,
        base.PRE_NORMS | base.QKV | base.OUT | _STARCODER2_MLP | NORM_BIASES,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _DEFAULTS
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64},
        olmoe,
        base.OUTER,
        base.QWEN3_MOE_BLOCK | base.experts_of("mlp.experts", *base.PROJECTIONS),
    ),
}
"""model_type of config.json -> family."""
