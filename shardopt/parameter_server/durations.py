"""How long a simulated step takes: functions from a random generator to seconds."""

import math
from collections.abc import Callable

import numpy as np

from shardopt.core.arguments import check_number

Duration = float | Callable[[np.random.Generator], float]
"""Seconds, or a function that draws them."""


def exponential(mean: float) -> Duration:
    """Return a duration that is exponentially distributed: often short, sometimes several times the mean.

    Example:
      >>> 0 < exponential(2.0)(np.random.default_rng(0)) < 20
      True
    """
    check_number("exponential", "mean", mean, positive=True)
    return lambda draw: draw.exponential(mean)


def lognormal(mean: float, spread: float) -> Duration:
    """Return a log-normal duration of this mean, whose standard deviation is `spread` times the mean.

    Example:
      >>> draw = np.random.default_rng(0)
      >>> round(float(np.mean([lognormal(2.0, 0.5)(draw) for _ in range(20_000)])), 1)
      2.0
    """
    check_number("lognormal", "mean", mean, positive=True)
    check_number("lognormal", "spread", spread)
    variance = math.log1p(spread**2)
    return lambda draw: draw.lognormal(math.log(mean) - variance / 2, math.sqrt(variance))


def with_stalls(duration: Duration, *, probability: float, seconds: Duration) -> Duration:
    """Return a duration to which, with some probability, a stall is added.

    Args:
      duration: seconds without a stall, or a function that draws them.
      probability: of a stall, each time.
      seconds: how long a stall is, or a function that draws it.

    Example:
      >>> with_stalls(1.0, probability=1.0, seconds=4.0)(np.random.default_rng(0))
      5.0
    """
    who = "with_stalls"
    check_duration(who, "duration", duration)
    check_number(who, "probability", probability)
    if probability > 1:
        raise ValueError(f"{who}: probability must be at most 1, got {probability}.")
    check_duration(who, "seconds", seconds)

    def sample(draw: np.random.Generator) -> float:
        stall = draw.random() < probability
        return seconds_of(duration, draw) + (seconds_of(seconds, draw) if stall else 0.0)

    return sample


def seconds_of(duration: Duration, draw: np.random.Generator) -> float:
    """Return a duration's next value."""
    return float(duration(draw) if callable(duration) else duration)


def check_duration(who: str, name: str, duration: Duration) -> None:
    """Refuse what is neither seconds nor a function."""
    if not callable(duration):
        check_number(who, name, duration)
