"""The loop with real checkpoints on a disk."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest

import shardopt as so
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core import CheckpointError, NonFiniteLossError
from shardopt.training import EarlyStopping
from shardopt.training._fit import fit


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(iter, id="iterator"),
        pytest.param(lambda batches: grain_dataset(batches), marks=pytest.mark.slow, id="grain"),
    ],
)
def test_resumed_equals_unbroken(opt, new_state, batches, same, tmp_path, make):
    unbroken = fit(opt, new_state(), make(batches), num_steps=25, progress=False)
    for target in (7, 18, 25):
        with Checkpoints(tmp_path / "run", every=5, keep=2) as checkpoints:
            resumed = fit(
                opt,
                new_state(),
                make(batches),
                num_steps=target,
                checkpoints=checkpoints,
                progress=False,
            )
            assert checkpoints.latest() == target
            assert len(checkpoints.steps()) == 2
    assert same(resumed.state, unbroken.state)


def test_a_first_state_is_made_only_where_nothing_is_restored(
    opt, new_state, batches, same, tmp_path
):
    unbroken = fit(opt, new_state(), batches, num_steps=7, progress=False)
    first = so.training.DeferredInit({"w": np.zeros(4, np.float32), "b": np.float32(0)})
    init_calls = []
    counted = opt._replace(init=lambda *args: init_calls.append(args) or opt.init(*args))
    for target in (3, 7):
        with Checkpoints(tmp_path / "run", every=5, keep=2) as checkpoints:
            result = fit(
                counted, first, batches, num_steps=target, checkpoints=checkpoints, progress=False
            )
    assert init_calls == [first]
    assert same(result.state, unbroken.state)
    drawn = so.training.DeferredInit(lambda rng: {"w": jax.random.normal(rng, 4), "b": 0.0})
    assert jax.tree.map(lambda leaf: leaf.shape, drawn.shapes()) == {"w": (4,), "b": ()}


def grain_dataset(batches):
    import grain

    return grain.MapDataset.source(batches).shuffle(seed=5).repeat().to_iter_dataset()


def test_the_best_by_an_evaluation_metric_is_kept(opt, new_state, batches, tmp_path):
    with Checkpoints(tmp_path, every=4, keep=1, best="val") as checkpoints:
        result = fit(
            opt,
            new_state(),
            batches,
            num_steps=30,
            evaluate=lambda state: {"val": abs(int(state.step) - 8.0)},
            early_stopping=EarlyStopping("val", patience=3),
            checkpoints=checkpoints,
            progress=False,
        )
        assert (result.stopped, result.step, result.best) == ("early", 20, {"step": 8, "val": 0.0})
        assert (checkpoints.steps(), checkpoints.best_step()) == ([8, 20], 8)


@pytest.mark.parametrize(
    ("best", "evaluate"),
    [
        ("val_los", lambda state: {"val_loss": 1.0}),
        ("val_loss", None),
        ("val_loss", (lambda state: {"val_loss": 1.0}, 8)),  # it is there when it is evaluated
        ("accuracy", (lambda state: {"val_loss": 1.0}, 8)),
    ],
)
def test_a_best_metric_that_no_run_reports_is_refused(
    opt, new_state, batches, tmp_path, best, evaluate
):
    is_there = best == "val_loss" and evaluate is not None
    message = f"^fit: best of so.Checkpoints watches '{best}', which is not among the metrics"
    expected = nullcontext() if is_there else pytest.raises(ValueError, match=message)
    with Checkpoints(tmp_path, every=4, keep=1, best=best) as checkpoints, expected:
        fit(
            opt,
            new_state(),
            batches,
            num_steps=10,
            evaluate=evaluate,
            checkpoints=checkpoints,
            progress=False,
        )


def test_nothing_that_is_not_finite_reaches_the_disk(opt, new_state, batches, tmp_path):
    bad = [*batches[:9], batches[9] | {"y": np.full(8, np.nan, np.float32)}, *batches[10:]]
    with (
        Checkpoints(tmp_path, every=5, keep=None) as checkpoints,
        pytest.raises(NonFiniteLossError, match=f"last checkpoint: step 5, in {tmp_path}"),
    ):
        fit(opt, new_state(), bad, num_steps=30, checkpoints=checkpoints, progress=False)
    with Checkpoints(tmp_path, every=5, keep=None) as checkpoints:
        assert checkpoints.steps() == [5]


def test_a_write_that_fails_does_not_hide_the_first_error(opt, new_state, batches, memory):
    checkpoints = memory(5)

    def wait():
        raise CheckpointError("the disk is full")

    def log(step, metrics):
        raise RuntimeError("the log is full")

    checkpoints.wait = wait
    with pytest.raises(RuntimeError, match="the log is full") as caught:
        fit(
            opt,
            new_state(),
            batches,
            num_steps=30,
            checkpoints=checkpoints,
            log=log,
            log_every=7,
            progress=False,
        )
    assert caught.value.__notes__ == ["the disk is full"]
    with pytest.raises(CheckpointError, match="the disk is full"):
        fit(opt, new_state(), batches, num_steps=3, checkpoints=checkpoints, progress=False)


def test_a_write_that_fails_is_told_with_the_loss(opt, new_state, batches, memory):
    checkpoints = memory(50)

    def wait():
        raise CheckpointError("the disk is full")

    checkpoints.wait = wait
    bad = [batches[0] | {"y": np.full(8, np.nan, np.float32)}]
    with pytest.raises(NonFiniteLossError) as caught:
        fit(opt, new_state(), bad, num_steps=30, checkpoints=checkpoints, progress=False)
    assert str(caught.value).splitlines()[1:3] == [
        "  a checkpoint could not be written: the disk is full",
        "  last checkpoint: none yet, in /runs/a",
    ]


WORKER = Path(__file__).with_name("worker_killed.py")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 20])
def test_killed_again_and_again_equals_unbroken(kills, tmp_path):
    """Kill -9 at random moments.

    Every restart goes on from a whole checkpoint, and the end is the same bit for bit.
    """
    environment = os.environ | {"PYTHONPATH": str(Path(so.__file__).parents[1])}

    def start(folder):
        command = [sys.executable, str(WORKER), str(folder)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    unbroken_process = start(tmp_path / "whole")
    assert unbroken_process.wait() == 0, unbroken_process.stderr.read()
    rng = random.Random(0)
    for kill in range(kills):
        run = start(tmp_path / "broken")
        # one line a step, so that the kill falls into training and not into the imports
        for _ in range(rng.randrange(1, 9)):
            if not run.stderr.readline():
                break
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, (kill, run.stderr.read())
        run.stderr.close()
    last = start(tmp_path / "broken")
    assert last.wait() == 0, last.stderr.read()
    for process in (unbroken_process, last):
        process.stderr.close()
    whole_params, broken_params = (
        np.load(tmp_path / name / "params.npz") for name in ("whole", "broken")
    )
    assert whole_params.keys() == broken_params.keys() == {"up", "down"}
    assert all(np.array_equal(whole_params[name], broken_params[name]) for name in whole_params)
    logs = [
        (tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "broken")
    ]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 150
