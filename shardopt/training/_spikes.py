"""The rules of `fit` for steps whose loss is not finite or spikes: end the run, skip them, or go
back to the last snapshot.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._tree import Json
from shardopt.core._errors import value_error
from shardopt.core._types import PyTree, states_of
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._hooks import Hook
from shardopt.transforms._skip_anomalies import (
    DEVIATIONS,
    SMALLEST_DEVIATION,
    WINDOW,
    SkipAnomaliesState,
)

MOST_ROLLBACKS = 3
"""A run that goes back to the same snapshot more often ends."""


class Spike(NamedTuple):
    """A step that the run goes back from.

    Attributes:
      step: the count of steps, this one included.
      position: how many batches were drawn before its batch.
      values: its loss and gradient norm.
    """

    step: int
    position: int
    values: dict[str, float]

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        return (
            f"spike at step {self.step - 1} (batch {self.position}, both counted from 0): {values}"
        )


class Spikes(Hook):
    """Finds the spikes of a run, by the rule of `skip_anomalies`, from values that are equal on all
    processes.

    A loss or norm that is not finite is a spike too.

    Attributes:
      pending: the first spike since the last rollback, which the run will go back from; or None.
      rollbacks: the number of rollbacks to the snapshot of a step.
    """

    def __init__(self):
        self._values: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.pending: Spike | None = None
        self.rollbacks: dict[int, int] = {}

    def watch(self, step: int, position: int, values: Mapping[str, float]) -> bool:
        """Take the values of a step; return whether the run will go back from it."""
        if self.pending is not None:
            return True
        pair = values["loss"], values.get("grad_norm", 0.0)
        is_finite = all(map(math.isfinite, pair))
        if is_finite and not any(self._is_above(x, i) for i, x in enumerate(pair)):
            self._values.append(pair)
            return False
        named = {name: values[name] for name in ("loss", "grad_norm") if name in values}
        self.pending = Spike(step, position, named)
        return True

    def _is_above(self, x: float, column: int) -> bool:
        past = np.array([pair[column] for pair in self._values])
        if 2 * past.size < WINDOW:
            return False
        return bool(
            x > past.mean() + DEVIATIONS * max(past.std(), SMALLEST_DEVIATION * abs(past.mean()))
        )

    def to_json(self) -> Json:
        """Return the window as JSON, for a checkpoint."""
        return [list(pair) for pair in self._values]

    def restore(self, saved: Json) -> None:
        """Take the window of a checkpoint, and forget the spike."""
        self._values = deque(((loss, norm) for loss, norm in saved or []), maxlen=WINDOW)
        self.pending = None

    def go_back(self, step: int, extra: Mapping[str, Json]) -> None:
        """Count a rollback, and take the window of the snapshot."""
        self.rollbacks = {step: self.rollbacks.get(step, 0) + 1}
        self.restore(extra.get("spikes"))


def spikes_of(
    opt: ShardedOptimizer,
    opt_state: PyTree,
    on_spike: str | None,
    checkpoints: Checkpoints | None,
) -> Spikes | None:
    """Check the argument `on_spike` of `fit`.

    Return the search for spikes, or None if the run never goes back.

    Raises:
      ValueError: if it has another value, or the optimizer or the checkpoints cannot do
        what it asks for.
    """
    if on_spike not in (None, "skip", "rollback"):
        problem = f"on_spike must be None, 'skip' or 'rollback', got {on_spike!r:.80}."
        raise value_error(problem)
    wrap = "wrap the optimizer: so.transforms.skip_anomalies(tx)"
    if on_spike == "skip" and not states_of(SkipAnomaliesState, opt_state):
        problem = (
            "on_spike='skip' needs an optimizer that skips spikes, before they change its state."
        )
        raise value_error(problem, fix=f"{wrap}, or use on_spike='rollback'.")
    if on_spike == "rollback" and (checkpoints is None or opt.config.local_updates is not None):
        problem = (
            "on_spike='rollback' needs checkpoints to go back to, and the same loss on all"
            " processes."
        )
        fix = f"pass checkpoints=so.Checkpoints(...) and a synchronous strategy, or {wrap}."
        raise value_error(problem, fix=fix)
    return Spikes() if on_spike == "rollback" else None
