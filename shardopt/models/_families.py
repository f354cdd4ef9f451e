"""The families that `from_pretrained` reads, and the types that it refuses with a reason."""

import json
from pathlib import Path

from shardopt.models import (
    _expert_families,
    _layer_norm_families,
    _post_norm_families,
    _pre_norm_families,
)
from shardopt.models._family import Family

_PUBLISHED = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
"""model_type -> its classes, and what its config.json means where it leaves a field out."""

FAMILIES: dict[str, Family] = {
    name: family._replace(**_PUBLISHED[name])
    for name, family in (
        _pre_norm_families.FAMILIES
        | _post_norm_families.FAMILIES
        | _layer_norm_families.FAMILIES
        | _expert_families.FAMILIES
    ).items()
}
"""model_type of config.json -> family."""

_BIASES_ON_SCORES = "positions are added to the scores of attention (alibi)"
_PARALLEL_WITH_PAIRS = "its rotary pairs and joined weights have an order of their own"
UNFIT: dict[str, str] = {
    "apertus": "its activation has weights (xielu)",
    "bloom": _BIASES_ON_SCORES,
    "codegen": _PARALLEL_WITH_PAIRS,
    "deepseek_v2": "the experts of a token are chosen in another way",
    "ernie4_5_moe": "the router has its bias in another form",
    "gemma3": "it has a vision tower; the text model alone has model_type 'gemma3_text'",
    "gemma3n": "each block has embeddings of its own",
    "granitemoe": "the experts of a block are in one tensor",
    "llama4": "the experts get scaled inputs, and attention is by chunks",
    "mamba": "it has no attention",
    "ministral3": "queries have a factor that grows with their position",
    "mllama": "it has a vision tower",
    "mpt": _BIASES_ON_SCORES,
    "opt": "its positions begin with the third row of a table",
}
"""model_type -> what the decoder does not have."""
