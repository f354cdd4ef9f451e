"""Families whose blocks are not Llama's: scaled or parallel branches, layer norms, gated experts. `UNFIT` has types that are no family."""

from typing import Any

from shardopt.models import _families as base
from shardopt.models import _more_families as more
from shardopt.models._decoder_config import BlockKind, Experts
from shardopt.models._families import Family
from shardopt.models._fields import Fields
from shardopt.models._rope import Rope


def _granite(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {
        "embedding_scale": float(fields["embedding_multiplier"]),
        "branch_scale": float(fields["residual_multiplier"]),
        "attention_scale": float(fields["attention_multiplier"] or base.head_dim(fields) ** -0.5),
        "logits_scale": 1 / float(fields["logits_scaling"]),
    }


def _hyperclovax(fields: Fields) -> dict[str, Any]:
    changes = {"post_norms": bool(fields["use_post_norm"]), "logits_scale": float(fields["logits_scaling"])}
    return _granite(fields) | changes


def _layer_norms(fields: Fields, epsilon: str = "layer_norm_eps") -> dict[str, Any]:
    return {"norm": "layer", "norm_epsilon": fields[epsilon]}


def _nemotron(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {"norm": "layer_plus_one", "norm_epsilon": fields["norm_eps"], "gated": False}


def _jais2(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | _layer_norms(fields) | {"gated": False}


def _olmo(fields: Fields) -> dict[str, Any]:
    fields.require("clip_qkv", None)
    return base.llama(fields) | {"norm": "layer_fixed", "norm_epsilon": 1e-5}


def _cohere(fields: Fields) -> dict[str, Any]:
    fields.require("use_qk_norm", None, False)
    changes = {"norm": "layer_scale", "parallel": "norm", "logits_scale": float(fields["logit_scale"])}
    bias, rope = bool(fields["attention_bias"]), fields.rope(base.head_dim(fields), interleaved=True)
    biases = {"qkv_bias": bias, "out_bias": bias}
    return base.sizes(fields) | _layer_norms(fields) | changes | biases | {"kinds": (BlockKind(rope=rope),)}


def _cohere2(fields: Fields) -> dict[str, Any]:
    for name, value in {"use_gated_activation": True, "use_parallel_block": True, "rotary_pct": 1.0}.items():
        fields.require(name, None, value)
    fields.require("position_embedding_type", None, "rope_gptj")
    fields.skip("use_parallel_embedding", "use_embedding_sharing", "order_of_interleaved_layers", "layer_switch")
    every, L = fields["sliding_window_pattern"], fields.size("num_hidden_layers")
    types = fields["layer_types"] or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(L)
    ]
    rope = fields.rope(base.head_dim(fields), interleaved=True)
    kinds = fields.kinds(types, fields["sliding_window"], lambda kind: None if kind == "full_attention" else rope)
    return _cohere(fields) | kinds


def _phi(fields: Fields) -> dict[str, Any]:
    fields.require("qk_layernorm", False)
    changes = {"parallel": "norm", "gated": False, "head_bias": True}
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    kinds = fields.kinds(None, None, lambda kind: base.rope(fields, kind))
    return base.sizes(fields) | kinds | _layer_norms(fields) | changes | biases


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    bias = bool(fields["attention_bias"])
    old = {"rope_theta": fields["rotary_emb_base"], "partial_rotary_factor": fields["rotary_pct"]}
    changes = {
        "parallel": "input" if fields["use_parallel_residual"] else None,
        "gated": False,
        "num_kv_heads": None,
        "kinds": (BlockKind(rope=fields.rope(base.head_dim(fields), **old)),),
    }
    fields.skip("classifier_dropout", "num_key_value_heads")
    return base.sizes(fields) | _layer_norms(fields) | changes | {"qkv_bias": bias, "out_bias": bias, "mlp_bias": True}


def _falcon(fields: Fields) -> dict[str, Any]:
    for name, value in {"multi_query": True, "new_decoder_architecture": False, "alibi": False, "bias": False}.items():
        fields.require(name, value)
    fields.require("num_ln_in_parallel_attn", None)
    fields.skip("num_kv_heads")  # of the new architecture
    return base.sizes(fields, fields["ffn_hidden_size"] or 4 * fields.size("hidden_size")) | {
        "num_kv_heads": 1,
        "activation": fields.choice("activation", base.ACTIVATIONS),
        "gated": False,
        "parallel": "norm" if fields["parallel_attn"] else None,
        **_layer_norms(fields, "layer_norm_epsilon"),
        **fields.kinds(None, None, lambda kind: base.rope(fields, kind)),
    }


def _helium(fields: Fields) -> dict[str, Any]:
    rope = fields.rope(base.head_dim(fields), interleaved=True)
    return base.llama(fields) | {"kinds": (BlockKind(rope=rope),), "out_bias": False}


def _ministral(fields: Fields) -> dict[str, Any]:
    return _windows(fields, base.mistral(fields), [])


def _cwm(fields: Fields) -> dict[str, Any]:
    L = fields.size("num_hidden_layers")
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(L)]
    return _windows(fields, base.mistral(fields) | {"mlp_bias": bool(fields["mlp_bias"])}, types)


def _windows(fields: Fields, config: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Return a config with windows by the type of each block; without types all blocks have the window."""
    return config | fields.kinds(
        fields["layer_types"] or types or None, fields["sliding_window"], lambda kind: base.rope(fields, kind)
    )


def _hunyuan(fields: Fields) -> dict[str, Any]:
    scaling, width = fields["rope_scaling"] or fields["rope_parameters"] or {}, base.head_dim(fields)
    kind, alpha = scaling.get("rope_type", scaling.get("type")), scaling.get("alpha")
    if kind == "dynamic" and alpha:  # alpha alone counts, in rows of any length
        theta = scaling.get("rope_theta") or fields["rope_theta"]
        rope = Rope(base=theta * alpha ** (width / (width - 2)))
    else:
        rope = fields.rope(width)
    bias = bool(fields["attention_bias"])
    changes = {"kinds": (BlockKind(rope=rope),), "qk_norm": "rotated_head", "qkv_bias": bias, "out_bias": bias}
    fields.require("use_qk_norm", None, True)
    fields.require("use_cla", None, False)
    return base.sizes(fields) | changes


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    for name, values in {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": (None, []),
        "use_sliding_window": (False,),
    }.items():
        fields.require(name, *values)
    fields.skip("sliding_window", "max_window_layers")
    experts = Experts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        shared_hidden=fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
        normalize=bool(fields["norm_topk_prob"]),
    )
    kinds = fields.kinds(fields["layer_types"], None, lambda kind: base.rope(fields, kind))
    return base.sizes(fields) | kinds | {"qkv_bias": bool(fields["qkv_bias"]), "experts": experts}


def _mellum(fields: Fields) -> dict[str, Any]:
    L, number = fields.size("num_hidden_layers"), fields["num_experts"] or fields.size("num_local_experts")
    fields.require("mlp_layer_types", None, ["sparse"] * L)
    fields.skip("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    hidden, normalize = fields.size("moe_intermediate_size"), bool(fields["norm_topk_prob"])
    experts = Experts(number, fields.size("num_experts_per_tok"), hidden, normalize=normalize)
    config = base.mistral(fields) | {"qk_norm": "head", "experts": experts}
    bias = bool(fields["attention_bias"])
    return _windows(fields, config, ["full_attention"]) | {"qkv_bias": bias, "out_bias": bias}


def _flex_olmo(fields: Fields) -> dict[str, Any]:
    return more.olmoe(fields) | {"pre_norms": False, "post_norms": True}


def _dots1(fields: Fields) -> dict[str, Any]:
    window, first, L = fields["sliding_window"], fields["max_window_layers"], fields.size("num_hidden_layers")
    types = fields["layer_types"] or [
        "sliding_attention" if window and i >= first else "full_attention" for i in range(L)
    ]
    kinds = fields.kinds(types, window, lambda kind: base.rope(fields, kind))
    bias = bool(fields["attention_bias"])
    experts = {"experts": base.deepseek_experts(fields), "qk_norm": "head"}
    return base.sizes(fields) | kinds | experts | {"qkv_bias": bias, "out_bias": bias}


def _glm4_moe(fields: Fields) -> dict[str, Any]:
    fields.skip("num_nextn_predict_layers", "num_mtp_layers")
    kinds = fields.kinds(None, None, lambda kind: base.rope(fields, kind))
    changes = {"experts": base.deepseek_experts(fields), "qk_norm": "head" if fields["use_qk_norm"] else None}
    return base.sizes(fields) | kinds | changes | {"qkv_bias": bool(fields["attention_bias"])}


def _vaultgemma(fields: Fields) -> dict[str, Any]:
    return base.gemma2(fields) | {"post_norms": False}


_LLAMA = base.LLAMA_DEFAULTS
_GRANITE = _LLAMA | dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
_LAYER_NORM = _LLAMA | {"layer_norm_eps": 1e-5}
_COHERE = _LAYER_NORM | {
    "max_position_embeddings": 8192,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_GLM_MOE = _LLAMA | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
}
_SHARED_GATE = {"mlp.shared_expert_gate.weight": "router/shared_gate"} | {
    f"mlp.shared_expert.{name}_proj.weight": f"shared/{name}" for name in ("gate", "up", "down")
}
_DENSE = {"self_attn.dense.weight": "attention/out", "self_attn.dense.bias": "attention/out_bias"}
_LAYER_NORM_BLOCK = base.LLAMA_BLOCK | more.NORM_BIASES


def _up_and_down(prefix: str, up: str, down: str) -> dict[str, str]:
    return {
        f"{prefix}{name}.{kind}": f"mlp/{leaf}{suffix}"
        for name, leaf in ((up, "up"), (down, "down"))
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    }


def _joined(name: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{name}.{kind}": tuple(f"attention/{part}{suffix}" for part in "qkv")
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    }


_OLD_MLP = _up_and_down("mlp.", "dense_h_to_4h", "dense_4h_to_h")
_NEOX_QKV = _joined("attention.query_key_value")

FAMILIES: dict[str, Family] = more.FAMILIES | {
    "granite": Family("GraniteForCausalLM", _GRANITE, _granite, base.OUTER, base.LLAMA_BLOCK),
    "hyperclovax": Family(
        "HyperCLOVAXForCausalLM",
        _GRANITE | {"attention_multiplier": None, "use_post_norm": True},
        _hyperclovax,
        base.OUTER,
        base.LLAMA_BLOCK | {"post_norm1.weight": "attention/post_norm", "post_norm2.weight": "mlp/post_norm"},
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _LLAMA
        | {"hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        _nemotron,
        more.LAYER_NORM_OUTER,
        _LAYER_NORM_BLOCK,
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        _LAYER_NORM
        | {"hidden_act": "relu2", "max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True},
        _jais2,
        more.LAYER_NORM_OUTER,
        _LAYER_NORM_BLOCK,
    ),
    "olmo": Family("OlmoForCausalLM", _LLAMA, _olmo, base.OUTER, base.LLAMA_BLOCK),
    "cohere": Family("CohereForCausalLM", _COHERE | {"rope_theta": 5e5}, _cohere, base.OUTER, base.LLAMA_BLOCK),
    "cohere2": Family("Cohere2ForCausalLM", _COHERE, _cohere2, base.OUTER, base.LLAMA_BLOCK),
    "phi": Family(
        "PhiForCausalLM",
        _LAYER_NORM | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "qk_layernorm": False},
        _phi,
        {
            "model.embed_tokens.weight": "embedding",
            "model.final_layernorm.weight": "norm",
            "model.final_layernorm.bias": "norm_bias",
            "lm_head.weight": "head",
            "lm_head.bias": "head_bias",
        },
        base.PRE_NORMS | more.NORM_BIASES | base.QKV | _DENSE | _up_and_down("mlp.", "fc1", "fc2"),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        _LAYER_NORM
        | {
            "hidden_act": "gelu",
            "rotary_emb_base": 10_000.0,
            "rotary_pct": 0.25,
            "partial_rotary_factor": None,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        _gpt_neox,
        {
            "gpt_neox.embed_in.weight": "embedding",
            "gpt_neox.final_layer_norm.weight": "norm",
            "gpt_neox.final_layer_norm.bias": "norm_bias",
            "embed_out.weight": "head",
        },
        base.PRE_NORMS
        | more.NORM_BIASES
        | _NEOX_QKV
        | {"attention.dense.weight": "attention/out", "attention.dense.bias": "attention/out_bias"}
        | _OLD_MLP,
        prefix="gpt_neox.layers.{i}.",
        ignored=(r"attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
        by_head=frozenset(_NEOX_QKV),
    ),
    "falcon": Family(
        "FalconForCausalLM",
        _LLAMA
        | {
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "alibi": False,
            "bias": False,
        },
        _falcon,
        {
            "transformer.word_embeddings.weight": "embedding",
            "transformer.ln_f.weight": "norm",
            "transformer.ln_f.bias": "norm_bias",
            "lm_head.weight": "head",
        },
        base.PRE_NORMS
        | more.NORM_BIASES
        | _joined("self_attention.query_key_value")
        | {"self_attention.dense.weight": "attention/out"}
        | _OLD_MLP,
        prefix="transformer.h.{i}.",
    ),
    "helium": Family(
        "HeliumForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
        },
        _helium,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "ministral": Family("MinistralForCausalLM", base.MISTRAL_DEFAULTS, _ministral, base.OUTER, base.LLAMA_BLOCK),
    "cwm": Family(
        "CwmForCausalLM",
        base.MISTRAL_DEFAULTS
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
        _cwm,
        base.OUTER,
        base.LLAMA_BLOCK,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        _LLAMA | {"rms_norm_eps": 1e-5},
        _hunyuan,
        base.OUTER,
        base.PRE_NORMS
        | base.QKV
        | base.OUT
        | base.MLP
        | {
            "self_attn.query_layernorm.weight": "attention/q_norm",
            "self_attn.key_layernorm.weight": "attention/k_norm",
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
        _qwen2_moe,
        base.OUTER,
        base.QWEN3_MOE_BLOCK | _SHARED_GATE | base.experts_of("mlp.experts", *base.PROJECTIONS),
    ),
    "mellum": Family(
        "MellumForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        _mellum,
        base.OUTER,
        base.QWEN3_MOE_BLOCK | base.experts_of("mlp.experts", *base.PROJECTIONS),
        ignored=(r"^mtp\.",),
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        _LLAMA | {"max_position_embeddings": 4096, "rope_theta": 5e5, "num_experts_per_tok": 5, "num_experts": 7},
        _flex_olmo,
        base.OUTER,
        base.POST_NORM_BLOCK | {"mlp.gate.weight": "router/kernel"} | base.experts_of("mlp.experts", *base.PROJECTIONS),
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 1408,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        _dots1,
        base.OUTER,
        base.LLAMA_BLOCK | base.DEEPSEEK_EXPERTS,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _GLM_MOE,
        _glm4_moe,
        base.OUTER,
        base.LLAMA_BLOCK | base.DEEPSEEK_EXPERTS,
        has_predictors=True,
    ),
    "vaultgemma": Family(
        "VaultGemmaForCausalLM",
        base.GEMMA2_DEFAULTS,
        _vaultgemma,
        base.OUTER,
        {"input_layernorm.weight": "attention/norm", "pre_feedforward_layernorm.weight": "mlp/norm"}
        | base.QKV
        | base.OUT
        | base.MLP,
    ),
}
"""model_type of config.json -> family."""

_BIASES_ON_SCORES = "positions are added to the scores of attention (alibi)"
_PARALLEL_WITH_PAIRS = "its rotary pairs and joined weights have an order of their own"
UNFIT: dict[str, str] = {
    "apertus": "its activation has weights (xielu)",
    "bloom": _BIASES_ON_SCORES,
    "codegen": _PARALLEL_WITH_PAIRS,
    "deepseek_v2": "the experts of a token are chosen in another way",
    "ernie4_5_moe": "the router has its bias in another form",
    "gemma3": "it has a vision tower; the text model alone has model_type 'gemma3_text'",
    "gemma3n": "each block has embeddings of its own",
    "gpt_bigcode": "all heads share one tensor of queries, keys and values",
    "gpt_neo": "the scores of attention are not scaled",
    "gptj": _PARALLEL_WITH_PAIRS,
    "granitemoe": "the experts of a block are in one tensor",
    "llama4": "the experts get scaled inputs, and attention is by chunks",
    "mamba": "it has no attention",
    "ministral3": "queries have a factor that grows with their position",
    "mllama": "it has a vision tower",
    "mpt": _BIASES_ON_SCORES,
    "opt": "its positions begin with the third row of a table",
}
"""model_type -> what the decoder does not have."""
