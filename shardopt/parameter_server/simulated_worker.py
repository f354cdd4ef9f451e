"""A worker as the simulator sees it: how fast, how far away, when there."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.errors import complaint
from shardopt.parameter_server.arguments import check_number
from shardopt.parameter_server.durations import Duration, check_duration


class SimulatedWorker(NamedTuple):
    """A worker of `simulate`.

    Attributes:
      step_seconds: how long a gradient takes: seconds, or a function `(numpy generator) -> seconds`; see
        `parameter_server.durations`.
      latency: seconds that a message is under way, each way, besides its size.
      bandwidth: bytes per second, each way.
      presence: periods `(from, to)` in seconds when it is there. It joins at the start of each; at the end of one it
        dies in the middle of what it does, and the half step is lost.

    Example:
      >>> SimulatedWorker(step_seconds=0.5, presence=((0.0, 60.0), (90.0, float("inf")))).latency
      0.0
    """

    step_seconds: Duration = 1.0
    latency: float = 0.0
    bandwidth: float = math.inf
    presence: Sequence[tuple[float, float]] = ((0.0, math.inf),)

    def transfer_seconds(self, size: float) -> float:
        """Return how long a message of `size` bytes is under way."""
        return self.latency + size / self.bandwidth


def simulated_workers(who: str, workers: Any) -> list[SimulatedWorker]:
    """Return a list of workers, from one or from a number of equal ones.

    Raises:
      TypeError: if it is neither, or a field is of the wrong kind.
      ValueError: if there is none, or a number is out of range.
    """
    if is_integer(workers):
        check_count(who, "workers", workers, least=1)
        return [SimulatedWorker()] * int(workers)
    if isinstance(workers, SimulatedWorker) or not isinstance(workers, Sequence):
        what = f"workers must be an integer or a sequence of SimulatedWorker, got {type(workers).__name__}."
        raise TypeError(complaint(who, what))
    if not workers:
        raise ValueError(f"{who}: workers must be at least 1, got none.")
    for number, worker in enumerate(workers):
        if not isinstance(worker, SimulatedWorker):
            raise TypeError(f"{who}: workers[{number}] must be a SimulatedWorker, got {type(worker).__name__}.")
        name = f"workers[{number}]"
        check_duration(who, f"{name}.step_seconds", worker.step_seconds)
        check_number(who, f"{name}.latency", worker.latency)
        if worker.bandwidth != math.inf:
            check_number(who, f"{name}.bandwidth", worker.bandwidth, positive=True)
        check_presence(who, name, worker.presence)
    return list(workers)


def check_presence(who: str, name: str, presence: Any) -> None:
    """Refuse periods that are not pairs of rising numbers, one period after the other.

    Raises:
      TypeError: if it is no sequence of pairs of numbers.
      ValueError: if the numbers do not rise from at least 0.
    """
    numbers = []
    if isinstance(presence, Sequence) and all(isinstance(one, Sequence) and len(one) == 2 for one in presence):
        numbers = [number for period in presence for number in period]
    real = [isinstance(one, int | float | np.number) and not isinstance(one, bool) for one in numbers]
    if not numbers or not all(real):
        raise TypeError(f"{who}: {name}.presence must be a sequence of periods (from, to), got {presence!r}.")
    if not numbers[0] >= 0 or not all(a < b for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"{who}: {name}.presence must rise from at least 0, got {presence!r}.")
