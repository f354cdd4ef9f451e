"""Readers of families without experts, for `families.json`."""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._decoder_config import BlockKind
from shardopt.models._family import ACTIVATIONS, Reader
from shardopt.models._fields import Fields, Record
from shardopt.models._rope import Rope


def _interleaved(fields: Fields) -> Record:
    """Return blocks of one kind, whose rotary pairs are neighbours."""
    return base.sizes(fields) | base.one_kind(base.rope(fields, interleaved=True))


def _qwen(fields: Fields) -> Record:
    types = fields["layer_types"]
    first = fields["max_window_layers"]
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    if window is None:
        types = None
    elif types is None:
        L = fields.size("num_hidden_layers")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(L)]
    return base.sizes(fields) | base.kinds(fields, types, window)


def _smollm3(fields: Fields) -> Record:
    L = fields.size("num_hidden_layers")
    every = fields["no_rope_layer_interval"]
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


def _olmo3(fields: Fields) -> Record:
    def rope(kind: str) -> Rope:
        changes = {"rope_scaling": {}} if kind == "sliding_attention" else {}
        return base.rope(fields, kind, **changes)

    types = base.types_of(fields, 4)
    return base.llama(fields) | fields.kinds(types, fields["sliding_window"], rope)


def _gemma(fields: Fields) -> Record:
    scale = fields.size("hidden_size") ** 0.5
    return base.plain(fields) | {"embedding_scale": scale}


def _gemma2(fields: Fields, period: int = 2, **local: Any) -> Record:
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


def _gemma3(fields: Fields) -> Record:
    local = {"rope_scaling": {}, "rope_theta": fields["rope_local_base_freq"]}
    # transformers ignores a cap of the scores
    return _gemma2(fields, fields["sliding_window_pattern"], **local)


def _gpt2(fields: Fields) -> Record:
    """Return GPT-2, whose positions are learned."""
    fields.require("scale_attn_weights", None, True)
    dim = fields.size("n_embd")
    max_length = fields.size("n_positions")
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": dim,
        "num_layers": fields.size("n_layer"),
        "num_heads": fields.size("n_head"),
        "hidden": fields["n_inner"] or 4 * dim,
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


READERS: dict[str, Reader] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "interleaved": _interleaved,
    "llama": base.llama,
    "mistral": base.mistral,
    "olmo3": _olmo3,
    "plain": base.plain,
    "qwen": _qwen,
    "smollm3": _smollm3,
}
"""The name of a reader in `families.json` -> the reader."""
