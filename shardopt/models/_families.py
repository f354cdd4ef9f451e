"""The families of open models as data: how config.json describes the decoder, and where each tensor of a file lies in it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardopt.models._decoder_config import BlockKind, Experts
from shardopt.models._fields import Fields, yarn_scale
from shardopt.models._latent_attention import Latent

Reader = Callable[[Fields], dict[str, Any]]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


class Family(NamedTuple):
    """A family of models.

    Attributes:
      architecture: the class in transformers.
      defaults: config.json's fields that may be absent, with transformers' defaults.
      read: returns the fields of `DecoderConfig` for a config.json.
      outer: tensor name -> leaf outside of blocks.
      block: tensor name after the prefix of a block -> leaf of a block, or several leaves that the tensor joins. "{e}" is the
        number of an expert.
      prefix: the prefix of a block's tensors, with "{i}" for its number.
      transposed: whether the weights of linear layers are stored [out, in].
      ignored: regular expressions of tensors that are no weights.
      optional: the beginning of names that files may leave out.
      by_head: names in `block` whose tensors join leaves head by head, not one after the other.
      has_predictors: whether files may have blocks after the last one, which predict further tokens in training.
    """

    architecture: str
    defaults: Mapping[str, Any]
    read: Reader
    outer: Mapping[str, str]
    block: Mapping[str, str | tuple[str, ...]]
    prefix: str = "model.layers.{i}."
    transposed: bool = True
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    optional: str = ""
    by_head: frozenset[str] = frozenset()
    has_predictors: bool = False


OUTER = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm", "lm_head.weight": "head"}
PRE_NORMS = {"input_layernorm.weight": "attention/norm", "post_attention_layernorm.weight": "mlp/norm"}
OUT = {"self_attn.o_proj.weight": "attention/out", "self_attn.o_proj.bias": "attention/out_bias"}
QKV = {
    f"self_attn.{name}_proj.{kind}": f"attention/{name}{suffix}"
    for name in "qkv"
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
_QK_NORMS = {"self_attn.q_norm.weight": "attention/q_norm", "self_attn.k_norm.weight": "attention/k_norm"}
_ATTENTION = QKV | OUT | _QK_NORMS
MLP = {
    f"mlp.{name}_proj.{kind}": f"mlp/{name}{suffix}"
    for name in ("gate", "up", "down")
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
LLAMA_BLOCK = PRE_NORMS | _ATTENTION | MLP
_POST_NORMS = {
    "post_attention_layernorm.weight": "attention/post_norm",
    "post_feedforward_layernorm.weight": "mlp/post_norm",
}

POST_NORM_BLOCK = _ATTENTION | MLP | _POST_NORMS


def sizes(fields: Fields, hidden: int | None = None) -> dict[str, Any]:
    """Return what nearly all families call by the same names; `hidden` is in place of "intermediate_size"."""
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": fields.size("num_attention_heads"),
        "num_kv_heads": fields["num_key_value_heads"],
        "head_dim": fields["head_dim"],
        "hidden": hidden or fields.size("intermediate_size"),
        "max_length": fields.size("max_position_embeddings"),
        "norm_epsilon": fields["rms_norm_eps"],
        "tied": bool(fields["tie_word_embeddings"]),
        "activation": fields.choice("hidden_act", ACTIVATIONS),
    }


def head_dim(fields: Fields) -> int:
    return fields["head_dim"] or fields.size("hidden_size") // fields.size("num_attention_heads")


def rope(fields: Fields, kind: str = "full_attention") -> Any:
    return fields.rope(head_dim(fields), kind)


def llama(fields: Fields) -> dict[str, Any]:
    biases = {"qkv_bias": bool(fields["attention_bias"]), "out_bias": bool(fields["attention_bias"])}
    kinds = fields.kinds(None, None, lambda kind: rope(fields, kind))
    return sizes(fields) | biases | {"mlp_bias": bool(fields["mlp_bias"])} | kinds


def mistral(fields: Fields) -> dict[str, Any]:
    return sizes(fields) | fields.kinds(None, fields["sliding_window"], lambda kind: rope(fields, kind))


def _qwen2(fields: Fields) -> dict[str, Any]:
    return sizes(fields) | _qwen_kinds(fields) | {"qkv_bias": True}


def qwen3(fields: Fields) -> dict[str, Any]:
    bias = bool(fields["attention_bias"])
    return sizes(fields) | _qwen_kinds(fields) | {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}


def _qwen_kinds(fields: Fields) -> dict[str, Any]:
    types, window = fields["layer_types"], fields["sliding_window"] if fields["use_sliding_window"] else None
    first, L = fields["max_window_layers"], fields.size("num_hidden_layers")
    if window is None:
        types = None
    elif types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(L)]
    return fields.kinds(types, window, lambda kind: rope(fields, kind))


def olmo2(fields: Fields) -> dict[str, Any]:
    norms = {"pre_norms": False, "post_norms": True, "qk_norm": "all"}
    return llama(fields) | norms


def _phi3(fields: Fields) -> dict[str, Any]:
    return mistral(fields)


def _gemma(fields: Fields, period: int) -> dict[str, Any]:
    """Return what Gemma 2 and 3 share; every `period`-th block sees all positions."""
    fields.require("use_bidirectional_attention", None, False)
    L, window, bias = fields.size("num_hidden_layers"), fields["sliding_window"], bool(fields["attention_bias"])
    types = fields["layer_types"] or [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(L)
    ]
    local = {} if period == 2 else {"rope_scaling": {}, "rope_theta": fields["rope_local_base_freq"]}

    def rope(kind: str) -> Any:
        return fields.rope(head_dim(fields), kind, **(local if kind == "sliding_attention" else {}))

    return {
        **sizes(fields),
        "activation": fields.choice("hidden_activation", ACTIVATIONS),
        "norm": "rms_plus_one",
        "post_norms": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_scale": fields["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": fields["attn_logit_softcapping"],
        "logits_softcap": fields["final_logit_softcapping"],
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        **fields.kinds(types, window, rope),
    }


def gemma2(fields: Fields) -> dict[str, Any]:
    return _gemma(fields, 2)


def _gemma3(fields: Fields) -> dict[str, Any]:
    return _gemma(fields, fields["sliding_window_pattern"]) | {"qk_norm": "head"}


def _gpt2(fields: Fields) -> dict[str, Any]:
    for name, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
    ):
        fields.require(name, value)
    dim, length = fields.size("n_embd"), fields.size("n_positions")
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": dim,
        "num_layers": fields.size("n_layer"),
        "num_heads": fields.size("n_head"),
        "hidden": fields["n_inner"] or 4 * dim,
        "max_length": length,
        "positions": length,
        "norm": "layer",
        "norm_epsilon": fields["layer_norm_epsilon"],
        "activation": fields.choice("activation_function", ACTIVATIONS),
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": bool(fields["tie_word_embeddings"]),
        "kinds": (BlockKind(rope=None),),
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    number = fields.size("num_local_experts")
    experts = Experts(number, fields.size("num_experts_per_tok"), fields.size("intermediate_size"))
    return mistral(fields) | {"experts": experts}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", None, [])
    number = fields.size("num_experts" if fields["num_experts"] is not None else "num_local_experts")
    hidden, normalize = fields.size("moe_intermediate_size"), bool(fields["norm_topk_prob"])
    experts = Experts(number, fields.size("num_experts_per_tok"), hidden, normalize=normalize)
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    kinds = fields.kinds(None, window, lambda kind: rope(fields, kind))
    return qwen3(fields) | kinds | {"pattern": (), "experts": experts}


def _deepseek(fields: Fields) -> dict[str, Any]:
    required = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "attention_bias": False}
    for name, value in required.items():
        fields.require(name, value)
    fields.skip("num_nextn_predict_layers", "num_mtp_layers", "num_key_value_heads", "head_dim")
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = Latent(*map(fields.size, names))
    fields.require("qk_head_dim", None, latent.nope + latent.rope)
    rope = fields.rope(latent.rope, interleaved=fields["rope_interleave"])
    scaling = (fields["rope_scaling"] or {}) or (fields["rope_parameters"] or {})
    scale = yarn_scale(rope.factor, scaling.get("mscale_all_dim") or 0) if rope.kind == "yarn" else 1.0
    changes = {
        "num_kv_heads": None,
        "head_dim": None,
        "latent": latent,
        "experts": deepseek_experts(fields),
        "kinds": (BlockKind(rope=rope),),
    }
    return sizes(fields) | changes | {"attention_scale": scale**2 * (latent.nope + latent.rope) ** -0.5}


def deepseek_experts(fields: Fields) -> Experts:
    """Return DeepSeek-V3's experts, which are chosen by the sigmoid of a score plus a bias."""
    hidden = fields.size("moe_intermediate_size")
    return Experts(
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


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    fields.require("swiglu_alpha", None, 1.702)
    fields.require("swiglu_limit", None, 7.0)
    fields.require("hidden_act", "silu")
    bias, L = bool(fields["attention_bias"]), fields.size("num_hidden_layers")
    types = fields["layer_types"] or ["full_attention" if i % 2 else "sliding_attention" for i in range(L)]
    fields.skip("experts_per_token", "initial_context_length")  # other names of fields that are there too
    experts = Experts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        biases=True,
    )
    activation = {"activation": "clamped_swiglu", "gated": False}
    attention = {"qkv_bias": bias, "out_bias": bias, "sinks": True}
    kinds = fields.kinds(types, fields["sliding_window"], lambda kind: rope(fields, kind))
    return sizes(fields) | kinds | activation | attention | {"experts": experts}


def experts_of(prefix: str, gate: str, down: str, up: str) -> dict[str, str]:
    names = {"gate": gate, "down": down, "up": up}
    return {f"{prefix}.{{e}}.{name}.weight": f"experts/{leaf}" for leaf, name in names.items()}


LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_GEMMA_DEFAULTS = LLAMA_DEFAULTS | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
_PHI3_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}
_GPT2_DEFAULTS = {
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}
_MIXTRAL_DEFAULTS = MISTRAL_DEFAULTS | {
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 4096,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
}
_GPT_OSS_DEFAULTS = LLAMA_DEFAULTS | {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
_QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN3_MOE_DEFAULTS = _QWEN_DEFAULTS | {
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}

_GEMMA_NORMS = _POST_NORMS | {
    "input_layernorm.weight": "attention/norm",
    "pre_feedforward_layernorm.weight": "mlp/norm",
}
_PHI3_BLOCK = (
    PRE_NORMS
    | OUT
    | {
        "self_attn.qkv_proj.weight": ("attention/q", "attention/k", "attention/v"),
        "mlp.gate_up_proj.weight": ("mlp/gate", "mlp/up"),
        "mlp.down_proj.weight": "mlp/down",
    }
)
_GPT2_OUTER = {
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "positions",
    "transformer.ln_f.weight": "norm",
    "transformer.ln_f.bias": "norm_bias",
    "lm_head.weight": "head",
}
_GPT2_BLOCK = {
    "ln_1.weight": "attention/norm",
    "ln_1.bias": "attention/norm_bias",
    "attn.c_attn.weight": ("attention/q", "attention/k", "attention/v"),
    "attn.c_attn.bias": ("attention/q_bias", "attention/k_bias", "attention/v_bias"),
    "attn.c_proj.weight": "attention/out",
    "attn.c_proj.bias": "attention/out_bias",
    "ln_2.weight": "mlp/norm",
    "ln_2.bias": "mlp/norm_bias",
    "mlp.c_fc.weight": "mlp/up",
    "mlp.c_fc.bias": "mlp/up_bias",
    "mlp.c_proj.weight": "mlp/down",
    "mlp.c_proj.bias": "mlp/down_bias",
}
_MIXTRAL_BLOCK = PRE_NORMS | QKV | OUT | {"block_sparse_moe.gate.weight": "router/kernel"}
QWEN3_MOE_BLOCK = PRE_NORMS | _ATTENTION | {"mlp.gate.weight": "router/kernel"}
_LATENT = {
    "self_attn.q_a_proj.weight": "attention/q_down",
    "self_attn.q_a_layernorm.weight": "attention/q_norm",
    "self_attn.q_b_proj.weight": "attention/q",
    "self_attn.kv_a_proj_with_mqa.weight": "attention/kv_down",
    "self_attn.kv_a_layernorm.weight": "attention/kv_norm",
    "self_attn.kv_b_proj.weight": "attention/kv",
}
PROJECTIONS = "gate_proj", "down_proj", "up_proj"
DEEPSEEK_EXPERTS = (
    {"mlp.gate.weight": "router/kernel", "mlp.gate.e_score_correction_bias": "router/choice_bias"}
    | {f"mlp.shared_experts.{name}_proj.weight": f"shared/{name}" for name in ("gate", "up", "down")}
    | experts_of("mlp.experts", *PROJECTIONS)
)
_DEEPSEEK_BLOCK = PRE_NORMS | _LATENT | OUT | MLP | DEEPSEEK_EXPERTS
_GPT_OSS_BLOCK = (
    PRE_NORMS
    | QKV
    | OUT
    | {
        "self_attn.sinks": "attention/sinks",
        "mlp.router.weight": "router/kernel",
        "mlp.router.bias": "router/bias",
        "mlp.experts.gate_up_proj": "experts/up",
        "mlp.experts.gate_up_proj_bias": "experts/up_bias",
        "mlp.experts.down_proj": "experts/down",
        "mlp.experts.down_proj_bias": "experts/down_bias",
    }
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", LLAMA_DEFAULTS, llama, OUTER, LLAMA_BLOCK),
    "mistral": Family("MistralForCausalLM", MISTRAL_DEFAULTS, mistral, OUTER, LLAMA_BLOCK),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN_DEFAULTS, _qwen2, OUTER, LLAMA_BLOCK),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN_DEFAULTS | {"head_dim": 128}, qwen3, OUTER, LLAMA_BLOCK),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        olmo2,
        OUTER,
        POST_NORM_BLOCK,
    ),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA2_DEFAULTS, gemma2, OUTER, _ATTENTION | MLP | _GEMMA_NORMS),
    "gemma3_text": Family("Gemma3ForCausalLM", _GEMMA3_DEFAULTS, _gemma3, OUTER, _ATTENTION | MLP | _GEMMA_NORMS),
    "phi3": Family("Phi3ForCausalLM", _PHI3_DEFAULTS, _phi3, OUTER, _PHI3_BLOCK),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_DEFAULTS,
        _gpt2,
        _GPT2_OUTER,
        _GPT2_BLOCK,
        prefix="transformer.h.{i}.",
        transposed=False,
        ignored=(r"h\.\d+\.attn\.(masked_)?bias$",),
        optional="transformer.",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _MIXTRAL_DEFAULTS,
        _mixtral,
        OUTER,
        _MIXTRAL_BLOCK | experts_of("block_sparse_moe.experts", "w1", "w2", "w3"),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE_DEFAULTS,
        _qwen3_moe,
        OUTER,
        QWEN3_MOE_BLOCK | experts_of("mlp.experts", *PROJECTIONS),
    ),
    "gpt_oss": Family("GptOssForCausalLM", _GPT_OSS_DEFAULTS, _gpt_oss, OUTER, _GPT_OSS_BLOCK),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK_DEFAULTS,
        _deepseek,
        OUTER,
        _DEEPSEEK_BLOCK,
        has_predictors=True,
    ),
}
"""model_type of config.json -> family."""
