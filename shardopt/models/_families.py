"""The families that `from_pretrained` reads, and the types that it refuses with a reason."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardopt.models import _dense_readers, _expert_readers
from shardopt.models._family import Family

_FOLDER = Path(__file__).parent
_TENSORS = json.loads((_FOLDER / "tensors.json").read_text(encoding="utf-8"))
"""The name of a group -> name of a tensor, or of a module whose weight and bias it is ("name.*") -> the
leaf, or the leaves that it joins."""
_READERS = _dense_readers.READERS | _expert_readers.READERS
_LLAMA_BLOCK = ["pre_norms", "qkv", "out", "qk_norms", "mlp"]


def _tensors(groups: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return tensor name -> its leaves, for the tensors of some groups."""
    tensors: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for name, text in _TENSORS[group].items():
            leaves = tuple(text.split())
            module = name.removesuffix(".*")
            if module == name:
                tensors[name] = leaves
            else:
                tensors[f"{module}.weight"] = leaves
                tensors[f"{module}.bias"] = tuple(f"{leaf}_bias" for leaf in leaves)
    return tensors


def _family(
    reader: str, tensors: Sequence[str] = _LLAMA_BLOCK, outer: str = "model", **options: Any
) -> Family:
    """Return a family of `families.json`.

    Args:
      reader: the name of a reader.
      tensors: the groups of the tensors of a block.
      outer: the group of the tensors outside of blocks.
      options: the other attributes of `Family`.
    """
    outer_tensors = {name: leaf for name, (leaf,) in _tensors([outer]).items()}
    return Family(_READERS[reader], _tensors(tensors), outer_tensors, **options)


FAMILIES: dict[str, Family] = {
    name: _family(**record)
    for name, record in json.loads((_FOLDER / "families.json").read_text(encoding="utf-8")).items()
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
