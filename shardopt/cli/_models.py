"""The model of `shardopt train`: loss, initial parameters, sampling and a description."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from shardopt.cli._options import ModelOptions
from shardopt.core._block_model import BlockModel
from shardopt.core._errors import plural
from shardopt.core._types import PyTree
from shardopt.models import gpt, sample


class TrainedModel(NamedTuple):
    """A model of a certain shape.

    Attributes:
      block_model: the model with its loss.
      init: `init(rng)` returns its parameters.
      sample: `sample(params, prompt, rng, num_tokens=, temperature=)`.
      size: a description of its size, for people.
    """

    block_model: BlockModel
    init: Callable[[jax.Array], PyTree]
    sample: Callable[..., jax.Array]
    size: str


def model_of(options: ModelOptions) -> TrainedModel:
    """Return the model for these options. Their number of layers must be set."""
    assert options.layers is not None
    config = gpt.config(
        dim=options.dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_length=max(1024, options.length),
        precision=options.precision,
    )
    return TrainedModel(
        gpt.model(config),
        functools.partial(gpt.init, config),
        lambda params, *args, **kwargs: sample(params, config, *args, **kwargs),
        f"{gpt.num_parameters(config) / 1e6:.2f} million parameters:"
        f" {plural(options.layers, 'block')} of width {options.dim},"
        f" {plural(options.heads, 'head')}",
    )
