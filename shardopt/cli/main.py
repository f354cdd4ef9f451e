"""From the words on the command line to an exit code."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from shardopt.cli.communication import with_meaning
from shardopt.cli.options import Pipeline, TrainOptions
from shardopt.cli.run_folder import read_options

_STYLE = (tyro.conf.HelptextFromCommentsOff,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `shardopt` and return its exit code: 0, 2 for what cannot be done as asked, 130 for a second Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parse(words, TrainOptions())
    try:
        if options.run.resume:
            before = _as_before(options)
            options = _parse(words, _carried_over(before, _parse(words, before)))
        from shardopt.cli.train import train  # no sooner: asking for help need not wait for it

        train(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        if options.run.debug:
            raise
        _print_error(error)
        return 2
    return 0


def _parse(words: Sequence[str], defaults: TrainOptions) -> TrainOptions:
    app = tyro.extras.SubcommandApp()

    @app.command(name="train")
    def train(options: Annotated[TrainOptions, tyro.conf.arg(name="")] = defaults) -> TrainOptions:
        return options

    train.__doc__ = TrainOptions.__doc__
    return app.cli(prog="shardopt", description="Train models split over devices.", args=words, config=_STYLE)


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
