"""A run in its folder: `shardopt train` and `shardopt tune` train, save, log and draw in the same
way.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
from rich.console import Console

import shardopt as so
from shardopt.cli import _display as display
from shardopt.cli._options import RunOptions
from shardopt.cli._run_folder import METRICS, order_changes, write_options
from shardopt.core import PyTree, TrainState
from shardopt.training._fit import FitResult


class RunInFolder(NamedTuple):
    """A run before its first step.

    Attributes:
      options: the options.
      opt: the strategy.
      screen: the output for people.
      num_bytes: the size of the data.
      steps: total steps.
    """

    options: RunOptions
    opt: so.ShardedOptimizer
    screen: Console
    num_bytes: int
    steps: int

    def run(
        self,
        start: Callable[[], TrainState | so.training.DeferredInit],
        batches: Iterable[PyTree],
        held_out: list[PyTree],
        checkpoints: so.Checkpoints,
    ) -> FitResult:
        """Train from the state that `start` makes; if a signal ends the run, say so."""
        options = self.options
        run = self.options.run
        if run.resume:
            display.show_order_changes(self.screen, order_changes(options, self.num_bytes))
        with checkpoints:
            if jax.process_index() == 0:  # the folder is locked now
                write_options(options, self.num_bytes)
            result = so.fit(
                self.opt,
                start(),
                so.GlobalRows(batches),
                num_steps=self.steps,
                evaluate=(
                    so.training.evaluation(self.opt, so.GlobalRows(held_out)),
                    run.evaluate_every,
                ),
                norms_every=run.norms_every,
                checkpoints=checkpoints,
                log=so.training.jsonl(run.run_dir / METRICS),
            )
        if result.exit_code:
            display.show_stopped(self.screen, options, result, self.steps)
        return result
