"""What families of open models share: the record of a family, and the fields that many have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardopt.models._decoder_config import BlockKind
from shardopt.models._fields import Fields, Record
from shardopt.models._rope import Rope

Reader = Callable[[Fields], Record]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Family(NamedTuple):
    """A family of models; `families.json` has one record for each.

    Attributes:
      reader: returns the fields of `DecoderConfig` that it reads from a config.json. The next four
        attributes say the rest of them.
      block: tensor name after the prefix of a block -> leaf of a block, or several leaves that the
        tensor joins. "{e}" is the number of an expert.
      outer: tensor name -> leaf outside of blocks.
      required: field of config.json -> the values that the decoder can do.
      skipped: fields that have no effect in this family.
      when: field -> fields of `DecoderConfig`, if the field is true.
      constants: fields of `DecoderConfig` that all models of the family have.
      prefix: the prefix of a block's tensors, with "{i}" for its number.
      transposed: whether the weights of linear layers are stored [out, in].
      ignored: regular expressions of tensors that are no weights.
      optional: the beginning of names that files may leave out.
      has_predictors: whether files may have blocks after the last one, which predict further tokens
        in training.
      architectures: the class in transformers, and others of the same mathematics.
      defaults: config.json's fields that may be absent, with transformers' defaults.
    """

    reader: Reader
    block: Mapping[str, tuple[str, ...]]
    outer: Mapping[str, str]
    required: Mapping[str, Sequence[Any]] = {}
    skipped: Sequence[str] = ()
    when: Mapping[str, Mapping[str, Any]] = {}
    constants: Mapping[str, Any] = {}
    prefix: str = "model.layers.{i}."
    transposed: bool = True
    ignored: Sequence[str] = (r"rotary_emb\.inv_freq$",)
    optional: str = ""
    has_predictors: bool = False
    architectures: Sequence[str] = ()
    defaults: Mapping[str, Any] = {}

    def read(self, fields: Fields) -> Record:
        """Return the fields of `DecoderConfig` for a config.json."""
        for name, values in self.required.items():
            fields.require(name, *values)
        fields.skip(*self.skipped)
        config = self.reader(fields)
        for field, settings in self.when.items():
            if fields[field]:
                config.update(settings)
        config.update(self.constants)
        return config


def sizes(fields: Fields) -> Record:
    """Return what nearly all families call by the same names."""
    return {
        "vocab_size": fields.size("vocab_size"),
        "dim": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": fields.size("num_attention_heads"),
        "num_kv_heads": fields.optional_size("num_key_value_heads"),
        "head_dim": fields.optional_size("head_dim"),
        "hidden": fields.size("intermediate_size"),
        "max_length": fields.size("max_position_embeddings"),
        "norm_epsilon": fields.number("rms_norm_eps"),
        "tied": bool(fields["tie_word_embeddings"]),
        "activation": fields.choice("hidden_act", ACTIVATIONS),
    }


def rope(fields: Fields, kind: str = "full_attention", **changes: Any) -> Rope:
    """Return the rotary positions of blocks of a type, as `Fields.rope` does."""
    head_dim = fields.optional_size("head_dim")
    if head_dim is None:
        head_dim = fields.size("hidden_size") // fields.size("num_attention_heads")
    return fields.rope(head_dim, kind, **changes)


def one_kind(rope: Rope | None) -> Record:
    """Return blocks of one kind, without a window."""
    return {"kinds": (BlockKind(rope=rope),)}


def kinds(fields: Fields, types: list[str] | None, window: int | None) -> Record:
    """Return blocks that have the window or not, by their types. Without types all have it."""
    return fields.kinds(types, window, lambda kind: rope(fields, kind))


def types_of(fields: Fields, period: int) -> list[str]:
    """Return "layer_types".

    By default every `period`-th block sees all positions, and the others have a window.
    """
    L = fields.size("num_hidden_layers")
    return fields["layer_types"] or [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(L)
    ]


def plain(fields: Fields) -> Record:
    """Return a model with blocks of one kind."""
    return sizes(fields) | kinds(fields, None, None)


def llama(fields: Fields) -> Record:
    has_biases = bool(fields["attention_bias"])
    biases = {"qkv_bias": has_biases, "out_bias": has_biases, "mlp_bias": bool(fields["mlp_bias"])}
    return plain(fields) | biases


def mistral(fields: Fields) -> Record:
    return sizes(fields) | kinds(fields, None, fields["sliding_window"])
