"""Norms of each leaf and layer in `fit`: steps that are due compute them, and the log gets them one
step late.
"""

import jax

from shardopt.core._arguments import check_count
from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, TrainState
from shardopt.step._norms import Norms
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._loggers import Log


def check_metrics_every(
    opt: ShardedOptimizer, metrics_every: int | None, verify_every: int | None
) -> None:
    """Check the argument of `fit`.

    Raises:
      TypeError: if it is no integer.
      ValueError: if it is below 1, the replicas of the strategy train apart, or every step is
        verified.
    """
    if metrics_every is None:
        return
    check_count("metrics_every", metrics_every)
    if opt.config.per_replica:
        problem = (
            f"metrics_every takes norms of one gradient, and the replicas of {opt.config.strategy}"
            " train apart."
        )
        raise ValueError(format_error("fit", problem, fix="leave metrics_every out."))
    if verify_every == 1:
        problem = (
            "metrics_every takes norms in steps that are not verified, and verify_every=1 verifies"
            " each step."
        )
        raise ValueError(
            format_error(
                "fit", problem, fix="take verify_every=2 or more, or leave metrics_every out."
            )
        )


class NormLog:
    """Takes steps.

    Every `every` steps it takes the step with norms, and logs them once they have arrived.

    Args:
      opt: the strategy.
      every: the steps between norms; None for none.
      write_log: writes metrics of a step.
    """

    def __init__(self, opt: ShardedOptimizer, every: int | None, write_log: Log):
        self._opt, self._every, self._write_log = opt, every, write_log
        self._pending: tuple[int, Norms] | None = None
        self._late = False

    def due(self, number: int) -> bool:
        """Return whether the step with this number computes norms."""
        return self._late or (self._every is not None and (number + 1) % self._every == 0)

    def leave_to_next(self, number: int) -> None:
        """Let the next step compute the norms, if this one is due and was taken by a program
        without norms.
        """
        self._late = self.due(number)

    def step(
        self, number: int, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return `opt.step(state, batch)`, the step with this number, counted from 0.

        The norms of an earlier step are written while the device computes this one.
        """
        if not self.due(number):
            results = self._opt.step(state, batch)
            self.write()
            return results
        state, metrics, norms = self._opt.step.with_norms(state, batch)
        self.write()
        self._late = False
        self._pending = number + 1, norms
        return state, metrics

    def write(self) -> None:
        """Write the norms of the last step that computed them, unless they are written.

        Wait for that step.
        """
        if self._pending is not None:
            (step, norms), self._pending = self._pending, None
            self._write_log(step, norms.metrics())

    def drop(self) -> None:
        """Forget the norms of a step that the run goes back from."""
        self._pending = None
