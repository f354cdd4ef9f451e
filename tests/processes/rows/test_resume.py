"""A run whose processes pass their own rows goes on where it was, with as many processes or another
number. It equals one device that was never interrupted.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support import rows
from support.processes import run_processes

import shardopt as so

WORKER = Path(__file__).with_name("worker_resume.py")


@functools.cache
def unbroken():
    """Return the parameters of one device after 9 steps."""
    opt = so.ddp(optax.adam(0.05), so.make_mesh(devices=jax.devices()[:1]), rows.loss_fn)
    state = opt.init(rows.first_params())
    for step in range(9):
        state, _ = opt.step(state, rows.whole(step))
    return np.asarray(state.params["w"])


def train(kind, count, steps, folder):
    outputs = run_processes(WORKER, count, f"{folder}/{count}-{steps}-{kind}", strict=False)
    return [json.loads(output.last) for output in outputs]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        ("stateful", 2, 2),
        slow("own", 1, 2),
        slow("own", 2, 2),
        slow("own", 2, 4),
        slow("own", 4, 2),
        slow("own", 2, 1),
        slow("stateful", 1, 1),
        slow("global", 2, 2),
        slow("global", 2, 4),
        slow("global", 1, 2),
    ],
)
def test_a_resumed_run_draws_each_row_once(kind, before, now, tmp_path):
    assert all(step == 6 for step, _ in train(kind, before, 6, tmp_path))
    for step, params in train(kind, now, 9, tmp_path):
        assert step == 9
        np.testing.assert_allclose(params, unbroken(), rtol=2e-5)


@pytest.mark.slow
def test_fewer_processes_with_smaller_batches_go_on_by_rows(tmp_path):
    train("four each", 4, 6, tmp_path)
    outputs = run_processes(WORKER, 2, f"{tmp_path}/2-9-four each", strict=False)
    text = "the data by drawing 96 rows: batches have 8, they had 16.\n"
    assert text in outputs[0].out + outputs[0].err
    assert [json.loads(output.last)[0] for output in outputs] == [9, 9]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["four each", "blocks of four"])
def test_rows_of_larger_batches_that_cannot_be_compared_are_named(kind, tmp_path):
    train(kind, 1, 6, tmp_path)
    outputs = run_processes(WORKER, 3, f"{tmp_path}/3-9-{kind}", strict=False)
    assert (
        "so nothing shows that other processes drew the same rows"
        in outputs[0].out + outputs[0].err
    )


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        slow("blocks", 1, 2),
        slow("blocks", 2, 4),
        slow("blocks", 4, 2),
        slow("blocks of four", 4, 2),
        slow("blocks of four", 2, 1),
    ],
)
def test_rows_that_depend_on_the_number_of_processes_are_refused(kind, before, now, tmp_path):
    train(kind, before, 6, tmp_path)
    for answer, text in train(kind, now, 9, tmp_path):
        assert answer == "refused"
        assert "drew other rows in the last batch than" in text
        assert "rows would be seen twice, or never" in text


@pytest.mark.slow
def test_processes_can_go_on_with_the_global_batch_and_back(tmp_path):
    train("own", 2, 3, tmp_path)
    train("global", 2, 6, tmp_path)
    for step, params in train("own", 4, 9, tmp_path):
        assert step == 9
        np.testing.assert_allclose(params, unbroken(), rtol=2e-5)
