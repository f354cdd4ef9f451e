"""From the words on the command line to an exit code."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

from shardopt.cli.communication import with_meaning
from shardopt.cli.launch import LaunchOptions, launch, split_words
from shardopt.cli.options import Pipeline, TrainOptions
from shardopt.cli.plan import AuditOptions, PlanOptions, ScheduleOptions, audit, plan, schedule
from shardopt.cli.run_folder import read_options
from shardopt.runtime.processes import end_at_once

_STYLE = (tyro.conf.HelptextFromCommentsOff,)
_COMMANDS = {
    "train": TrainOptions,
    "launch": LaunchOptions,
    "plan": PlanOptions,
    "audit": AuditOptions,
    "schedule": ScheduleOptions,
}
_PLANNING: dict[type, Callable[[Any], None]] = {PlanOptions: plan, AuditOptions: audit, ScheduleOptions: schedule}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `shardopt` and return its exit code: 0, 2 for what cannot be done as asked, 130 for a second Ctrl-C.

    One of several processes that fails ends here, without returning: it would wait for the others, and they for it.
    """
    words, command = split_words(sys.argv[1:] if arguments is None else arguments)
    options = _parse(words, TrainOptions())
    try:
        if isinstance(options, LaunchOptions):
            return launch(options, command, _train_options)
        if isinstance(options, TrainOptions):
            _train(words, options)
        else:
            _PLANNING[type(options)](options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if isinstance(options, TrainOptions) and options.run.debug:
            raise
        _print_error(error)
        end_at_once(2)
        return 2
    return 0


def _train(words: Sequence[str], options: TrainOptions) -> None:
    if options.run.resume:
        before = _as_before(options)
        options = _train_options(words, _carried_over(before, _train_options(words, before)))
    from shardopt.cli.train import train  # no sooner: asking for help need not wait for it

    train(options)


def _train_options(words: Sequence[str], defaults: TrainOptions | None = None) -> TrainOptions:
    """Read the words of train."""
    options = _parse(words, defaults or TrainOptions())
    assert isinstance(options, TrainOptions)
    return options


def _parse(words: Sequence[str], defaults: TrainOptions) -> Any:
    app = tyro.extras.SubcommandApp()
    for name, kind in _COMMANDS.items():
        default = defaults if kind is TrainOptions else kind()
        app.command(name=name)(_giving_back(kind, default))
    return app.cli(prog="shardopt", description="Train models split over devices.", args=words, config=_STYLE)


def _giving_back(kind: type, default: Any) -> Callable[[Any], Any]:
    """Return a function of the options of one command, which tyro reads off its signature."""

    def command(options: Any = default) -> Any:
        return options

    command.__annotations__ = {"options": Annotated[kind, tyro.conf.arg(name="")]}
    command.__doc__ = kind.__doc__
    return command


def _as_before(options: TrainOptions) -> TrainOptions:
    """Return the options of the run to go on with, to be overridden by those given now."""
    saved = read_options(options.run.run_dir)
    here = dataclasses.replace(saved.run, run_dir=options.run.run_dir, debug=False)
    return dataclasses.replace(saved, run=here)


def _carried_over(before: TrainOptions, now: TrainOptions) -> TrainOptions:
    """Return the saved options without those that have no meaning under the strategy or schedule asked for now."""
    before = dataclasses.replace(before, communication=with_meaning(before.communication, now))
    if now.where.strategy != "hybrid":
        return dataclasses.replace(before, pipeline=Pipeline())
    if now.pipeline.schedule != before.pipeline.schedule:
        return dataclasses.replace(before, pipeline=dataclasses.replace(before.pipeline, chunks=None))
    return before


def _print_error(error: BaseException) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print("[bold red]error:[/] ", end="")
    console.print(str(error) or type(error).__name__, markup=False, highlight=False, soft_wrap=True)
