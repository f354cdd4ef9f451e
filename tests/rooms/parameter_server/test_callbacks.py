"""Runs that are broken off and go on: no push lost that was saved, the same bits without staleness,
one log.
"""

import json

import jax
import numpy as np
import optax
import pytest
from support.reference import same_bits
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import _worker as compute
from shardopt.parameter_server import rules


class BrokenOffError(Exception):
    pass


def failing(batches_of, worker_and_step):
    """The same batches, but one worker breaks down at one step."""

    def broken(worker):
        for step, batch in enumerate(batches_of(worker)):
            if (worker, step) == worker_and_step:
                raise BrokenOffError
            yield batch

    return broken


def optimizer(regression, max_staleness, rule=None, workers=3):
    tx, devices = optax.adam(0.05), jax.devices()[:1] * workers  # one program for all
    return so.async_sgd(
        tx, regression.loss_fn, workers=devices, max_staleness=max_staleness, rule=rule
    )


@pytest.mark.parametrize("max_staleness", tiered([0, 2], lambda bound: bound == 0))
def test_a_run_that_breaks_off_goes_on(max_staleness, regression, tmp_path):
    batches_of = regression.batches_of(3)
    total = 30 if max_staleness else 10
    opt = optimizer(
        regression, max_staleness, rules.delayed_nesterov(every=3) if max_staleness else None
    )
    with so.Checkpoints(tmp_path, every=4, keep=2) as checkpoints, pytest.raises(BrokenOffError):
        opt.run(
            regression.params,
            failing(batches_of, (1, 6)),
            num_updates=total,
            checkpoints=checkpoints,
        )
    with so.Checkpoints(tmp_path, every=4, keep=2) as checkpoints:
        latest = checkpoints.latest()
        result = opt.run(regression.params, batches_of, num_updates=total, checkpoints=checkpoints)
        assert checkpoints.steps()[-1] == total
    assert result.metrics["resumed_from"] == latest >= 4
    assert (result.metrics["stopped"], result.metrics["updates"]) == ("completed", total)
    kinds = [(event.kind, event.version) for event in result.log if event.kind == "resume"]
    assert kinds == [("resume", latest)] * 3
    assert result.metrics["history"]["loss"].shape == (total,)
    assert (np.diff([event.time for event in result.log]) >= 0).all()
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)
    if max_staleness == 0:
        unbroken_run = opt.run(regression.params, batches_of, num_updates=total)
        same_bits(result.params, unbroken_run.params)
        np.testing.assert_array_equal(
            result.metrics["history"]["loss"], unbroken_run.metrics["history"]["loss"]
        )


@pytest.mark.slow  # shows that test_a_run_that_breaks_off_goes_on can fail
def test_data_from_its_beginning_would_be_noticed(regression, tmp_path, monkeypatch):
    """The comparison above can fail: a resumed run that reads its data again ends elsewhere."""
    batches_of = regression.batches_of(3)
    opt = optimizer(regression, 0)
    unbroken_run = opt.run(regression.params, batches_of, num_updates=10)
    begin = compute.Streams.begin
    monkeypatch.setattr(
        compute.Streams, "begin", lambda self, worker, position: begin(self, worker, 0)
    )
    for total in (5, 10):
        with so.Checkpoints(tmp_path, every=5, keep=1) as checkpoints:
            result = opt.run(
                regression.params, batches_of, num_updates=total, checkpoints=checkpoints
            )
    assert np.abs(result.params["w"] - unbroken_run.params["w"]).max() > 1e-4


@pytest.mark.slow  # test_a_run_that_breaks_off_goes_on resumes, test_replay.py has who leaves
def test_a_finished_run_is_made_longer_by_other_workers(regression, tmp_path):
    """Four where there were three; then two: whoever is not there any more leaves."""
    logs = []
    for workers, total in ((3, 6), (4, 12), (2, 18)):
        opt = optimizer(regression, 1, workers=workers)
        with so.Checkpoints(tmp_path, every=5, keep=None) as checkpoints:
            result = opt.run(
                regression.params,
                regression.batches_of(4),
                num_updates=total,
                checkpoints=checkpoints,
            )
        logs.append(result.log)
        assert result.metrics["updates"] == total
    assert checkpoints.steps() == [5, 6, 10, 12, 15, 18]
    assert {event.worker for event in logs[1]} == {0, 1, 2, 3}
    assert [event.worker for event in logs[2] if event.kind == "leave"] == [2, 3]
    same_bits(
        optimizer(regression, 1, workers=4).replay(
            logs[2], regression.params, regression.batches_of(4)
        ),
        result.params,
    )


def test_a_run_that_is_complete_is_not_touched(regression, tmp_path):
    opt = optimizer(regression, 1)
    seen = []
    with so.Checkpoints(tmp_path, every=5, keep=None) as checkpoints:
        first = opt.run(
            regression.params, regression.batches_of(3), num_updates=5, checkpoints=checkpoints
        )
        rerun = opt.run(
            regression.params,
            lambda worker: seen.append(worker),
            num_updates=5,
            checkpoints=checkpoints,
        )
    assert not seen
    same_bits(rerun.params, first.params)
    assert list(rerun.log) == list(first.log)


@pytest.mark.slow  # test_a_run_that_breaks_off_goes_on, by the same code
def test_islands_go_on_and_the_log_explains_it(regression, tmp_path):
    devices = jax.devices()
    islands = [
        so.fsdp(
            optax.adam(0.01), so.make_mesh(devices=devices[2 * i : 2 * i + 2]), regression.loss_fn
        )
        for i in (0, 1)
    ]
    opt = so.parameter_server.async_local_sgd(islands, local_steps=2, max_staleness=1)
    batches_of = regression.batches_of(2)
    with so.Checkpoints(tmp_path, every=3, keep=2) as checkpoints, pytest.raises(BrokenOffError):
        opt.run(
            regression.params, failing(batches_of, (1, 8)), num_updates=30, checkpoints=checkpoints
        )
    with so.Checkpoints(tmp_path, every=3, keep=2) as checkpoints:
        result = opt.run(regression.params, batches_of, num_updates=12, checkpoints=checkpoints)
    assert result.metrics["resumed_from"] >= 3
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


def test_a_checkpoint_is_one_like_any_other(regression, tmp_path):
    """Whole folders with a manifest, parameters under their names, no half checkpoint."""
    with so.Checkpoints(tmp_path, every=4, keep=None) as checkpoints:
        optimizer(regression, 1).run(
            regression.params, regression.batches_of(3), num_updates=8, checkpoints=checkpoints
        )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "4", "8"]
    record = json.loads((tmp_path / "8" / "shardopt.json").read_text())
    assert {"params/w", "params/b", "step"} <= set(record["leaves"])
    (tmp_path / "8" / "shardopt.json").write_text("{}")
    with (
        so.Checkpoints(tmp_path, every=4, keep=None) as checkpoints,
        pytest.raises(so.errors.CheckpointError) as caught,
    ):
        optimizer(regression, 1).run(
            regression.params, regression.batches_of(3), num_updates=9, checkpoints=checkpoints
        )
    assert "step 8" in str(caught.value)
    assert "is damaged" in str(caught.value)


def test_other_settings_and_other_folders_are_refused(regression, tmp_path, message_of):
    with so.Checkpoints(tmp_path, every=4, keep=None) as checkpoints:
        optimizer(regression, 1).run(
            regression.params, regression.batches_of(3), num_updates=4, checkpoints=checkpoints
        )

        def run(opt, checkpoints=checkpoints):
            return message_of(
                ValueError,
                opt.run,
                regression.params,
                regression.batches_of(3),
                num_updates=9,
                checkpoints=checkpoints,
            )

        assert (
            run(optimizer(regression, 2))
            == "async_sgd: the checkpoint is of a run with other settings.\n"
            "  max_staleness: 1 in the checkpoint, 2 now\n"
            "Fix: use the settings of the checkpoint."
        )
    with so.Checkpoints(tmp_path, every=4, keep=None, resume=False) as checkpoints:
        assert (
            run(optimizer(regression, 1), checkpoints)
            == f"async_sgd: {tmp_path} already has checkpoints, the last of step 4.\n"
            "Fix: pass resume=True to so.Checkpoints to go on from there, or choose another folder."
        )


@pytest.mark.parametrize("max_staleness", tiered([0, 3], lambda bound: bound == 3))
def test_early_stopping_watches_the_evaluation(max_staleness, regression):
    seen = []

    def evaluate(params):
        seen.append(params)
        return {"val_loss": [3.0, 1.0, 2.0, 2.0][min(len(seen), 4) - 1]}

    rule = so.training.EarlyStopping("val_loss", patience=2)
    opt = optimizer(regression, max_staleness)
    result = opt.run(
        regression.params,
        regression.batches_of(3),
        num_updates=10**6,
        early_stopping=rule,
        evaluate=evaluate,
        evaluate_every=5,
    )
    metrics = result.metrics
    assert metrics["stopped"] == "early"
    assert metrics["best"] == {"step": 10, "val_loss": 1.0}
    assert [evaluation["step"] for evaluation in metrics["evaluations"]][:4] == [5, 10, 15, 20]
    assert metrics["evaluations"][1]["loss"] == pytest.approx(
        metrics["history"]["loss"][5:10].mean(), rel=1e-6
    )
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(3)), result.params)


def test_a_resumed_run_keeps_its_patience(regression, tmp_path):
    rule = so.training.EarlyStopping("score", patience=3, mode="max")
    opt = optimizer(regression, 0)
    arguments = {
        "early_stopping": rule,
        "evaluate": lambda params: {"score": 1.0},
        "evaluate_every": 1,
    }
    for total, stopped in ((3, "completed"), (10**6, "early")):
        with so.Checkpoints(tmp_path, every=1, keep=None) as checkpoints:
            result = opt.run(
                regression.params,
                regression.batches_of(3),
                num_updates=total,
                checkpoints=checkpoints,
                **arguments,
            )
        assert result.metrics["stopped"] == stopped
    assert result.metrics["best"] == {"step": 1, "score": 1.0}
    assert result.metrics["evaluations"][0]["step"] == 4


def test_bad_input_is_refused(regression, message_of):
    def run(**options):
        return message_of(
            (TypeError, ValueError),
            optimizer(regression, 1).run,
            regression.params,
            regression.batches_of(3),
            num_updates=3,
            **options,
        )

    assert (
        run(checkpoints="folder")
        == "async_sgd: checkpoints must be a so.Checkpoints, got str without directory, every,"
        " resume, due, due_in_memory, memory_every, save, wait, latest, restore.\n"
        "Fix: pass so.Checkpoints('folder', every=100, keep=3)."
    )
    assert (
        run(early_stopping="loss")
        == "async_sgd: early_stopping must be a so.training.EarlyStopping, got str.\n"
        'Fix: pass so.training.EarlyStopping("val_loss", patience=5).'
    )
    assert run(evaluate=3) == "async_sgd: evaluate must be a function (params) -> metrics, got int."
    assert run(evaluate_every=0) == "async_sgd: evaluate_every must be at least 1, got 0."
    assert (
        run(evaluate=lambda params: 3.0, evaluate_every=1)
        == 'async_sgd: evaluate must return a dict of metrics, got float.\nFix: return {"val_loss":'
        " loss}."
    )
    assert (
        run(early_stopping=so.training.EarlyStopping("val", patience=1), evaluate_every=1)
        == "async_sgd: early_stopping watches 'val', which is not among the metrics of this run:\n"
        "  loss\nFix: watch one of these, or return it from evaluate, every few steps."
    )
