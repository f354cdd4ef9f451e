"""Two real processes: they stop at the same step, whoever of them wants to."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.processes import run_processes

import shardopt as so
from shardopt.training._fit import fit

WORKER = Path(__file__).with_name("worker_processes.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the reports of the two processes, and their standard error."""
    said = run_processes(WORKER, 2, tmp_path_factory.mktemp("run"), strict=False)
    return [json.loads(output.last) for output in said], [output.err for output in said]


@pytest.mark.parametrize(
    ("name", "step", "stopped"),
    [
        ("whole", 30, "completed"),
        # received by one of them when it draws the batch of step 13; they agree before each step
        ("sigterm", 13, "sigterm"),
        ("resumed", 30, "completed"),
        ("early", 12, "early"),  # process 1 sees 1.0 three times; process 0 would go on
        ("exhausted", 17, "exhausted"),
    ],
)
def test_all_stop_at_the_same_step(outcomes, name, step, stopped):
    for outcome in outcomes[0]:
        assert (outcome[name]["step"], outcome[name]["stopped"]) == (step, stopped)


def test_the_loss_stops_all(outcomes):
    assert [outcome["nan"] for outcome in outcomes[0]] == [[8, 8], [8, 8]]


def test_resumed_equals_unbroken_and_one_process(outcomes):
    first, second = outcomes[0]
    assert first["resumed"]["same"]
    assert second["resumed"]["same"]
    assert first["params"] == second["params"]
    assert first["hyperparams"]["learning_rate"] == 0.25

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    x = [np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32) for step in range(30)]
    opt = so.fsdp(
        optax.adam(0.05), so.make_mesh(devices=jax.devices()[:4]), loss_fn, min_shard_elements=1
    )
    batches = [{"x": inputs, "y": inputs.sum(1)} for inputs in x]
    alone = fit(
        opt, opt.init({"w": np.zeros(4, np.float32)}), batches, num_steps=30, progress=False
    )
    np.testing.assert_allclose(first["params"], alone.state.params["w"], rtol=2e-5)


def test_parameters_that_all_set_live_where_they_did(outcomes):
    for outcome in outcomes[0]:
        assert outcome["replace"] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 4, 6], [True] * 3]


def test_only_the_first_process_logs_and_shows(outcomes):
    (first, second), (shown, silent) = outcomes
    assert first["whole"]["logged"] == [5, 10, 15, 20, 25, 30]
    assert second["whole"]["logged"] == []
    losses = [
        [record["loss"] for record in outcome["whole"]["history"]] for outcome in (first, second)
    ]
    assert losses[0] == losses[1]
    assert "step 10/30  loss" in shown
    assert "Resuming from step 13" in shown
    assert "step 10/30" not in silent
    assert "Resuming" not in silent


def test_checkpoints_by_time_follow_the_clock_of_process_0_where_all_agree(outcomes):
    assert [outcome["by time"]["saved"] for outcome in outcomes[0]] == [[12, 24, 30]] * 2
