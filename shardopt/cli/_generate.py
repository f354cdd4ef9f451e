"""`shardopt generate`: continue a text or token ids, with the weights of a run or open weights."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardopt import data
from shardopt.cli._display import printable
from shardopt.cli._export import Weights, read_weights
from shardopt.cli._options import GenerateOptions, check_numbers
from shardopt.cli._sample import continue_tokens
from shardopt.core import calling, value_error
from shardopt.core._extras import require

_BYTES = 256
"""The vocabulary of a model on bytes, as `train` makes it."""


class _Codec(NamedTuple):
    """How a prompt is read, and how tokens are written."""

    encode: Callable[[str], np.ndarray]
    decode: Callable[[np.ndarray], str]


@calling("generate")
def generate(options: GenerateOptions) -> None:
    """Print the prompt and its continuation."""
    check_numbers(options)
    weights = read_weights(options.weights, options.step)
    codec = _codec_of_ids() if options.ids else _codec_of_text(weights)
    prompt = codec.encode(options.prompt)
    if not len(prompt):
        raise value_error("the prompt is empty.", fix="give at least one token to begin with.")
    tokens = continue_tokens(
        weights.params,
        weights.config,
        prompt,
        num_tokens=options.num_tokens,
        length=weights.length,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(codec.decode(tokens))


def _codec_of_ids() -> _Codec:
    def encode(text: str) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split(",")], np.int32)
        except ValueError:
            fix = "write token ids such as 1,2,3, or leave out --ids."
            raise value_error(f"the prompt {text} cannot be read.", fix=fix) from None

    return _Codec(encode, lambda tokens: ",".join(map(str, tokens)))


def _codec_of_text(weights: Weights) -> _Codec:
    if weights.tokenizer is not None:
        require("tokenizers", extra="huggingface")
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(weights.tokenizer))
        except Exception as error:  # tokenizers raises no class of its own
            fix = "copy the file again from where it came, or give token ids with --ids."
            raise value_error(f"{weights.tokenizer} is damaged: {error}.", fix=fix) from error
        return _Codec(
            lambda text: np.array(tokenizer.encode(text).ids, np.int32),
            lambda tokens: printable(tokenizer.decode(tokens.tolist())),
        )
    if weights.config.vocab_size != _BYTES:
        problem = "the folder has no tokenizer.json, so that a text cannot be read."
        raise value_error(problem, fix="give token ids: --ids, and 1,2,3 in place of the text.")
    return _Codec(data.encode, lambda tokens: printable(data.decode(tokens)))
