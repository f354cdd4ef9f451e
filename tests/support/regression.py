"""What these tests share: a small regression, cut into workers' batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardopt as so
from support import durations
from support.problems import problem


class Regression(NamedTuple):
    """`batches_of(worker)` gives the worker's rows of `batches`, over and over."""

    params: Any
    loss_fn: Any
    batches_of: Any
    batches: Any


def batches_cut(batches, num_workers, rounds=1):
    """Return `batches_of` that gives each worker its rows of every batch."""

    def batches_of(worker):
        def rows(x):
            size = len(x) // num_workers
            return x[worker * size : (worker + 1) * size]

        return (jax.tree.map(rows, batch) for _ in range(rounds) for batch in batches)

    return batches_of


@pytest.fixture
def regression():
    """Four weights, eight batches of 24 rows, in single precision."""
    draw = np.random.default_rng(0)
    truth = draw.normal(size=4)
    batches = []
    for _ in range(8):
        x = draw.normal(size=(24, 4))
        batches.append({"x": x.astype(np.float32), "y": (x @ truth).astype(np.float32)})

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    return Regression(
        params,
        loss_fn,
        lambda num_workers, rounds=1000: batches_cut(batches, num_workers, rounds),
        batches,
    )


@pytest.fixture
def odd():
    """Return `odd(weighted) -> (case, batches_of(num_workers))`: a net of awkward leaves, in double
    precision.
    """

    def make(weighted, steps=6):
        case = problem("odd", weighted=weighted, steps=steps)
        return case, lambda num_workers, rounds=1: batches_cut(case.batches, num_workers, rounds)

    return make


@pytest.fixture
def simulate_really(regression):
    """Return a simulation of uneven workers with real mathematics: `simulate_really(tx,
    **options)`.
    """

    def run(tx, *, workers=3, num_updates=30, **options):
        specs = [
            so.parameter_server.SimulatedWorker(durations.exponential(1.0 + worker))
            for worker in range(workers)
        ]
        return so.parameter_server.simulate(
            specs,
            num_updates=num_updates,
            tx=tx,
            loss_fn=regression.loss_fn,
            params=regression.params,
            batches_of=regression.batches_of(workers),
            **options,
        )

    return run


@pytest.fixture
def message_of():
    """Return `message_of(error, do, *arguments)`: the message with which `do(*arguments)` raises
    `error`.
    """

    def message(error, do, *arguments, **options):
        with pytest.raises(error) as caught:
            do(*arguments, **options)
        return str(caught.value)

    return message
