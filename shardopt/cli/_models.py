"""The models of `shardopt train --model`: loss, initial parameters, sampling and a description."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardopt.cli._options import ModelOptions
from shardopt.core._block_model import BlockModel
from shardopt.core._errors import plural
from shardopt.models import gpt, moe, sample


class TrainedModel(NamedTuple):
    """A model of a certain shape.

    Attributes:
      block_model: the model with its loss.
      init: `init(rng)` returns its parameters.
      sample: `sample(params, prompt, rng, num_tokens=, temperature=)`.
      size: a description of its size, for people.
    """

    block_model: BlockModel
    init: Callable[[jax.Array], gpt.Params]
    sample: Callable[..., jax.Array]
    size: str


def model_of(options: ModelOptions) -> TrainedModel:
    """Return the model for these options. Their number of layers must be set."""
    assert options.layers is not None
    shape: dict[str, Any] = {
        "dim": options.dim,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "max_length": max(1024, options.length),
    }
    blocks_text = (
        f"{plural(options.layers, 'block')} of width {options.dim}, {plural(options.heads, 'head')}"
    )
    module: Any = gpt
    config: Any = None
    if options.model == "gpt":
        config = gpt.GPTConfig(**shape, precision=options.precision)
        size = f"{gpt.num_parameters(config) / 1e6:.2f} million parameters: {blocks_text}"
    else:
        module = moe
        config = moe.MoEConfig(
            **shape,
            num_experts=options.experts,
            top_k=options.top_k,
            # the experts of a token together have as many hidden units as the mlp of the gpt
            hidden=-(-3 * options.dim // options.top_k),
            balance=None if options.balance == "none" else options.balance,
        )
        size = (
            f"{moe.num_parameters(config, active=False) / 1e6:.2f} million parameters,"
            f" {moe.num_parameters(config, active=True) / 1e6:.2f} of them for each token:"
            f" {blocks_text}, {options.top_k} of {plural(options.experts, 'expert')}"
        )
    return TrainedModel(
        module.model(config),
        functools.partial(module.init, config),
        lambda params, *args, **kwargs: sample(params, config, *args, **kwargs),
        size,
    )


def strategy_arguments(options: ModelOptions) -> dict[str, Any]:
    """Return the arguments of a strategy that describe the leaves of the model."""
    return {"rules": gpt.rules if options.model == "gpt" else moe.rules}
