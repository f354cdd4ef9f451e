"""Durations of simulated steps: functions from a random generator to seconds."""

import math
from collections.abc import Callable

import numpy as np

from shardopt.core._arguments import check_number
from shardopt.core._errors import calling, error_text

Duration = float | Callable[[np.random.Generator], float]
"""Seconds, or a function that draws them."""


@calling("exponential")
def exponential(mean: float) -> Duration:
    """Return a duration that is exponentially distributed: often short, sometimes several times the
    mean.

    Example:
      >>> 0 < exponential(2.0)(np.random.default_rng(0)) < 20
      True
    """
    check_number("mean", mean, positive=True)
    return lambda generator: generator.exponential(mean)


@calling("lognormal")
def lognormal(mean: float, spread: float) -> Duration:
    """Return a log-normal duration of this mean, whose standard deviation is `spread` times the
    mean.

    Example:
      >>> generator = np.random.default_rng(0)
      >>> round(float(np.mean([lognormal(2.0, 0.5)(generator) for _ in range(20_000)])), 1)
      2.0
    """
    check_number("mean", mean, positive=True)
    check_number("spread", spread)
    variance = math.log1p(spread**2)
    return lambda generator: generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance))


@calling("with_stalls")
def with_stalls(duration: Duration, *, probability: float, seconds: Duration) -> Duration:
    """Return a duration that is longer by a stall with some probability.

    Args:
      duration: seconds without a stall, or a function that draws them.
      probability: the probability of a stall, at each draw.
      seconds: seconds of a stall, or a function that draws them.

    Example:
      >>> with_stalls(1.0, probability=1.0, seconds=4.0)(np.random.default_rng(0))
      5.0
    """
    check_duration("duration", duration)
    check_number("probability", probability)
    if probability > 1:
        raise ValueError(error_text(f"probability must be at most 1, got {probability}."))
    check_duration("seconds", seconds)

    def sample(generator: np.random.Generator) -> float:
        stall = generator.random() < probability
        return seconds_of(duration, generator) + (seconds_of(seconds, generator) if stall else 0.0)

    return sample


def seconds_of(duration: Duration, generator: np.random.Generator) -> float:
    """Return the seconds of a duration, drawn if it is a function."""
    return float(duration(generator) if callable(duration) else duration)


def check_duration(name: str, duration: Duration) -> None:
    """Refuse a duration that is neither seconds nor a function."""
    if not callable(duration):
        check_number(name, duration)
