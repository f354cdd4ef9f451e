"""The models that `shardopt train --model` names, each as what training needs of it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardopt.cli.options import Model
from shardopt.core.block_model import BlockModel
from shardopt.core.errors import format_error, plural
from shardopt.models import gpt, moe


class TrainedModel(NamedTuple):
    """A model of some shape.

    Attributes:
      block_model: its loss.
      init: `init(rng)`, its parameters.
      sample: `sample(params, prompt, rng, num_tokens=, temperature=)`.
      size: what a person is told of it.
    """

    block_model: BlockModel
    init: Callable[[jax.Array], gpt.Params]
    sample: Callable[..., jax.Array]
    size: str


def model_of(options: Model) -> TrainedModel:
    """Return the model that the options describe, whose number of layers is known."""
    assert options.layers is not None
    shape: dict[str, Any] = {"dim": options.dim, "num_layers": options.layers, "num_heads": options.heads}
    shape["max_length"] = max(1024, options.length)
    blocks = f"{plural(options.layers, 'block')} of width {options.dim}, {plural(options.heads, 'head')}"
    if options.model == "gpt":
        config = gpt.GPTConfig(**shape, precision=options.precision)
        return TrainedModel(
            gpt.model(config),
            functools.partial(gpt.init, config),
            lambda params, *args, **how: gpt.sample(params, config, *args, **how),
            f"{gpt.num_parameters(config) / 1e6:.2f} million parameters: {blocks}",
        )
    mixture = moe.MoEConfig(
        **shape,
        num_experts=options.experts,
        top_k=options.top_k,
        # those of a token have as many hidden units as the mlp of the gpt
        hidden=-(-3 * options.dim // options.top_k),
        balance=None if options.balance == "none" else options.balance,
    )
    count, active = (moe.num_parameters(mixture, active=active) / 1e6 for active in (False, True))
    return TrainedModel(
        moe.model(mixture),
        functools.partial(moe.init, mixture),
        lambda params, *args, **how: moe.sample(params, mixture, *args, **how),
        f"{count:.2f} million parameters, {active:.2f} of them for each token: {blocks}, "
        f"{options.top_k} of {plural(options.experts, 'expert')}",
    )


def strategy_arguments(options: Model) -> dict[str, Any]:
    """Return what a strategy is told of the leaves of the model."""
    if options.model == "gpt":
        return {"rules": gpt.rules}
    return {"rules": moe.rules, "expert_leaves": moe.expert_leaves, "frozen": moe.frozen}


def check_model(options: Model) -> None:
    """Refuse options of one model for the other, and numbers that cannot be."""
    given = {"experts": options.experts, "top-k": options.top_k, "balance": options.balance}
    plain = Model()
    other = [f"--{name} {value}" for name, value in given.items() if value != getattr(plain, name.replace("-", "_"))]
    if options.model == "gpt" and other:
        what = f"{plural(len(other), 'option')} for --model moe; gpt was asked for."
        raise ValueError(format_error("train", what, other, "leave out what is listed, or choose --model moe."))
    if options.model == "moe" and options.precision:
        what = f"--precision {options.precision} is for --model gpt; moe was asked for."
        raise ValueError(format_error("train", what, fix="leave it out, or choose --model gpt."))
