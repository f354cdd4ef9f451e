"""local_sgd and diloco equal their algorithms, written out in numpy, over every strategy: shared and own parameters."""

import itertools

import numpy as np
import optax
import pytest
from replicas import reference

import shardopt as so

SGD_ONE = {"rate": 1.0, "momentum": 0.0, "nesterov": False}
TX = optax.adamw(1e-2, eps=1e-4)
GRID = list(itertools.product((1, 2, 4), (0, 1), (0.0, 0.5, 1.0)))


@pytest.fixture
def compare(strategy_of, new_params, new_batches, steps_on, rows_of, apart, model_of):
    """Return a function that trains and gives the difference from the reference, and asserts that it is none."""

    def check(name, *, steps, how, sizes, blocks=4, stages=1, combine=so.diloco, outer=reference.NESTEROV):
        params, batches = new_params(blocks), new_batches(steps)
        opt = combine(strategy_of(name, TX, **sizes), **how)
        state, metrics = steps_on(opt, opt.init(params), batches)
        shared, own = reference.diloco(
            TX, model_of().loss_fn, params, batches, sizes.get("replica", 2), outer=outer, stages=stages, **how
        )
        assert apart(state.params, shared) < 1e-10
        assert apart(rows_of(state), own) < 1e-10
        assert np.isfinite(metrics["loss"])
        assert int(state.step) == steps

    return check


@pytest.mark.parametrize(("fragments", "delay", "mix"), GRID)
def test_streaming_with_fsdp_inside(fragments, delay, mix, compare, x64):
    how = {"sync_every": 2 * fragments, "fragments": fragments, "delay": delay, "mix": mix}
    compare("fsdp", steps=4 * fragments + 1, how=how, sizes={})
