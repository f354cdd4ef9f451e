"""What families of open models share: the record of a family, names of tensors, and the fields that
many have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardopt.models._decoder_config import BlockKind
from shardopt.models._fields import Fields
from shardopt.models._rope import Rope

Reader = Callable[[Fields], dict[str, Any]]
Leaves = Mapping[str, str | tuple[str, ...]]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


def with_biases(modules: Leaves) -> dict[str, str | tuple[str, ...]]:
    """Return tensor name -> leaves for the weight and the bias of each module."""
    tensors: dict[str, str | tuple[str, ...]] = {}
    for module, leaves in modules.items():
        tensors[f"{module}.weight"] = leaves
        tensors[f"{module}.bias"] = (
            f"{leaves}_bias" if isinstance(leaves, str) else tuple(f"{x}_bias" for x in leaves)
        )
    return tensors


PRE_NORMS = {
    "input_layernorm.weight": "attention/norm",
    "post_attention_layernorm.weight": "mlp/norm",
}
QKV = with_biases({f"self_attn.{name}_proj": f"attention/{name}" for name in "qkv"})
OUT = with_biases({"self_attn.o_proj": "attention/out"})
ATTENTION = (
    QKV
    | OUT
    | {
        "self_attn.q_norm.weight": "attention/q_norm",
        "self_attn.k_norm.weight": "attention/k_norm",
    }
)
MLP = with_biases({f"mlp.{name}_proj": f"mlp/{name}" for name in ("gate", "up", "down")})
LLAMA_BLOCK = PRE_NORMS | ATTENTION | MLP


class Family(NamedTuple):
    """A family of models.

    Attributes:
      read: returns the fields of `DecoderConfig` for a config.json.
      block: tensor name after the prefix of a block -> leaf of a block, or several leaves that the
        tensor joins. "{e}" is the number of an expert.
      outer: tensor name -> leaf outside of blocks.
      prefix: the prefix of a block's tensors, with "{i}" for its number.
      transposed: whether the weights of linear layers are stored [out, in].
      ignored: regular expressions of tensors that are no weights.
      optional: the beginning of names that files may leave out.
      by_head: names in `block` whose tensors join leaves head by head, not one after the other.
      has_predictors: whether files may have blocks after the last one, which predict further tokens
        in training.
      architectures: the class in transformers, and others of the same mathematics.
      defaults: config.json's fields that may be absent, with transformers' defaults.
    """

    read: Reader
    block: Leaves = LLAMA_BLOCK
    outer: Mapping[str, str] = {
        "model.embed_tokens.weight": "embedding",
        "model.norm.weight": "norm",
        "lm_head.weight": "head",
    }
    prefix: str = "model.layers.{i}."
    transposed: bool = True
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    optional: str = ""
    by_head: frozenset[str] = frozenset()
    has_predictors: bool = False
    architectures: Sequence[str] = ()
    defaults: Mapping[str, Any] = {}


def sizes(fields: Fields, hidden: int | None = None) -> dict[str, Any]:
    """Return what nearly all families call by the same names.

    `hidden` is in place of "intermediate_size".
    """
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": fields.size("num_attention_heads"),
        "num_kv_heads": fields.optional_size("num_key_value_heads"),
        "head_dim": fields.optional_size("head_dim"),
        "hidden": hidden or fields.size("intermediate_size"),
        "max_length": fields.size("max_position_embeddings"),
        "norm_epsilon": fields.number("rms_norm_eps"),
        "tied": bool(fields["tie_word_embeddings"]),
        "activation": fields.choice("hidden_act", ACTIVATIONS),
    }


def head_dim(fields: Fields) -> int:
    return fields.optional_size("head_dim") or fields.size("hidden_size") // fields.size(
        "num_attention_heads"
    )


def biases(fields: Fields, name: str = "attention_bias") -> dict[str, Any]:
    """Return whether all products of attention have biases."""
    return {"qkv_bias": bool(fields[name]), "out_bias": bool(fields[name])}


def rope(fields: Fields, kind: str = "full_attention", **changes: Any) -> Rope:
    """Return the rotary positions of blocks of a type, as `Fields.rope` does."""
    return fields.rope(head_dim(fields), kind, **changes)


def interleaved(fields: Fields) -> dict[str, Any]:
    """Return blocks of one kind, whose rotary pairs are neighbours."""
    return {"kinds": (BlockKind(rope=fields.rope(head_dim(fields), interleaved=True)),)}


def same_kinds(fields: Fields, window: int | None = None) -> dict[str, Any]:
    """Return blocks of one kind."""
    return fields.kinds(None, window, lambda kind: rope(fields, kind))


def windows(fields: Fields, types: list[str] | None = None) -> dict[str, Any]:
    """Return blocks with windows by "layer_types", or else by `types`.

    Without both all blocks have the window.
    """
    return fields.kinds(
        fields["layer_types"] or types, fields["sliding_window"], lambda kind: rope(fields, kind)
    )


def types_of(fields: Fields, period: int) -> list[str]:
    """Return "layer_types".

    By default every `period`-th block sees all positions, and the others have a window.
    """
    L = fields.size("num_hidden_layers")
    return fields["layer_types"] or [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(L)
    ]


def llama(fields: Fields) -> dict[str, Any]:
    return (
        sizes(fields) | biases(fields) | {"mlp_bias": bool(fields["mlp_bias"])} | same_kinds(fields)
    )


def mistral(fields: Fields) -> dict[str, Any]:
    return sizes(fields) | same_kinds(fields, fields["sliding_window"])


def qwen(fields: Fields) -> dict[str, Any]:
    types, window = (
        fields["layer_types"],
        fields["sliding_window"] if fields["use_sliding_window"] else None,
    )
    first, L = fields["max_window_layers"], fields.size("num_hidden_layers")
    if window is None:
        types = None
    elif types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(L)]
    return sizes(fields) | fields.kinds(types, window, lambda kind: rope(fields, kind))


def qwen3(fields: Fields) -> dict[str, Any]:
    return qwen(fields) | biases(fields) | {"qk_norm": "head"}


def post_normed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose norms are after attention and mlp alone."""
    return config | {"pre_norms": False, "post_norms": True}
