"""Families whose blocks are Llama's: RMS norms before attention and mlp, and a gated mlp."""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._decoder_config import BlockKind
from shardopt.models._family import Family
from shardopt.models._fields import Fields
from shardopt.models._rope import Rope


def _qwen2(fields: Fields) -> dict[str, Any]:
    return base.qwen(fields) | {"qkv_bias": True}


def _cwm(fields: Fields) -> dict[str, Any]:
    L = fields.size("num_hidden_layers")
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(L)]
    return base.sizes(fields) | {"mlp_bias": bool(fields["mlp_bias"])} | base.windows(fields, types)


def _phi3(fields: Fields) -> dict[str, Any]:
    fields.skip("full_attn_mod", "interpolate_factor")  # of Phi 4 mini, without effect
    return base.mistral(fields)


def _ministral(fields: Fields) -> dict[str, Any]:
    return base.sizes(fields) | base.windows(fields)


def _smollm3(fields: Fields) -> dict[str, Any]:
    L, every = fields.size("num_hidden_layers"), fields["no_rope_layer_interval"]
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    rotates = fields["no_rope_layers"] or [(i + 1) % every != 0 for i in range(L)]
    types = fields["layer_types"] or [
        "full_attention" if has_rope else "sliding_attention" for has_rope in rotates
    ]
    fields.skip("max_window_layers")
    rope = base.rope(fields)
    blocks = [
        BlockKind(window if kind == "sliding_attention" else None, rope if has_rope else None)
        for kind, has_rope in zip(types, rotates, strict=True)
    ]
    kinds = tuple(dict.fromkeys(blocks))
    pattern = tuple(map(kinds.index, blocks)) if len(kinds) > 1 else ()
    return base.llama(fields) | {"kinds": kinds, "pattern": pattern}


def _seed_oss(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {"out_bias": bool(fields["attention_out_bias"])}


def _arcee(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {"gated": False}


def glm(fields: Fields) -> dict[str, Any]:
    return (
        base.sizes(fields) | base.interleaved(fields) | {"qkv_bias": bool(fields["attention_bias"])}
    )


def _ernie(fields: Fields) -> dict[str, Any]:
    mlp_bias = {"mlp_bias": bool(fields["use_bias"])}
    return (
        base.sizes(fields) | base.interleaved(fields) | base.biases(fields, "use_bias") | mlp_bias
    )


def _helium(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | base.interleaved(fields) | {"out_bias": False}


def _granite(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {
        "embedding_scale": float(fields["embedding_multiplier"]),
        "branch_scale": float(fields["residual_multiplier"]),
        "attention_scale": float(fields["attention_multiplier"] or base.head_dim(fields) ** -0.5),
        "logits_scale": 1 / float(fields["logits_scaling"]),
    }


def _hyperclovax(fields: Fields) -> dict[str, Any]:
    changes = {
        "post_norms": bool(fields["use_post_norm"]),
        "logits_scale": float(fields["logits_scaling"]),
    }
    return _granite(fields) | changes


def _hunyuan(fields: Fields) -> dict[str, Any]:
    scaling, width = (
        fields.record("rope_scaling") or fields.record("rope_parameters"),
        base.head_dim(fields),
    )
    kind, alpha = scaling.get("rope_type", scaling.get("type")), scaling.get("alpha")
    if kind == "dynamic" and alpha:  # alpha alone counts, in rows of any length
        theta = scaling.get("rope_theta") or fields["rope_theta"]
        rope = Rope(base=theta * alpha ** (width / (width - 2)))
    else:
        rope = fields.rope(width)
    fields.require("use_qk_norm", None, True)
    fields.require("use_cla", None, False)
    return (
        base.sizes(fields)
        | base.biases(fields)
        | {
            "kinds": (BlockKind(rope=rope),),
            "qk_norm": "rotated_head",
        }
    )


_JOINED_MLP = {
    "mlp.gate_up_proj.weight": ("mlp/gate", "mlp/up"),
    "mlp.down_proj.weight": "mlp/down",
}
GLM_BLOCK = base.QKV | {"self_attn.o_proj.weight": "attention/out"} | _JOINED_MLP
_PHI3_BLOCK = (
    {"self_attn.qkv_proj.weight": ("attention/q", "attention/k", "attention/v")}
    | base.OUT
    | _JOINED_MLP
)
_QK_LAYER_NORMS = {
    f"self_attn.{name}_layernorm.weight": f"attention/{name[0]}_norm" for name in ("query", "key")
}

FAMILIES: dict[str, Family] = {
    "llama": Family(base.llama),
    "internlm3": Family(base.llama),
    "iquestcoder": Family(base.llama),
    "mistral": Family(base.mistral),
    "ministral": Family(_ministral),
    "cwm": Family(_cwm),
    "qwen2": Family(_qwen2),
    "qwen3": Family(base.qwen3),
    "phi3": Family(_phi3, base.PRE_NORMS | _PHI3_BLOCK),
    "smollm3": Family(_smollm3),
    "seed_oss": Family(_seed_oss),
    "arcee": Family(_arcee),
    "glm": Family(glm, base.PRE_NORMS | GLM_BLOCK),
    "ernie4_5": Family(_ernie),
    "helium": Family(_helium),
    "granite": Family(_granite),
    "hyperclovax": Family(
        _hyperclovax,
        base.LLAMA_BLOCK
        | {
            "post_norm1.weight": "attention/post_norm",
            "post_norm2.weight": "mlp/post_norm",
        },
    ),
    "hunyuan_v1_dense": Family(
        _hunyuan, base.PRE_NORMS | base.QKV | base.OUT | base.MLP | _QK_LAYER_NORMS
    ),
}
"""model_type of config.json -> family."""
