"""Checkpoints that are due by time: `every` is a timedelta, and the clock is that of process 0."""

import datetime
import re

import numpy as np
import pytest

import shardopt as so
from shardopt.checkpoint import _checkpoints as module
from shardopt.checkpoint._checkpoints import Checkpoints

MINUTES = datetime.timedelta(minutes=10)


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "_clock", clock)
    return clock


@pytest.mark.parametrize(
    ("every", "seconds", "steps"),
    [
        (MINUTES, [100] * 12, [6, 12]),
        (MINUTES, [599.9, 0.1, 1300, 599, 1], [2, 3, 5]),
        (datetime.timedelta(milliseconds=500), [0.3] * 6, [2, 4, 6]),
        (datetime.timedelta(days=1), [3600] * 30, [24]),
    ],
)
def test_a_checkpoint_is_due_when_the_time_since_the_last_one_is_over(
    every, seconds, steps, clock, tmp_path
):
    saved = []
    with Checkpoints(tmp_path, every, keep=1) as checkpoints:
        for step, duration in enumerate(seconds, start=1):
            clock.seconds += duration
            if checkpoints.due(step):
                checkpoints.save({"a": np.zeros(2)}, step=step)
                saved.append(step)
    assert saved == steps


def test_the_first_question_about_a_step_decides(clock, tmp_path):
    with Checkpoints(tmp_path, MINUTES, keep=1) as checkpoints:
        assert not checkpoints.due(1)
        clock.seconds = 601
        assert not checkpoints.due(1)
        assert not checkpoints.due(0)
        assert checkpoints.due(2)


def test_fit_saves_and_evaluates_by_time_and_goes_on_from_there(
    clock, opt, new_state, batches, tmp_path
):
    def slow_batches():
        for batch in batches:
            clock.seconds += 200
            yield batch

    evaluated = []

    def evaluate(state):
        evaluated.append(int(state.step))
        return {"value": 1.0}

    def run(num_steps):
        with Checkpoints(tmp_path, MINUTES, keep=None) as checkpoints:
            so.fit(
                opt,
                new_state(),
                slow_batches(),
                num_steps=num_steps,
                evaluate=evaluate,
                checkpoints=checkpoints,
                progress=False,
                log_every=4,
            )
            return checkpoints.steps()

    assert run(7) == [3, 6, 7]
    assert evaluated == [3, 6, 7]
    # seven batches are drawn again, and their time passes before the next step
    assert run(12) == [3, 6, 7, 8, 11, 12]


def test_several_processes_ask_only_where_they_agree(monkeypatch, tmp_path):
    monkeypatch.setattr(module.jax, "process_count", lambda: 2)
    asked_steps = []
    checkpoints = type(
        "Fake", (), {"every": MINUTES, "due": lambda _, step: asked_steps.append(step)}
    )()
    for step in range(1, 9):
        module.is_save_due(checkpoints, step, agree_every=4)
    assert asked_steps == [4, 8]


def test_a_verified_run_verifies_the_step_before_a_save_by_time(
    clock, opt, new_state, batches, tmp_path
):
    def slow_batches():
        for batch in batches:
            clock.seconds += 250
            yield batch

    with Checkpoints(tmp_path, MINUTES, keep=None) as checkpoints:
        so.fit(
            opt,
            new_state(),
            slow_batches(),
            num_steps=7,
            checkpoints=checkpoints,
            progress=False,
            cross_check_every=100,
        )
        steps = checkpoints.steps()
    assert steps == [3, 6, 7]
    sums = [module.read_meta(tmp_path / str(step)).sums for step in steps]
    assert all(sums)


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        (
            datetime.timedelta(0),
            ValueError,
            "Checkpoints: every must be above 0, got datetime.timedelta(0).\nFix: pass a positive"
            " time, such as datetime.timedelta(minutes=10), or a number of steps.",
        ),
        (
            -MINUTES,
            ValueError,
            "Checkpoints: every must be above 0, got datetime.timedelta(days=-1, seconds=85800)."
            "\nFix: pass a positive time, such as datetime.timedelta(minutes=10), or a number of"
            " steps.",
        ),
        (600.0, TypeError, "Checkpoints: every must be an integer, got 600.0 (float)."),
    ],
)
def test_a_time_that_is_not_positive_is_refused(every, error, message, tmp_path):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        Checkpoints(tmp_path, every, keep=1)


def test_an_asynchronous_run_is_due_by_updates(tmp_path):
    from shardopt.parameter_server._callbacks import Callbacks

    message = (
        "checkpoints of an asynchronous run are due by its updates, not by time.\nFix: pass"
        " so.Checkpoints(folder, every=100, keep=3), with a number of updates."
    )
    with (
        Checkpoints(tmp_path, MINUTES, keep=1) as checkpoints,
        pytest.raises(ValueError, match=re.escape(message)),
    ):
        Callbacks(caller="async_sgd", checkpoints=checkpoints)
