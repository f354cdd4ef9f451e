"""The models of `shardopt train --model`: loss, initial parameters, sampling and a description."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardopt.cli._options import Model, changed_flags
from shardopt.core._block_model import BlockModel
from shardopt.core._errors import format_error, plural
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


def model_of(options: Model) -> TrainedModel:
    """Return the model for these options. Their number of layers must be set."""
    assert options.layers is not None
    shape: dict[str, Any] = {
        "dim": options.dim,
        "num_layers": options.layers,
        "num_heads": options.heads,
    }
    shape["max_length"] = max(1024, options.length)
    blocks_text = (
        f"{plural(options.layers, 'block')} of width {options.dim}, {plural(options.heads, 'head')}"
    )
    if options.model == "gpt":
        config = gpt.GPTConfig(**shape, precision=options.precision)
        return TrainedModel(
            gpt.model(config),
            functools.partial(gpt.init, config),
            lambda params, *args, **kwargs: sample(params, config, *args, **kwargs),
            f"{gpt.num_parameters(config) / 1e6:.2f} million parameters: {blocks_text}",
        )
    mixture = moe.MoEConfig(
        **shape,
        num_experts=options.experts,
        top_k=options.top_k,
        # the experts of a token together have as many hidden units as the mlp of the gpt
        hidden=-(-3 * options.dim // options.top_k),
        balance=None if options.balance == "none" else options.balance,
    )
    total_millions, active_millions = (
        moe.num_parameters(mixture, active=active) / 1e6 for active in (False, True)
    )
    return TrainedModel(
        moe.model(mixture),
        functools.partial(moe.init, mixture),
        lambda params, *args, **kwargs: sample(params, mixture, *args, **kwargs),
        f"{total_millions:.2f} million parameters, {active_millions:.2f} of them for each token:"
        f" {blocks_text}, {options.top_k} of {plural(options.experts, 'expert')}",
    )


def strategy_arguments(options: Model) -> dict[str, Any]:
    """Return the arguments of a strategy that describe the leaves of the model."""
    if options.model == "gpt":
        return {"rules": gpt.rules}
    return {"rules": moe.rules, "expert_leaves": moe.expert_leaves, "frozen": moe.frozen}


def check_model(options: Model) -> None:
    """Refuse options that belong to the other model."""
    moe_flags = changed_flags(options, ("experts", "top_k", "balance"))
    if options.model == "gpt" and moe_flags:
        problem = f"{plural(len(moe_flags), 'option')} for --model moe; gpt was asked for."
        raise ValueError(
            format_error(
                "train", problem, moe_flags, "leave out what is listed, or choose --model moe."
            )
        )
    if options.model == "moe" and options.precision:
        problem = f"--precision {options.precision} is for --model gpt; moe was asked for."
        raise ValueError(format_error("train", problem, fix="leave it out, or choose --model gpt."))
