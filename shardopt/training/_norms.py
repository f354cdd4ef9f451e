"""Norms of each leaf and layer in `fit`: steps that are due compute them, and the log gets them one
step late.
"""

from shardopt.core import PyTree, TrainState, check_count, value_error
from shardopt.step._norms import Norms
from shardopt.step._optimizer import Metrics, ShardedOptimizer
from shardopt.training._hooks import Hook, TakeStep
from shardopt.training._loggers import Log


def check_norms_every(
    opt: ShardedOptimizer, norms_every: int | None, cross_check_every: int | None
) -> None:
    """Check the argument of `fit`.

    Raises:
      TypeError: if it is no integer.
      ValueError: if it is below 1, the replicas of the strategy train apart, or every step is
        verified.
    """
    if norms_every is None:
        return
    check_count("norms_every", norms_every)
    if opt.config.per_replica:
        problem = (
            f"norms_every takes norms of one gradient, and the replicas of {opt.config.strategy}"
            " train apart."
        )
        raise value_error(problem, fix="leave norms_every out.")
    if cross_check_every == 1:
        problem = (
            "norms_every takes norms in steps that are not verified, and cross_check_every=1 verifies"
            " each step."
        )
        raise value_error(
            problem, fix="take cross_check_every=2 or more, or leave norms_every out."
        )


class NormLog(Hook):
    """Takes a step with norms every `every` steps, and logs them once they have arrived.

    A step that another hook takes has no norms; the next step has the norms that were due.

    Args:
      opt: the strategy.
      every: the steps between norms.
      write_log: writes metrics of a step.
      step: the steps taken before the run.
    """

    def __init__(self, opt: ShardedOptimizer, every: int, write_log: Log, step: int):
        self._opt = opt
        self._every = every
        self._write_log = write_log
        self._last_step = step
        self._computing: Norms | None = None
        self._pending: tuple[int, Norms] | None = None

    def before_step(self, step: int, position: int) -> TakeStep | None:
        """Take the step if norms are due."""
        is_due = (step + 1) // self._every > self._last_step // self._every
        return self._take_step if is_due else None

    def _take_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        state, metrics, self._computing = self._opt.step.with_norms(state, batch)
        return state, metrics

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Write the norms of an earlier step while the device computes this one."""
        self.at_wait()
        if self._computing is not None:
            self._last_step = step + 1
            self._pending = (step + 1, self._computing)
            self._computing = None

    def at_wait(self) -> None:
        """Write the norms of the last step that computed them, unless they are written.

        Wait for that step.
        """
        if self._pending is not None:
            (step, norms), self._pending = self._pending, None
            self._write_log(step, norms.metrics())
