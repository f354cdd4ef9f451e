"""The families of open models as data: how config.json describes the decoder, and where each tensor of a file lies in it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardopt.models._fields import Fields

Reader = Callable[[Fields], dict[str, Any]]

_ACTIVATIONS = {
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
      read: returns the fields of `DecoderConfig` from those of a config.json.
      outer: tensor name -> leaf outside of blocks.
      block: tensor name after the prefix of a block -> leaf of a block, or several leaves that the tensor joins. "{e}" is the
        number of an expert.
      prefix: the prefix of a block's tensors, with "{i}" for its number.
      transposed: whether the weights of linear layers are stored [out, in].
      ignored: regular expressions of tensors that are no weights.
    """

    architecture: str
    defaults: Mapping[str, Any]
    read: Reader
    outer: Mapping[str, str]
    block: Mapping[str, str | tuple[str, ...]]
    prefix: str = "model.layers.{i}."
    transposed: bool = True
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)


_OUTER = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm", "lm_head.weight": "head"}
_PRE_NORMS = {"input_layernorm.weight": "attention/norm", "post_attention_layernorm.weight": "mlp/norm"}
_OUT = {"self_attn.o_proj.weight": "attention/out", "self_attn.o_proj.bias": "attention/out_bias"}
_QKV = {
    f"self_attn.{name}_proj.{kind}": f"attention/{name}{suffix}"
    for name in "qkv"
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
_QK_NORMS = {"self_attn.q_norm.weight": "attention/q_norm", "self_attn.k_norm.weight": "attention/k_norm"}
_ATTENTION = _QKV | _OUT | _QK_NORMS
_MLP = {
    f"mlp.{name}_proj.{kind}": f"mlp/{name}{suffix}"
    for name in ("gate", "up", "down")
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
_LLAMA_BLOCK = _PRE_NORMS | _ATTENTION | _MLP
_POST_NORMS = {
    "post_attention_layernorm.weight": "attention/post_norm",
    "post_feedforward_layernorm.weight": "mlp/post_norm",
}


def _sizes(fields: Fields) -> dict[str, Any]:
    """Return what nearly all families call by the same names."""
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": fields.size("num_attention_heads"),
        "num_kv_heads": fields["num_key_value_heads"],
        "head_dim": fields["head_dim"],
        "hidden": fields.size("intermediate_size"),
        "max_length": fields.size("max_position_embeddings"),
        "norm_epsilon": fields["rms_norm_eps"],
        "tied": bool(fields["tie_word_embeddings"]),
        "activation": fields.choice("hidden_act", _ACTIVATIONS),
    }


def _head_dim(fields: Fields) -> int:
    return fields["head_dim"] or fields.size("hidden_size") // fields.size("num_attention_heads")


def _rope(fields: Fields, kind: str = "full_attention") -> Any:
    return fields.rope(_head_dim(fields), kind)


def _llama(fields: Fields) -> dict[str, Any]:
    biases = {"qkv_bias": bool(fields["attention_bias"]), "out_bias": bool(fields["attention_bias"])}
    kinds = fields.kinds(None, None, lambda kind: _rope(fields, kind))
    return _sizes(fields) | biases | {"mlp_bias": bool(fields["mlp_bias"])} | kinds


def _mistral(fields: Fields) -> dict[str, Any]:
    return _sizes(fields) | fields.kinds(None, fields["sliding_window"], lambda kind: _rope(fields, kind))


def _qwen2(fields: Fields) -> dict[str, Any]:
    return _sizes(fields) | _qwen_kinds(fields) | {"qkv_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = bool(fields["attention_bias"])
    return _sizes(fields) | _qwen_kinds(fields) | {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}


def _qwen_kinds(fields: Fields) -> dict[str, Any]:
    types, window = fields["layer_types"], fields["sliding_window"] if fields["use_sliding_window"] else None
    first, L = fields["max_window_layers"], fields.size("num_hidden_layers")
    if window is None:
        types = None
    elif types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(L)]
    return fields.kinds(types, window, lambda kind: _rope(fields, kind))


def _olmo2(fields: Fields) -> dict[str, Any]:
    norms = {"pre_norms": False, "post_norms": True, "qk_norm": "all"}
    return _llama(fields) | norms


_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA_DEFAULTS, _llama, _OUTER, _LLAMA_BLOCK),
    "mistral": Family("MistralForCausalLM", _MISTRAL_DEFAULTS, _mistral, _OUTER, _LLAMA_BLOCK),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN_DEFAULTS, _qwen2, _OUTER, _LLAMA_BLOCK),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN_DEFAULTS | {"head_dim": 128}, _qwen3, _OUTER, _LLAMA_BLOCK),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        _olmo2,
        _OUTER,
        _ATTENTION | _MLP | _POST_NORMS,
    ),
}
"""model_type of config.json -> family."""
