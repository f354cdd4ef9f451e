"""Readers of families without experts, for `families.json`."""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._decoder_config import BlockKind
from shardopt.models._family import ACTIVATIONS, Reader
from shardopt.models._fields import Fields
from shardopt.models._rope import Rope


def _interleaved(fields: Fields) -> dict[str, Any]:
    """Return blocks of one kind, whose rotary pairs are neighbours."""
    return base.sizes(fields) | base.one_kind(base.rope(fields, interleaved=True))


def _qwen(fields: Fields) -> dict[str, Any]:
    types, first = fields["layer_types"], fields["max_window_layers"]
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    if window is None:
        types = None
    elif types is None:
        L = fields.size("num_hidden_layers")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(L)]
    return base.sizes(fields) | base.kinds(fields, types, window)


def _smollm3(fields: Fields) -> dict[str, Any]:
    L, every = fields.size("num_hidden_layers"), fields["no_rope_layer_interval"]
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    rotates = fields["no_rope_layers"] or [(i + 1) % every != 0 for i in range(L)]
    types = fields["layer_types"] or [
        "full_attention" if has_rope else "sliding_attention" for has_rope in rotates
    ]
    rope = base.rope(fields)
    blocks = [
        BlockKind(window if kind == "sliding_attention" else None, rope if has_rope else None)
        for kind, has_rope in zip(types, rotates, strict=True)
    ]
    kinds = tuple(dict.fromkeys(blocks))
    pattern = tuple(map(kinds.index, blocks)) if len(kinds) > 1 else ()
    return base.llama(fields) | {"kinds": kinds, "pattern": pattern}


def _granite(fields: Fields) -> dict[str, Any]:
    return base.llama(fields) | {
        "embedding_scale": float(fields["embedding_multiplier"]),
        "branch_scale": float(fields["residual_multiplier"]),
        "attention_scale": float(fields["attention_multiplier"] or base.head_dim(fields) ** -0.5),
        "logits_scale": 1 / float(fields["logits_scaling"]),
    }


def _olmo3(fields: Fields) -> dict[str, Any]:
    def rope(kind: str) -> Rope:
        changes = {"rope_scaling": {}} if kind == "sliding_attention" else {}
        return base.rope(fields, kind, **changes)

    types = base.types_of(fields, 4)
    return base.llama(fields) | fields.kinds(types, fields["sliding_window"], rope)


def _exaone4(fields: Fields) -> dict[str, Any]:
    L, window = fields.size("num_hidden_layers"), fields["sliding_window"]
    types, every = fields["layer_types"], fields["sliding_window_pattern"]
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

    def rope(kind: str) -> Rope | None:
        return None if hides_positions and kind == "full_attention" else base.rope(fields, kind)

    return base.sizes(fields) | fields.kinds(types, window, rope)


def _gemma(fields: Fields) -> dict[str, Any]:
    scale = fields.size("hidden_size") ** 0.5
    return base.plain(fields) | {"embedding_scale": scale}


def _gemma2(fields: Fields, period: int = 2, **local: Any) -> dict[str, Any]:
    """Return Gemma 2.

    `period` and `local`, the changes of rotary positions in blocks with windows, are for Gemma 3.
    """

    def rope(kind: str) -> Rope:
        return base.rope(fields, kind, **(local if kind == "sliding_attention" else {}))

    return base.sizes(fields) | {
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "activation": fields.choice("hidden_activation", ACTIVATIONS),
        "attention_scale": fields["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": fields["attn_logit_softcapping"],
        "logits_softcap": fields["final_logit_softcapping"],
        **fields.kinds(base.types_of(fields, period), fields["sliding_window"], rope),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    local = {"rope_scaling": {}, "rope_theta": fields["rope_local_base_freq"]}
    # transformers ignores a cap of the scores
    return _gemma2(fields, fields["sliding_window_pattern"], **local)


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
        "norm": "layer",
        "norm_epsilon": fields.number("layer_norm_epsilon"),
        "activation": fields.choice("activation_function", ACTIVATIONS),
        "gated": False,
        "mlp_bias": True,
        "tied": bool(fields["tie_word_embeddings"]),
        **base.one_kind(None),
    }


def _gpt_neo(fields: Fields) -> dict[str, Any]:
    config = _gpt(
        fields,
        "hidden_size",
        "num_layers",
        "num_heads",
        "intermediate_size",
        "max_position_embeddings",
    )
    names = {"global": "full_attention", "local": "sliding_attention"}
    # transformers takes them, not "attention_layers"
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
    return config | fields.kinds(types, fields.size("window_size"), lambda kind: None)


def _gptj(fields: Fields) -> dict[str, Any]:
    rope = Rope(dims=fields.size("rotary_dim"), interleaved=True)
    return _gpt(fields) | base.one_kind(rope)


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    old = {"rope_theta": fields["rotary_emb_base"], "partial_rotary_factor": fields["rotary_pct"]}
    return base.sizes(fields) | base.one_kind(fields.rope(base.head_dim(fields), **old))


def _falcon(fields: Fields) -> dict[str, Any]:
    hidden = fields["ffn_hidden_size"] or 4 * fields.size("hidden_size")
    activation = {"activation": fields.choice("activation", ACTIVATIONS)}
    return base.sizes(fields, hidden) | base.same_kinds(fields) | activation


def _cohere2(fields: Fields) -> dict[str, Any]:
    rope = base.rope(fields, interleaved=True)
    kinds = fields.kinds(
        base.types_of(fields, fields["sliding_window_pattern"]),
        fields["sliding_window"],
        lambda kind: None if kind == "full_attention" else rope,
    )
    return base.sizes(fields) | kinds


READERS: dict[str, Reader] = {
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt": _gpt,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": _granite,
    "interleaved": _interleaved,
    "llama": base.llama,
    "mistral": base.mistral,
    "olmo3": _olmo3,
    "plain": base.plain,
    "qwen": _qwen,
    "smollm3": _smollm3,
    "windows": base.windows,
}
"""The name of a reader in `families.json` -> the reader."""
