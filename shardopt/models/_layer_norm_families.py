"""Families with layer norms, many with plain mlps or with attention and mlp in parallel."""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._decoder_config import BlockKind
from shardopt.models._family import ACTIVATIONS, Family, with_biases
from shardopt.models._fields import Fields
from shardopt.models._rope import Rope


def _layer_norms(
    fields: Fields, epsilon: str = "layer_norm_eps", norm: str = "layer"
) -> dict[str, Any]:
    return {"norm": norm, "norm_epsilon": fields.number(epsilon)}


def _gpt(
    fields: Fields,
    dim: str = "n_embd",
    layers: str = "n_layer",
    heads: str = "n_head",
    hidden: str = "n_inner",
    length: str = "n_positions",
) -> dict[str, Any]:
    """Return the settings that the GPTs share, by the names of their fields.

    Positions are learned.
    """
    fields.require("scale_attn_weights", None, True)
    max_length = fields.size(length)
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": fields.size(dim),
        "num_layers": fields.size(layers),
        "num_heads": fields.size(heads),
        "hidden": fields[hidden] or 4 * fields.size(dim),
        "max_length": max_length,
        "positions": max_length,
        **_layer_norms(fields, "layer_norm_epsilon"),
        "activation": fields.choice("activation_function", ACTIVATIONS),
        "gated": False,
        "mlp_bias": True,
        "tied": bool(fields["tie_word_embeddings"]),
        "kinds": (BlockKind(rope=None),),
    }


def _gpt2(fields: Fields) -> dict[str, Any]:
    fields.require("scale_attn_by_inverse_layer_idx", None, False)
    fields.require("reorder_and_upcast_attn", None, False)
    return _gpt(fields) | {"qkv_bias": True, "out_bias": True}


def _gpt_bigcode(fields: Fields) -> dict[str, Any]:
    fields.require("multi_query", None, True)
    fields.skip("inference_runner", "pad_key_length", "validate_runner_input")  # of a server
    fields.require("num_key_value_heads", None, 1)
    return _gpt(fields) | {"num_kv_heads": 1, "qkv_bias": True, "out_bias": True}


def _gpt_neo(fields: Fields) -> dict[str, Any]:
    fields.skip("attention_layers")  # transformers takes "attention_types"
    config = _gpt(
        fields,
        "hidden_size",
        "num_layers",
        "num_heads",
        "intermediate_size",
        "max_position_embeddings",
    )
    names = {"global": "full_attention", "local": "sliding_attention"}
    types = [
        str(names.get(name, name))
        for group, number in fields["attention_types"]
        for name in group * number
    ]
    if len(types) != config["num_layers"]:
        fields.problems.append(
            f"attention_types has {len(types)} types for {config['num_layers']} blocks"
        )
        return config
    kinds = fields.kinds(types, fields.size("window_size"), lambda kind: None)
    return config | kinds | {"out_bias": True, "attention_scale": 1.0}


def _gptj(fields: Fields) -> dict[str, Any]:
    fields.skip("rotary")
    config, rope = _gpt(fields), Rope(dims=fields.size("rotary_dim"), interleaved=True)
    return config | {
        "positions": 0,
        "kinds": (BlockKind(rope=rope),),
        "parallel": "norm",
        "head_bias": True,
    }


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    old = {"rope_theta": fields["rotary_emb_base"], "partial_rotary_factor": fields["rotary_pct"]}
    changes = {
        "parallel": "input" if fields["use_parallel_residual"] else None,
        "gated": False,
        "num_kv_heads": None,
        "mlp_bias": True,
        "kinds": (BlockKind(rope=fields.rope(base.head_dim(fields), **old)),),
    }
    fields.skip("classifier_dropout", "num_key_value_heads")
    return base.sizes(fields) | _layer_norms(fields) | base.biases(fields) | changes


def _falcon(fields: Fields) -> dict[str, Any]:
    for name, value in {
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "bias": False,
    }.items():
        fields.require(name, None, value)
    fields.require("num_ln_in_parallel_attn", None)
    fields.skip("num_kv_heads")  # of the new architecture
    return base.sizes(fields, fields["ffn_hidden_size"] or 4 * fields.size("hidden_size")) | {
        "num_kv_heads": 1,
        "activation": fields.choice("activation", ACTIVATIONS),
        "gated": False,
        "parallel": "norm" if fields["parallel_attn"] else None,
        **_layer_norms(fields, "layer_norm_epsilon"),
        **base.same_kinds(fields),
    }


def _phi(fields: Fields) -> dict[str, Any]:
    fields.require("qk_layernorm", None, False)
    changes = {"parallel": "norm", "gated": False, "head_bias": True}
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    return base.sizes(fields) | base.same_kinds(fields) | _layer_norms(fields) | changes | biases


def _stablelm(fields: Fields) -> dict[str, Any]:
    fields.require("qk_layernorm", None, False)
    changes = {
        "parallel": "norm" if fields["use_parallel_residual"] else None,
        "qkv_bias": bool(fields["use_qkv_bias"]),
    }
    return base.sizes(fields) | base.same_kinds(fields) | _layer_norms(fields) | changes


def _starcoder2(fields: Fields) -> dict[str, Any]:
    fields.require("mlp_type", None, "default")
    fields.require("norm_type", None, "layer_norm")
    fields.require("scale_attn_weights", None, True)
    # other names of fields that are there too
    fields.skip("activation_function", "layer_norm_epsilon")
    changes = {"gated": False, "mlp_bias": bool(fields["use_bias"])}
    return (
        base.mistral(fields)
        | _layer_norms(fields, "norm_epsilon")
        | base.biases(fields, "use_bias")
        | changes
    )


def _nemotron(fields: Fields) -> dict[str, Any]:
    return (
        base.llama(fields) | _layer_norms(fields, "norm_eps", "layer_plus_one") | {"gated": False}
    )


def _jais2(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | _layer_norms(fields) | {"gated": False}


def _olmo(fields: Fields) -> dict[str, Any]:
    fields.require("clip_qkv", None)
    return base.llama(fields) | {"norm": "layer_fixed", "norm_epsilon": 1e-5}


def _cohere(fields: Fields) -> dict[str, Any]:
    fields.require("use_qk_norm", None, False)
    norms = _layer_norms(fields, norm="layer_scale")
    changes = {"parallel": "norm", "logits_scale": float(fields["logit_scale"])}
    return base.sizes(fields) | norms | changes | base.biases(fields) | base.interleaved(fields)


def _cohere2(fields: Fields) -> dict[str, Any]:
    for name, value in {
        "use_gated_activation": True,
        "use_parallel_block": True,
        "rotary_pct": 1.0,
    }.items():
        fields.require(name, None, value)
    fields.require("position_embedding_type", None, "rope_gptj")
    fields.skip(
        "use_parallel_embedding",
        "use_embedding_sharing",
        "order_of_interleaved_layers",
        "layer_switch",
    )
    types = base.types_of(fields, fields["sliding_window_pattern"])
    rope = fields.rope(base.head_dim(fields), interleaved=True)
    kinds = fields.kinds(
        types, fields["sliding_window"], lambda kind: None if kind == "full_attention" else rope
    )
    return _cohere(fields) | kinds


_NORMS = with_biases({"input_layernorm": "attention/norm", "post_attention_layernorm": "mlp/norm"})
_BLOCK = _NORMS | base.ATTENTION | base.MLP


def _outer(embedding: str, norm: str, head: str = "lm_head") -> dict[str, str]:
    names = {
        f"{embedding}.weight": "embedding",
        f"{norm}.weight": "norm",
        f"{norm}.bias": "norm_bias",
    }
    return names | {f"{head}.weight": "head", f"{head}.bias": "head_bias"}


def _mlp(up: str, down: str) -> dict[str, Any]:
    return with_biases({f"mlp.{up}": "mlp/up", f"mlp.{down}": "mlp/down"})


_OUTER = _outer("model.embed_tokens", "model.norm")
_JOINED = "attention/q", "attention/k", "attention/v"
_NEOX_QKV = with_biases({"attention.query_key_value": _JOINED})
_OLD_MLP = _mlp("dense_h_to_4h", "dense_4h_to_h")

_GPT_NORMS = with_biases({"ln_1": "attention/norm", "ln_2": "mlp/norm"})
_GPT_BUFFERS = (r"h\.\d+\.attn\.(attention\.)?(masked_)?bias$",)
_GPT2_OUTER = _outer("transformer.wte", "transformer.ln_f") | {
    "transformer.wpe.weight": "positions"
}
_GPT2_BLOCK = (
    _GPT_NORMS
    | with_biases({"attn.c_attn": _JOINED, "attn.c_proj": "attention/out"})
    | _mlp("c_fc", "c_proj")
)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _gpt2,
        _GPT2_BLOCK,
        _GPT2_OUTER,
        prefix="transformer.h.{i}.",
        transposed=False,
        ignored=_GPT_BUFFERS,
        optional="transformer.",
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode,
        _GPT2_BLOCK,
        _GPT2_OUTER,
        prefix="transformer.h.{i}.",
        ignored=_GPT_BUFFERS,
    ),
    "gpt_neo": Family(
        _gpt_neo,
        _GPT_NORMS
        | {f"attn.attention.{name}_proj.weight": f"attention/{name}" for name in "qkv"}
        | with_biases({"attn.attention.out_proj": "attention/out"})
        | _mlp("c_fc", "c_proj"),
        _GPT2_OUTER,
        prefix="transformer.h.{i}.",
        ignored=_GPT_BUFFERS,
    ),
    "gptj": Family(
        _gptj,
        _GPT_NORMS
        | {f"attn.{name}_proj.weight": f"attention/{name}" for name in ("q", "k", "v", "out")}
        | _mlp("fc_in", "fc_out"),
        _outer("transformer.wte", "transformer.ln_f"),
        prefix="transformer.h.{i}.",
        ignored=_GPT_BUFFERS,
    ),
    "gpt_neox": Family(
        _gpt_neox,
        _NORMS | _NEOX_QKV | with_biases({"attention.dense": "attention/out"}) | _OLD_MLP,
        _outer("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        prefix="gpt_neox.layers.{i}.",
        ignored=(r"attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
        by_head=frozenset(_NEOX_QKV),
    ),
    "falcon": Family(
        _falcon,
        _NORMS
        | with_biases(
            {"self_attention.query_key_value": _JOINED, "self_attention.dense": "attention/out"}
        )
        | _OLD_MLP,
        _outer("transformer.word_embeddings", "transformer.ln_f"),
        prefix="transformer.h.{i}.",
    ),
    "phi": Family(
        _phi,
        _NORMS | base.QKV | with_biases({"self_attn.dense": "attention/out"}) | _mlp("fc1", "fc2"),
        _outer("model.embed_tokens", "model.final_layernorm"),
    ),
    "stablelm": Family(
        _stablelm,
        _BLOCK,
        _OUTER,
    ),
    "starcoder2": Family(
        _starcoder2,
        _NORMS | base.QKV | base.OUT | _mlp("c_fc", "c_proj"),
        _OUTER,
    ),
    "nemotron": Family(
        _nemotron,
        _BLOCK,
        _OUTER,
    ),
    "jais2": Family(
        _jais2,
        _BLOCK,
        _OUTER,
    ),
    "olmo": Family(_olmo),
    "cohere": Family(_cohere),
    "cohere2": Family(_cohere2),
}
"""model_type of config.json -> family."""
