"""local_sgd and diloco equal their algorithms, written out in numpy, over every strategy: shared
and own parameters.
"""

import itertools

import numpy as np
import optax
import pytest
from support import diloco as reference
from support.tiers import tiered

import shardopt as so

SGD_ONE = {"rate": 1.0, "momentum": 0.0, "nesterov": False}
MOMENTUM = optax.sgd(0.05, momentum=0.9)
TX = optax.adamw(1e-2, eps=1e-4)
GRID = list(itertools.product((1, 2, 4), (0, 1), (0.0, 0.5, 1.0)))


@pytest.fixture
def compare(strategy_of, new_params, new_batches, steps_on, rows_of, max_difference, model_of):
    """Return a function that trains, and asserts that nothing differs from the reference."""

    def check(
        name,
        *,
        steps,
        how,
        sizes=(),
        blocks=4,
        stages=1,
        tx=TX,
        combine=so.diloco,
        tiny=None,
        outer=reference.NESTEROV,
    ):
        model, make = tiny or (model_of(), lambda: new_params(blocks))
        params = make()
        batches = new_batches(steps, rows=16)
        sizes = dict(sizes)
        opt = combine(strategy_of(name, tx, model=model, **sizes), **how)
        state, metrics = steps_on(opt, opt.init(params), batches)
        shared, replica_params = reference.diloco(
            tx,
            model.loss_fn,
            params,
            batches,
            sizes.get("replica", 2),
            outer=outer,
            stages=stages,
            **how,
        )
        assert max_difference(state.params, shared) < 1e-10
        assert max_difference(rows_of(state), replica_params) < 1e-10
        assert np.isfinite(metrics["loss"])
        assert int(state.step) == steps

    return check


@pytest.mark.parametrize(
    ("fragments", "delay", "mix"), tiered(GRID, lambda row: row == (2, 1, 0.5))
)
def test_streaming_with_fsdp_inside_equals_its_reference(fragments, delay, mix, compare, tiny, x64):
    how = {"sync_every": 2 * fragments, "fragments": fragments, "delay": delay, "mix": mix}
    compare("fsdp", steps=4 * fragments + 1, how=how, tiny=tiny, tx=MOMENTUM)


CASES = {
    "tensor": (
        "fsdp",
        {"tensor": 2},
        {"sync_every": 4, "fragments": 2, "delay": 1, "mix": 0.5},
        {},
    ),
    "four replicas": ("ddp", {"replica": 4}, {"sync_every": 3}, {}),
    "zero1": ("zero1", {"data": 4}, {"sync_every": 4, "fragments": 2}, {}),
    "zero2": ("zero2", {"data": 4}, {"sync_every": 2, "delay": 1, "mix": 0.25}, {}),
    "more fragments than leaves": ("ddp", {"data": 1}, {"sync_every": 9, "fragments": 9}, {}),
    "pipeline": (
        "hybrid",
        {"pipeline": 2},
        {"sync_every": 4, "fragments": 2, "delay": 1, "mix": 0.5},
        {"blocks": 4, "stages": 2},
    ),
    "pipeline, a fragment a step": (
        "hybrid",
        {"pipeline": 2},
        {"sync_every": 2, "fragments": 2},
        {"blocks": 4, "stages": 2},
    ),
    "pipeline, uneven": (
        "hybrid",
        {"pipeline": 2},
        {"sync_every": 4, "fragments": 2},
        {"blocks": 6, "stages": 2},
    ),
}


@pytest.mark.parametrize(
    "case",
    tiered(CASES, lambda case: case == "four replicas", fast=lambda case: case == "four replicas"),
)
def test_diloco_equals_its_reference(case, compare, x64):
    name, sizes, how, extra_options = CASES[case]
    compare(name, sizes=sizes, how=how, steps=2 * how["sync_every"] + 1, **extra_options)


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    tiered(
        [
            ("zero1", {"data": 4}, {"sync_every": 3, "warmup_steps": 2}),
            ("fsdp", {"replica": 4}, {"sync_every": 2, "warmup_steps": 0}),
            ("hybrid", {"pipeline": 2}, {"sync_every": 2, "warmup_steps": 3}),
        ],
        lambda row: row[0] == "fsdp",
    ),
)
def test_local_sgd_equals_its_reference(name, sizes, how, compare, x64):
    compare(name, sizes=sizes, how=how, steps=7, combine=so.local_sgd, outer=SGD_ONE)
