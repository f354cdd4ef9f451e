"""Continue tokens by any number, with a decoder that has seen only so many at a time."""

import jax
import numpy as np

from shardopt.core import PyTree, value_error
from shardopt.models import sample
from shardopt.models._decoder_config import DecoderConfig


def continue_tokens(
    params: PyTree,
    config: DecoderConfig,
    prompt: np.ndarray,
    *,
    num_tokens: int,
    length: int,
    temperature: float,
    top_k: int | None = None,
    seed: int,
) -> np.ndarray:
    """Return the prompt with as many more tokens.

    When the model has `length` tokens before it, it goes on from the last half of them. All steps
    from a half use one compiled program.
    """
    tokens = prompt
    window = prompt if len(prompt) < length else prompt[-(length // 2) :]
    while len(tokens) < len(prompt) + num_tokens:
        rng = jax.random.fold_in(jax.random.key(seed), len(tokens))
        count = min(length - len(window), num_tokens)
        continued = sample(
            params,
            config,
            window[None],
            rng,
            num_tokens=count,
            temperature=temperature,
            top_k=top_k,
        )
        new_tokens = np.asarray(continued)[0, len(window) :]
        if new_tokens.min() < 0:
            raise value_error("the logits of the model are NaN.", fix="take an earlier checkpoint.")
        tokens = np.concatenate([tokens, new_tokens])
        window = tokens[-(length // 2) :]
    return tokens[: len(prompt) + num_tokens]
