"""Options that mean something under a condition only: elsewhere they are refused, and a resumed run
drops the saved ones.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardopt.cli._options import Options, PipelineOptions, RunOptions, changed_flags
from shardopt.core import plural, value_error


class Condition(NamedTuple):
    """A condition on the options of a run.

    Attributes:
      names: the options that need it.
      holds: whether it holds.
      purpose: their use, and the choice that the user made instead; with fields of `options`.
      choice: how to make it hold.
    """

    names: Iterable[str]
    holds: Callable[[RunOptions], bool]
    purpose: str
    choice: str


def _gathers(options: RunOptions) -> bool:
    return options.placement == "fsdp"


CONDITIONS = (
    Condition(
        tuple(vars(PipelineOptions())),
        lambda options: options.is_hybrid,
        "for --strategy hybrid; {options.where.strategy} was asked for",
        "choose --strategy hybrid",
    ),
    Condition(
        ("gather_dtype",),
        _gathers,
        "for placements that gather weights; {options.strategy_text} does not",
        "choose --strategy fsdp, or hybrid with --placement fsdp",
    ),
    Condition(
        ("lora_alpha", "lora_dropout", "lora_targets", "base"),
        lambda options: getattr(options.model, "lora_rank", None) is not None,
        "for adapters, and --lora-rank is not given",
        "add --lora-rank 16",
    ),
)


def check_conditions(options: RunOptions) -> None:
    """Refuse options whose condition does not hold."""
    for condition in CONDITIONS:
        flags = changed_flags(options, condition.names)
        if flags and not condition.holds(options):
            purpose = condition.purpose.format(options=options)
            problem = f"{plural(len(flags), 'option')} {purpose}."
            raise value_error(problem, flags, f"leave out what is listed, or {condition.choice}.")


def saved_defaults(saved: Options, current: Options) -> Options:
    """Return the saved options of a run, without options of the pipeline that mean nothing under the
    current options.
    """
    dropped = {
        name for condition in CONDITIONS if not condition.holds(current) for name in condition.names
    }
    defaults = vars(PipelineOptions())
    changes = {name: defaults[name] for name in dropped & defaults.keys()}
    return dataclasses.replace(saved, pipeline=dataclasses.replace(saved.pipeline, **changes))
