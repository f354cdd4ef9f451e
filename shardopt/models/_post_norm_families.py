"""Families with RMS norms after attention and mlp, and the Gemma families."""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._family import ACTIVATIONS, Family
from shardopt.models._fields import Fields
from shardopt.models._pre_norm_families import GLM_BLOCK, glm
from shardopt.models._rope import Rope


def _olmo2(fields: Fields) -> dict[str, Any]:
    return base.post_normed(base.llama(fields)) | {"qk_norm": "all"}


def _olmo3(fields: Fields) -> dict[str, Any]:
    def rope(kind: str) -> Rope:
        return base.rope(
            fields, kind, **({"rope_scaling": {}} if kind == "sliding_attention" else {})
        )

    return _olmo2(fields) | fields.kinds(base.types_of(fields, 4), fields["sliding_window"], rope)


def _exaone4(fields: Fields) -> dict[str, Any]:
    L, window, types = (
        fields.size("num_hidden_layers"),
        fields["sliding_window"],
        fields["layer_types"],
    )
    every = fields["sliding_window_pattern"]
    if window is None:
        types = None
    elif types is None and isinstance(every, int):
        types = [
            "full_attention" if (i + 1) % every == 0 or i == L - 1 else "sliding_attention"
            for i in range(L)
        ]
    elif types is None:
        fields.problems.append(
            f"sliding_window_pattern is {every!r}, must be an integer if there are no layer_types"
        )
    # blocks that see all rotate nothing, next to blocks with windows
    hides_positions = types is not None
    kinds = fields.kinds(
        types,
        window,
        lambda kind: (
            None if hides_positions and kind == "full_attention" else base.rope(fields, kind)
        ),
    )
    return base.post_normed(base.sizes(fields)) | kinds | {"qk_norm": "head"}


def _glm4(fields: Fields) -> dict[str, Any]:
    return glm(fields) | {"post_norms": True}


def _gemma(fields: Fields) -> dict[str, Any]:
    """Return what all Gemmas share."""
    fields.require("use_bidirectional_attention", None, False)
    scale = fields.size("hidden_size") ** 0.5
    return (
        base.sizes(fields)
        | base.biases(fields)
        | {
            "norm": "rms_plus_one",
            "embedding_scale": scale,
        }
    )


def _gemma1(fields: Fields) -> dict[str, Any]:
    fields.require("hidden_activation", None, "gelu_pytorch_tanh")
    fields.require("hidden_act", "gelu", "gelu_pytorch_tanh")  # both are the approximation by tanh
    return _gemma(fields) | base.same_kinds(fields) | {"activation": "gelu_tanh"}


def _gemma2(fields: Fields, period: int = 2, **local: Any) -> dict[str, Any]:
    """Return Gemma 2.

    `period` and `local`, the changes of rotary positions in blocks with windows, are for Gemma 3.
    """

    def rope(kind: str) -> Rope:
        return base.rope(fields, kind, **(local if kind == "sliding_attention" else {}))

    return {
        **_gemma(fields),
        "activation": fields.choice("hidden_activation", ACTIVATIONS),
        "post_norms": True,
        "attention_scale": fields["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": fields["attn_logit_softcapping"],
        "logits_softcap": fields["final_logit_softcapping"],
        **fields.kinds(base.types_of(fields, period), fields["sliding_window"], rope),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    fields.require("attn_logit_softcapping", None)  # transformers ignores it
    local = {"rope_scaling": {}, "rope_theta": fields["rope_local_base_freq"]}
    return _gemma2(fields, fields["sliding_window_pattern"], **local) | {"qk_norm": "head"}


def _vaultgemma(fields: Fields) -> dict[str, Any]:
    return _gemma2(fields) | {"post_norms": False}


_POST_NORMS = {
    "post_attention_layernorm.weight": "attention/post_norm",
    "post_feedforward_layernorm.weight": "mlp/post_norm",
}
POST_NORM_BLOCK = base.ATTENTION | base.MLP | _POST_NORMS
_GEMMA_PRE_NORMS = {
    "input_layernorm.weight": "attention/norm",
    "pre_feedforward_layernorm.weight": "mlp/norm",
}
_GEMMA_BLOCK = POST_NORM_BLOCK | _GEMMA_PRE_NORMS
_GLM4_NORMS = base.PRE_NORMS | {
    "post_self_attn_layernorm.weight": "attention/post_norm",
    "post_mlp_layernorm.weight": "mlp/post_norm",
}

FAMILIES: dict[str, Family] = {
    "olmo2": Family(_olmo2, POST_NORM_BLOCK),
    "olmo3": Family(_olmo3, POST_NORM_BLOCK),
    "exaone4": Family(_exaone4, POST_NORM_BLOCK),
    "glm4": Family(_glm4, _GLM4_NORMS | GLM_BLOCK),
    "gemma": Family(_gemma1),
    "gemma2": Family(_gemma2, _GEMMA_BLOCK),
    "gemma3_text": Family(_gemma3, _GEMMA_BLOCK),
    "vaultgemma": Family(_vaultgemma, base.QKV | base.OUT | base.MLP | _GEMMA_PRE_NORMS),
}
"""model_type of config.json -> family."""
