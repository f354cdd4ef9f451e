"""Families with experts, whose routers are softmax or DeepSeek's sigmoid, and families with latent
attention.
"""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._decoder_config import BlockKind, ExpertsConfig
from shardopt.models._family import Family
from shardopt.models._fields import Fields, yarn_scale
from shardopt.models._latent_attention import LatentConfig
from shardopt.models._post_norm_families import POST_NORM_BLOCK


def _experts(
    fields: Fields, hidden: str = "moe_intermediate_size", **changes: Any
) -> dict[str, Any]:
    """Return experts, whose number has one of two names.

    `hidden` names the field of their hidden units.
    """
    number = fields.size(
        "num_experts" if fields["num_experts"] is not None else "num_local_experts"
    )
    sizes = number, fields.size("num_experts_per_tok"), fields.size(hidden)
    options: dict[str, Any] = {"normalize": bool(fields["norm_topk_prob"])} | changes
    return {"experts": ExpertsConfig(*sizes, **options)}


def _mixtral(fields: Fields) -> dict[str, Any]:
    return base.mistral(fields) | _experts(fields, "intermediate_size", normalize=True)


def _require_experts_in_all_blocks(fields: Fields) -> None:
    fields.require("decoder_sparse_step", None, 1)
    fields.require("mlp_only_layers", None, [])


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    _require_experts_in_all_blocks(fields)
    fields.require("use_sliding_window", None, False)
    fields.skip("sliding_window", "max_window_layers")
    shared_hidden = fields.size("shared_expert_intermediate_size")
    kinds = fields.kinds(fields["layer_types"], None, lambda kind: base.rope(fields, kind))
    experts = _experts(fields, shared_hidden=shared_hidden, shared_gate=True)
    return base.sizes(fields) | kinds | experts | {"qkv_bias": bool(fields["qkv_bias"])}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    _require_experts_in_all_blocks(fields)
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    return base.qwen3(fields) | {"pattern": ()} | base.same_kinds(fields, window) | _experts(fields)


def _olmoe(fields: Fields) -> dict[str, Any]:
    fields.require("clip_qkv", None)
    return base.llama(fields) | {"qk_norm": "all"} | _experts(fields, "intermediate_size")


def _flex_olmo(fields: Fields) -> dict[str, Any]:
    return base.post_normed(_olmoe(fields))


def _mellum(fields: Fields) -> dict[str, Any]:
    fields.require("mlp_layer_types", None, ["sparse"] * fields.size("num_hidden_layers"))
    fields.skip(
        "num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"
    )
    config = base.sizes(fields) | base.biases(fields) | {"qk_norm": "head"} | _experts(fields)
    return config | base.windows(fields, ["full_attention"])


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    fields.require("swiglu_alpha", None, 1.702)
    fields.require("swiglu_limit", None, 7.0)
    fields.require("hidden_act", "silu")
    # other names of fields that are there too
    fields.skip("experts_per_token", "initial_context_length")
    experts = _experts(fields, "intermediate_size", normalize=True, biases=True)
    changes = {"activation": "clamped_swiglu", "gated": False, "sinks": True}
    kinds = base.windows(fields, base.types_of(fields, 2))
    return base.sizes(fields) | kinds | base.biases(fields) | experts | changes


def _scored_by_sigmoid(fields: Fields, num_first: int = 0) -> dict[str, Any]:
    """Return DeepSeek-V3's experts, which are chosen by the sigmoid of a score plus a bias."""
    hidden = fields.size("moe_intermediate_size")
    experts = ExpertsConfig(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        hidden,
        shared_hidden=hidden * (fields["n_shared_experts"] or 0),
        score="sigmoid",
        normalize=bool(fields["norm_topk_prob"]),
        groups=(fields.size("n_group"), fields.size("topk_group")),
        scale=float(fields["routed_scaling_factor"]),
        choice_bias=True,
        num_first=num_first,
    )
    return {"experts": experts}


def _latent(fields: Fields) -> dict[str, Any]:
    """Return DeepSeek-V3's attention."""
    fields.require("attention_bias", None, False)
    fields.skip("num_key_value_heads", "head_dim")
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentConfig(*map(fields.size, names))
    fields.require("qk_head_dim", None, latent.nope + latent.rope)
    rope = fields.rope(latent.rope, interleaved=fields["rope_interleave"])
    scaling = fields.record("rope_scaling") or fields.record("rope_parameters")
    scale = (
        yarn_scale(rope.factor, scaling.get("mscale_all_dim") or 0) if rope.kind == "yarn" else 1.0
    )
    return {
        "num_kv_heads": None,
        "head_dim": None,
        "latent": latent,
        "kinds": (BlockKind(rope=rope),),
        "attention_scale": scale**2 * (latent.nope + latent.rope) ** -0.5,
    }


def _deepseek_v3(fields: Fields) -> dict[str, Any]:
    for name, value in {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }.items():
        fields.require(name, None, value)
    fields.skip("num_nextn_predict_layers", "num_mtp_layers")
    experts = _scored_by_sigmoid(fields, fields["first_k_dense_replace"] or 0)
    return base.sizes(fields) | _latent(fields) | experts


def _youtu(fields: Fields) -> dict[str, Any]:
    return base.sizes(fields) | _latent(fields)


def _glm4_moe_lite(fields: Fields) -> dict[str, Any]:
    L = fields.size("num_hidden_layers")
    types = fields["mlp_layer_types"] or ["dense"] + ["sparse"] * (L - 1)
    num_first = types.count("dense")
    fields.require("mlp_layer_types", None, ["dense"] * num_first + ["sparse"] * (L - num_first))
    fields.require("first_k_dense_replace", None, num_first)
    fields.require("topk_method", None, "noaux_tc")
    fields.skip("num_nextn_predict_layers", "num_mtp_layers")
    return base.sizes(fields) | _latent(fields) | _scored_by_sigmoid(fields, num_first)


def _solar_open(fields: Fields) -> dict[str, Any]:
    fields.require("first_k_dense_replace", None, 0)
    fields.skip("intermediate_size")
    sizes = base.sizes(fields, fields.size("moe_intermediate_size"))
    return (
        sizes
        | base.same_kinds(fields)
        | _scored_by_sigmoid(fields)
        | {"qkv_bias": bool(fields["attention_bias"])}
    )


def _minimax_m2(fields: Fields) -> dict[str, Any]:
    required = {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }
    for name, value in required.items():
        fields.require(name, None, value)
    fields.require("shared_intermediate_size", None, 0)
    fields.require("attn_type_list", None, [1] * fields.size("num_hidden_layers"))
    fields.skip("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    share = fields["partial_rotary_factor"]
    if share is None and fields["rotary_dim"] is not None:
        share = fields.size("rotary_dim") / base.head_dim(fields)
    rope = base.rope(fields, partial_rotary_factor=share)
    experts = _experts(
        fields, "intermediate_size", normalize=True, score="sigmoid", choice_bias=True
    )
    return base.sizes(fields) | experts | {"qk_norm": "all", "kinds": (BlockKind(rope=rope),)}


def _dots1(fields: Fields) -> dict[str, Any]:
    fields.require("moe_layer_freq", None, 1)
    fields.require("topk_method", None, "noaux_tc")
    fields.require("scoring_func", None, "sigmoid", "noaux_tc")
    window, first, L = (
        fields["sliding_window"],
        fields["max_window_layers"],
        fields.size("num_hidden_layers"),
    )
    types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(L)]
    experts = _scored_by_sigmoid(fields, fields["first_k_dense_replace"] or 0)
    return (
        base.sizes(fields)
        | base.windows(fields, types)
        | base.biases(fields)
        | experts
        | {"qk_norm": "head"}
    )


def _glm4_moe(fields: Fields) -> dict[str, Any]:
    fields.skip("num_nextn_predict_layers", "num_mtp_layers")
    changes = {
        "qk_norm": "head" if fields["use_qk_norm"] else None,
        "qkv_bias": bool(fields["attention_bias"]),
    }
    experts = _scored_by_sigmoid(fields, fields["first_k_dense_replace"] or 0)
    return base.sizes(fields) | base.same_kinds(fields) | experts | changes


def _of_each_expert(
    prefix: str, gate: str = "gate_proj", down: str = "down_proj", up: str = "up_proj"
) -> dict[str, str]:
    names = {"gate": gate, "down": down, "up": up}
    return {f"{prefix}.{{e}}.{name}.weight": f"experts/{leaf}" for leaf, name in names.items()}


def _shared(prefix: str) -> dict[str, str]:
    return {f"{prefix}.{name}_proj.weight": f"shared/{name}" for name in ("gate", "up", "down")}


_EXPERTS = {"mlp.gate.weight": "router/kernel"} | _of_each_expert("mlp.experts")
_SIGMOID_EXPERTS = (
    _EXPERTS
    | _shared("mlp.shared_experts")
    | {"mlp.gate.e_score_correction_bias": "router/choice_bias"}
)
_BLOCK = base.PRE_NORMS | base.ATTENTION | _EXPERTS
_MIXTRAL_BLOCK = (
    base.PRE_NORMS
    | base.QKV
    | base.OUT
    | {"block_sparse_moe.gate.weight": "router/kernel"}
    | _of_each_expert("block_sparse_moe.experts", "w1", "w2", "w3")
)
_LATENT = {
    "self_attn.q_a_proj.weight": "attention/q_down",
    "self_attn.q_a_layernorm.weight": "attention/q_norm",
    "self_attn.q_b_proj.weight": "attention/q",
    "self_attn.kv_a_proj_with_mqa.weight": "attention/kv_down",
    "self_attn.kv_a_layernorm.weight": "attention/kv_norm",
    "self_attn.kv_b_proj.weight": "attention/kv",
} | base.OUT

FAMILIES: dict[str, Family] = {
    "mixtral": Family(_mixtral, _MIXTRAL_BLOCK),
    "qwen2_moe": Family(
        _qwen2_moe,
        _BLOCK
        | _shared("mlp.shared_expert")
        | {"mlp.shared_expert_gate.weight": "router/shared_gate"},
    ),
    "qwen3_moe": Family(_qwen3_moe, _BLOCK),
    "olmoe": Family(_olmoe, _BLOCK),
    "flex_olmo": Family(_flex_olmo, POST_NORM_BLOCK | _EXPERTS),
    "mellum": Family(
        _mellum,
        _BLOCK,
        ignored=(r"^mtp\.",),
    ),
    "gpt_oss": Family(
        _gpt_oss,
        base.PRE_NORMS
        | base.QKV
        | base.OUT
        | {
            "self_attn.sinks": "attention/sinks",
            "mlp.router.weight": "router/kernel",
            "mlp.router.bias": "router/bias",
            "mlp.experts.gate_up_proj": "experts/up",
            "mlp.experts.gate_up_proj_bias": "experts/up_bias",
            "mlp.experts.down_proj": "experts/down",
            "mlp.experts.down_proj_bias": "experts/down_bias",
        },
    ),
    "deepseek_v3": Family(
        _deepseek_v3,
        base.PRE_NORMS | _LATENT | base.MLP | _SIGMOID_EXPERTS,
        has_predictors=True,
    ),
    "youtu": Family(_youtu, base.PRE_NORMS | _LATENT | base.MLP),
    "glm4_moe_lite": Family(
        _glm4_moe_lite,
        base.PRE_NORMS | _LATENT | base.MLP | _SIGMOID_EXPERTS,
        has_predictors=True,
    ),
    "solar_open": Family(_solar_open, base.PRE_NORMS | base.QKV | base.OUT | _SIGMOID_EXPERTS),
    "minimax_m2": Family(
        _minimax_m2,
        _MIXTRAL_BLOCK
        | {
            "self_attn.q_norm.weight": "attention/q_norm",
            "self_attn.k_norm.weight": "attention/k_norm",
            "block_sparse_moe.e_score_correction_bias": "router/choice_bias",
        },
    ),
    "dots1": Family(_dots1, base.LLAMA_BLOCK | _SIGMOID_EXPERTS),
    "glm4_moe": Family(
        _glm4_moe,
        base.LLAMA_BLOCK | _SIGMOID_EXPERTS,
        has_predictors=True,
    ),
}
"""model_type of config.json -> family."""
