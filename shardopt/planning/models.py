"""Published models by name, as `Transformer` shapes."""

import functools

from shardopt.core.errors import complaint
from shardopt.planning.transformer import Transformer

_llama = functools.partial(Transformer, num_kv_heads=8)
_gpt = functools.partial(Transformer, gated=False, tied=True, vocab_size=50257, positions=1024, length=1024)

MODELS = {
    shape.name: shape
    for shape in (
        # Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2; released sizes
        _gpt("gpt2", dim=768, num_layers=12, num_heads=12, hidden=3072),
        _gpt("gpt2-xl", dim=1600, num_layers=48, num_heads=25, hidden=6400),
        # Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, and its published configuration
        _llama("llama2-70b", dim=8192, num_layers=80, num_heads=64, hidden=28672, vocab_size=32000, length=4096),
        # Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3
        _llama("llama3-8b", dim=4096, num_layers=32, num_heads=32, hidden=14336, vocab_size=128256, length=8192),
        _llama("llama3-70b", dim=8192, num_layers=80, num_heads=64, hidden=28672, vocab_size=128256, length=8192),
        _llama("llama3-405b", dim=16384, num_layers=126, num_heads=128, hidden=53248, vocab_size=128256, length=8192),
    )
}
"""Shapes by name, at the sequence length they were trained with."""


def find_model(who: str, name: str | Transformer) -> Transformer:
    """Return the shape of a name; a `Transformer` of one's own is returned as it is.

    Raises:
      TypeError: if it is neither.
      ValueError: if the name is unknown.

    Example:
      >>> round(find_model("plan", "llama3-8b").num_parameters / 1e9, 2)
      8.03
    """
    if isinstance(name, Transformer):
        return name
    if not isinstance(name, str):
        fix = "pass a name such as 'llama3-8b', a so.planning.Transformer, or so.planning.trace(model, ...)."
        raise TypeError(complaint(who, f"model must be a name, a Transformer or a Workload, got {name!r}.", fix=fix))
    short = name.lower().strip().replace("llama-", "llama").replace("llama3.1-", "llama3-")
    if short not in MODELS:
        fix = f"use one of {', '.join(MODELS)}, or describe it with so.planning.Transformer."
        raise ValueError(complaint(who, f"unknown model {name!r}.", fix=fix))
    return MODELS[short]
