"""What runs next to the steps of `fit`: norms, profiles, verified steps."""

from collections.abc import Callable
from typing import Protocol

from shardopt.core import PyTree, TrainState
from shardopt.step._optimizer import Metrics

TakeStep = Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]
"""`opt.step`, or a function that takes the same step by another program."""


class Hook(Protocol):
    """A part of a run that `fit` calls around its steps.

    A method that a hook does not define does nothing.
    """

    def before_step(self, step: int, position: int) -> TakeStep | None:
        """Return the function that takes the next step in place of `opt.step`, or None.

        The first hook that returns a function takes the step; the hooks after it are not called.

        Args:
          step: the number of the step, counted from 0.
          position: how many batches were drawn before its batch.
        """
        return None

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Act after a step was given to the devices, which may still compute it.

        Args:
          step: its number, counted from 0.
          metrics: its metrics, on the devices.
        """

    def at_wait(self) -> None:
        """Act when the run waits for the last step: before it evaluates, saves or ends."""
