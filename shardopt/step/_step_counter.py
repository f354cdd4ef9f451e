"""The number of steps of a state, known on the host: an int32 that must not wrap."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, TrainState, format_error

LAST_STEP = int(np.iinfo(np.int32).max)


class StepCounter:
    """Refuses a step whose counter would wrap to a negative number.

    It remembers the number of the state that the last step returned. The number of another state is
    read from the device. It is not read if it is still being computed, because that would wait; only
    the first step waits.
    """

    def __init__(self, config: StrategyConfig):
        self._config = config
        self._returned: weakref.ref[Any] | None = None
        self._number: int | None = None

    def check(self, state: TrainState) -> None:
        """Refuse the next step of a state whose counter is at its end.

        Raises:
          ValueError: if the counter is at its end.
        """
        is_known = self._returned is not None and self._returned() is state.step
        if not is_known or self._number is None:
            self._number = self._read(state.step)
        if self._number is not None and self._number >= LAST_STEP:
            problem = (
                f"the step counter of the state is at {self._number:,}, the last int32, and would"
                " become negative."
            )
            fix = (
                "so.replace(state, step=0) counts from 0 again. The random keys of steps then come"
                " again too, and the counters of the optimizer stay."
            )
            raise ValueError(format_error(self._config.strategy, problem, fix=fix))

    def counting(self, limit: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
        """Return `limit`, which gets the result of each step, and count the step."""

        def count(result: PyTree) -> PyTree:
            step = result[0].step
            if not isinstance(step, Tracer):
                self._returned = weakref.ref(step)
                self._number = None if self._number is None else self._number + 1
            return limit(result)

        return count

    def _read(self, step: Any) -> int | None:
        if isinstance(step, Tracer | jax.ShapeDtypeStruct):
            return None
        is_pending = isinstance(step, jax.Array) and not cast(Any, step).is_ready()
        if is_pending and self._returned is not None:
            return None
        with jax.transfer_guard("allow"):
            return int(step)
