"""Durations of simulated steps: functions from a generator of numpy to seconds."""

import numpy as np


def exponential(mean):
    return lambda rng: rng.exponential(mean)


def lognormal(mean, spread):
    variance = np.log1p(spread**2)
    return lambda rng: rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance))


def with_stalls(duration, *, probability, seconds):
    def draw(rng):
        stall = rng.random() < probability
        return (duration(rng) if callable(duration) else duration) + seconds * stall

    return draw
