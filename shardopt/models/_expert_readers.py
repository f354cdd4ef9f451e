"""Readers of families with experts, whose routers are softmax or DeepSeek's sigmoid, and of families
with latent attention, for `families.json`.
"""

from typing import Any

from shardopt.models import _family as base
from shardopt.models._decoder_config import ExpertsConfig
from shardopt.models._family import Reader
from shardopt.models._fields import Fields, Record, yarn_scale
from shardopt.models._latent_attention import LatentConfig


def _experts(fields: Fields, hidden: str = "moe_intermediate_size", **changes: Any) -> Record:
    """Return experts, whose number has one of two names.

    `hidden` names the field of their hidden units.
    """
    number = fields.size(
        "num_experts" if fields["num_experts"] is not None else "num_local_experts"
    )
    sizes = number, fields.size("num_experts_per_tok"), fields.size(hidden)
    options: Record = {"normalize": bool(fields["norm_topk_prob"])} | changes
    return {"experts": ExpertsConfig(*sizes, **options)}


def _mixtral(fields: Fields) -> Record:
    return base.mistral(fields) | _experts(fields, "intermediate_size", normalize=True)


def _qwen2_moe(fields: Fields) -> Record:
    shared_hidden = fields.size("shared_expert_intermediate_size")
    kinds = base.kinds(fields, fields["layer_types"], None)
    experts = _experts(fields, shared_hidden=shared_hidden, shared_gate=True)
    return base.sizes(fields) | kinds | experts


def _qwen3_moe(fields: Fields) -> Record:
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    fields.skip("layer_types", "max_window_layers")
    return base.sizes(fields) | base.kinds(fields, None, window) | _experts(fields)


def _olmoe(fields: Fields) -> Record:
    return base.llama(fields) | _experts(fields, "intermediate_size")


def _gpt_oss(fields: Fields) -> Record:
    experts = _experts(fields, "intermediate_size", normalize=True, biases=True)
    kinds = base.kinds(fields, base.types_of(fields, 2), fields["sliding_window"])
    return base.sizes(fields) | kinds | experts


def _sigmoid_experts(fields: Fields) -> Record:
    """Return DeepSeek-V3's experts after the first, dense blocks: they are chosen by the sigmoid of
    a score plus a bias.
    """
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
        num_first=fields["first_k_dense_replace"] or 0,
    )
    return {"experts": experts}


def _deepseek_v3(fields: Fields) -> Record:
    fields.require("attention_bias", None, False)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentConfig(*map(fields.size, names))
    fields.require("qk_head_dim", None, latent.nope + latent.rope)
    rope = fields.rope(latent.rope, interleaved=fields["rope_interleave"])
    scaling = fields.record("rope_scaling") or fields.record("rope_parameters")
    scale = (
        yarn_scale(rope.factor, scaling.get("mscale_all_dim") or 0) if rope.kind == "yarn" else 1.0
    )
    return {
        **base.sizes(fields),
        "num_kv_heads": None,
        "head_dim": None,
        "latent": latent,
        "attention_scale": scale**2 * (latent.nope + latent.rope) ** -0.5,
        **base.one_kind(rope),
        **_sigmoid_experts(fields),
    }


def _glm4_moe(fields: Fields) -> Record:
    return base.plain(fields) | _sigmoid_experts(fields)


READERS: dict[str, Reader] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""The name of a reader in `families.json` -> the reader."""
