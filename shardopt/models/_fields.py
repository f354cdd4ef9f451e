"""The fields of a config.json: each is read, or known not to change the mathematics, or refused by
its name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardopt.core import quoted, value_error
from shardopt.models._decoder_config import BlockKind
from shardopt.models._rope import Rope
from shardopt.trace._primitives import words

Record = dict[str, Any]
"""A part of a config.json, or fields of `DecoderConfig`, by name."""

NEUTRAL = frozenset(
    words(
        "_attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern "
        "architectures auto_map cache_implementation dtype embedding_initializer_range ep_size "
        "gradient_checkpointing id2label initializer_range is_decoder label2id "
        "max_sequence_length model_max_length model_type n_ctx n_special output_past "
        "predict_special_tokens pretraining_tp return_dict summary_activation "
        "summary_proj_to_labels summary_type summary_use_proj task_specific_params "
        "tokenizer_class torch_dtype transformers_version unsloth_fixed unsloth_version use_cache "
        "use_mamba_kernels use_mrope "
        # softmax is in float32 here
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 "
        # losses that are off
        "aux_loss_alpha router_aux_loss_coef router_z_loss_coef seq_aux"
    )
)
"""Fields that do not change the logits."""

_NEUTRAL_ENDS = ("_token_id", "_dropout", "_dropout_prob", "_pdrop")
"""The ends of names of further such fields; the decoder has no dropout."""


_OF_ANY_KIND = frozenset(["sliding_window_pattern"])
"""Fields that may have several kinds of values."""


def _kind(value: Any) -> str:
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


class Fields:
    """The fields of one config.json, with the defaults of its family; it notes which were read."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._values = values
        self._defaults = defaults
        self._read: set[str] = set()
        self.problems: list[str] = []

    def __getitem__(self, name: str) -> Any:
        """Return a field, or the default of the family.

        A field of another kind than the default is a problem.
        """
        self._read.add(name)
        default = self._defaults.get(name)
        value = self._values.get(name, default)
        if (
            value is None
            or default is None
            or name in _OF_ANY_KIND
            or _kind(value) == _kind(default)
        ):
            return value
        self.problems.append(f"{name} is {value!r}, must be {_kind(default)}")
        return default

    def size(self, name: str) -> int:
        """Return a field that must be a positive integer."""
        value = self[name]
        if _kind(value) == "a number" and isinstance(value, int) and value > 0:
            return value
        self.problems.append(f"{name} is {value!r}, must be a positive integer")
        return 1

    def optional_size(self, name: str) -> int | None:
        """Return a field that must be a positive integer or null."""
        return None if self[name] is None else self.size(name)

    def number(self, name: str) -> float:
        """Return a field that must be a positive number."""
        value = self[name]
        if _kind(value) == "a number" and value > 0:
            return value
        self.problems.append(f"{name} is {value!r}, must be a positive number")
        return 1.0

    def record(self, name: str) -> Record:
        """Return a field that must be an object or null."""
        value = self[name] or {}
        if isinstance(value, dict):
            return value
        self.problems.append(f"{name} is {value!r}, must be an object")
        return {}

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse a field unless it has an allowed value."""
        value = self[name]
        if value not in allowed:
            self.problems.append(f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))}")

    def choice(self, name: str, values: Mapping[Any, Any]) -> Any:
        """Return the meaning of a field's value."""
        value = self[name]
        if value in values:
            return values[value]
        self.problems.append(f"{name} is {value!r}, must be one of {quoted(values)}")
        return next(iter(values.values()))

    def skip(self, *names: str) -> None:
        """Note fields that have no effect in this family."""
        self._read.update(names)

    def unread_problems(self) -> list[str]:
        """Return a problem for each field that was not read and asks for something: it is neither
        null nor false.
        """
        return [
            f"{name} is {value!r}, which the decoder does not know"
            for name, value in self._values.items()
            if name not in self._read | NEUTRAL
            and not name.endswith(_NEUTRAL_ENDS)
            and value is not None
            and value is not False
        ]

    def rope(self, head_dim: int, group: str | None = None, **changes: Any) -> Rope:
        """Return the rotary positions that the fields describe.

        Args:
          head_dim: dims of a head that can rotate.
          group: the entry of "rope_parameters" for blocks of one type, if it has entries by type.
          changes: fields of the old form that blocks of this type have differently.
        """
        described = self._rope_scaling(group, changes)
        scaling = dict(described)
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        scaling.pop("type", None)
        base = scaling.pop("rope_theta", changes.get("rope_theta", self["rope_theta"])) or 10_000.0
        share = scaling.pop("partial_rotary_factor", self["partial_rotary_factor"])
        if "partial_rotary_factor" not in self._defaults and share not in (None, 1):
            self.problems.append(
                f"partial_rotary_factor is {share!r}, and all dims of this family's heads rotate"
            )
        dims = None if share in (None, 1) else int(head_dim * share)
        kind = "longrope" if kind == "su" else kind  # the name in older files
        if kind not in _KINDS:
            self.problems.append(f"rope_type is {kind!r}, must be one of {quoted(_KINDS)}")
            return Rope()
        try:
            base = float(base)
            values = _KINDS[kind](scaling, self)
        except KeyError as error:
            self.problems.append(f"rope_scaling has no {error.args[0]!r}, which {kind!r} needs")
            return Rope()
        except (TypeError, ValueError):
            self.problems.append(
                f"rope_scaling is {described}, and has no numbers where {kind!r} needs them"
            )
            return Rope()
        self.problems += [
            f"rope_scaling.{name} is {value!r}, which {kind!r} does not know"
            for name, value in scaling.items()
            if value is not None
        ]
        rope = Rope(base=base, dims=dims, interleaved=bool(changes.get("interleaved")), **values)
        self._check_pairs(rope, head_dim)
        return rope

    def _rope_scaling(self, group: str | None, changes: Mapping[str, Any]) -> Record:
        """Return the entries that describe the rotary positions of blocks of one type."""
        old = changes.get("rope_scaling", self.record("rope_scaling"))
        new = self.record("rope_parameters")
        is_grouped = any(isinstance(value, dict) for value in new.values())
        if old and not ("rope_parameters" in self._values and is_grouped):
            return dict(old)  # the old form replaces the new one, unless that has groups
        if group in new:
            new = new[group] or {}
        elif is_grouped:
            new = {}
        return dict(new) | dict(old)

    def _check_pairs(self, rope: Rope, head_dim: int) -> None:
        """Note a "longrope" whose numbers are not one for each pair."""
        num_pairs = (rope.dims or head_dim) // 2
        for name, numbers in (("short", rope.short), ("long", rope.long)):
            if len(numbers) not in (0, num_pairs):
                self.problems.append(
                    f"rope_scaling.{name}_factor has {len(numbers)} numbers, must be {num_pairs}"
                )

    def kinds(
        self, types: Sequence[str] | None, window: int | None, rope_of: Callable[[str], Rope | None]
    ) -> Record:
        """Return `kinds` and `pattern` of a `DecoderConfig` from the type of each block,
        "full_attention" or "sliding_attention".
        """
        if types is None:
            return {"kinds": (BlockKind(window, rope_of("full_attention")),)}
        names = list(dict.fromkeys(types))
        unknown = sorted(set(names) - {"full_attention", "sliding_attention"})
        if unknown:
            self.problems.append(
                f"layer_types has {quoted(unknown)}, which the decoder does not know"
            )
        kinds = tuple(
            BlockKind(window if name == "sliding_attention" else None, rope_of(name))
            for name in names
        )
        return {"kinds": kinds, "pattern": tuple(map(names.index, types)) if len(kinds) > 1 else ()}


def check_fields(folder: object, fields: Fields) -> None:
    """Refuse the config.json of a folder with every problem.

    Raises:
      ValueError: if there is a problem.
    """
    # the only field of all models that asks for something when it is false
    fields.require("is_causal", None, True)
    fields.require("router_jitter_noise", None, 0.0)
    problems = fields.problems + fields.unread_problems()
    if problems:
        raise value_error(
            f"{folder} describes a model that the decoder cannot be.",
            problems,
            "the decoder reads float weights of text models; docs/howto/open_weights.md lists"
            " the families, and says how quantized weights become floats.",
        )


def _plain(scaling: Record, fields: Fields) -> Record:
    scaling.pop("original_max_position_embeddings", None)
    fields.skip("original_max_position_embeddings")
    return {}


def _linear(scaling: Record, fields: Fields) -> Record:
    return {"kind": "linear", "factor": float(scaling.pop("factor"))}


def _length(scaling: Record, fields: Fields) -> int:
    trained_length = scaling.pop("original_max_position_embeddings", None)
    return (
        fields["original_max_position_embeddings"]
        or trained_length
        or fields["max_position_embeddings"]
    )


def _factor(scaling: Record, fields: Fields, length: int) -> float:
    """Return how many times longer rows may be than in training."""
    return float(scaling.pop("factor", None) or fields["max_position_embeddings"] / length)


def _llama3(scaling: Record, fields: Fields) -> Record:
    return {
        "kind": "llama3",
        "slow": float(scaling.pop("low_freq_factor")),
        "fast": float(scaling.pop("high_freq_factor")),
        "factor": float(scaling.pop("factor")),
        "length": _length(scaling, fields),
    }


def _yarn(scaling: Record, fields: Fields) -> Record:
    length = _length(scaling, fields)
    factor = _factor(scaling, fields, length)
    scale = scaling.pop("mscale", None)
    scale_of_all = scaling.pop("mscale_all_dim", None)
    attention_factor = scaling.pop("attention_factor", None)
    if attention_factor is None:
        attention_factor = (
            yarn_scale(factor, scale) / yarn_scale(factor, scale_of_all)
            if scale and scale_of_all
            else yarn_scale(factor, 1)
        )
    return {
        "kind": "yarn",
        "factor": factor,
        "length": length,
        "slow": float(scaling.pop("beta_slow", None) or 1),
        "fast": float(scaling.pop("beta_fast", None) or 32),
        "truncate": scaling.pop("truncate", True) is not False,
        "attention_factor": float(attention_factor),
    }


def _longrope(scaling: Record, fields: Fields) -> Record:
    length = _length(scaling, fields)
    factor = _factor(scaling, fields, length)
    attention_factor = scaling.pop("attention_factor", None)
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
        )
    return {
        "kind": "longrope",
        "short": tuple(map(float, scaling.pop("short_factor"))),
        "long": tuple(map(float, scaling.pop("long_factor"))),
        "length": length,
        "attention_factor": float(attention_factor),
    }


def yarn_scale(factor: float, scale: float | int) -> float:
    """Return the factor of yarn for rows that are `factor` times longer: 0.1 scale log(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


_KINDS = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
