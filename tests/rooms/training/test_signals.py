"""SIGTERM and Ctrl-C finish the step and save.

Of several processes the weightiest verdict counts.
"""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from support.tiers import tiered

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.training import EarlyStopping
from shardopt.training._fit import fit
from shardopt.training._resume import VERDICTS, catch_signals, common_verdict


@pytest.fixture(autouse=True)
def handlers():
    """Stand-ins for what the program had before, which must be back afterwards and never be called."""
    mine = {
        number: lambda *_: pytest.fail("a handler of before was called")
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    before = {number: signal.signal(number, handler) for number, handler in mine.items()}
    try:
        yield
        assert {number: signal.getsignal(number) for number in mine} == mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sending(batches, *signals):
    """Yield batches, and send this process the signals (drawn count, number) on the way."""
    for drawn, batch in enumerate(batches, start=1):
        for when, number in signals:
            if when == drawn:
                os.kill(os.getpid(), number)
        yield batch


@pytest.mark.parametrize(
    ("number", "stopped"), [(signal.SIGTERM, "sigterm"), (signal.SIGINT, "interrupted")]
)
@pytest.mark.parametrize("when", [1, 7, 10])
def test_a_signal_finishes_the_step_and_saves(
    opt, new_state, batches, memory, capsys, number, stopped, when
):
    checkpoints = memory(10)
    result = fit(
        opt,
        new_state(),
        sending(batches, (when, number)),
        num_steps=30,
        checkpoints=checkpoints,
        evaluate=lambda state: {"at": int(state.step)},
        progress=False,
    )
    assert (result.step, result.stopped) == (when, stopped)
    assert sorted(checkpoints.disk) == [when]
    assert checkpoints.pending == {}
    # no evaluation in a hurry, other than a scheduled one
    assert ("at" in result.history[-1]) == (when == 10)
    reason = {"sigterm": "SIGTERM", "interrupted": "interrupted from the keyboard"}[stopped]
    assert capsys.readouterr().err == f"Stopped at step {when} of 30: {reason}.\n"


def test_resuming_after_a_signal_equals_an_unbroken_run(opt, new_state, batches, memory, same):
    unbroken = fit(opt, new_state(), batches, num_steps=30, progress=False)
    checkpoints = memory(10)
    fit(
        opt,
        new_state(),
        sending(batches, (13, signal.SIGTERM)),
        num_steps=30,
        checkpoints=checkpoints,
        progress=False,
    )
    again = memory(10, disk=checkpoints.disk, resume=True)
    resumed = fit(opt, new_state(), iter(batches), num_steps=30, checkpoints=again, progress=False)
    assert same(resumed.state, unbroken.state)


def test_a_second_interrupt_stops_at_once(opt, new_state, batches, memory):
    checkpoints = memory(5)
    twice = sending(batches, (7, signal.SIGINT), (7, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(opt, new_state(), twice, num_steps=30, checkpoints=checkpoints, progress=False)
    assert sorted(checkpoints.disk) == [5]  # the one under way was waited for, no other was begun


def test_a_signal_while_evaluating_at_the_end_is_not_lost(opt, new_state, batches):
    def evaluate(state):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"at": 1.0}

    result = fit(opt, new_state(), batches, num_steps=3, evaluate=evaluate, progress=False)
    assert (result.step, result.stopped) == (3, "sigterm")


def test_a_signal_outweighs_early_stopping(opt, new_state, batches):
    result = fit(
        opt,
        new_state(),
        sending(batches, (6, signal.SIGTERM)),
        num_steps=30,
        evaluate=(lambda state: {"constant": 1.0}, 2),
        early_stopping=EarlyStopping("constant", patience=2),
        progress=False,
    )
    assert (result.step, result.stopped) == (6, "sigterm")


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with catch_signals() as received:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
            assert received() is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_back_after_an_error():
    def fail_after_signals():
        with catch_signals() as received:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError(received())

    with pytest.raises(RuntimeError, match="sigterm"):
        fail_after_signals()


def test_other_threads_train_without_signals(opt, new_state, batches):
    results = []

    def run():
        return results.append(fit(opt, new_state(), batches, num_steps=3, progress=False))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].stopped == "completed"


@pytest.mark.parametrize("draw", tiered(range(10), lambda draw: False))
def test_sigterm_at_any_moment_costs_nothing_but_time(
    opt, new_state, batches, same, tmp_path, draw
):
    """Told to end three times, wherever it is: in a step, an evaluation or a save.

    Each time it goes on from there.
    """
    rng = random.Random(draw)

    def slowly(*, until):
        timer = threading.Timer(until, os.kill, (os.getpid(), signal.SIGTERM))
        for drawn, batch in enumerate(batches):
            if drawn == 0:
                timer.start()
            time.sleep(0.005)
            yield batch
        timer.join()  # a run is never over before it is told to end

    unbroken = fit(opt, new_state(), batches, num_steps=40, progress=False)
    ends = []
    for attempt in range(4):
        data = batches if attempt == 3 else slowly(until=rng.uniform(0, 0.15))
        with Checkpoints(tmp_path, every=4, keep=2) as checkpoints:
            result = fit(
                opt, new_state(), iter(data), num_steps=40, checkpoints=checkpoints, progress=False
            )
            assert checkpoints.latest() == result.step
        ends.append(result.stopped)
    assert ends[-1] == "completed"
    assert "sigterm" in ends
    assert same(result.state, unbroken.state)


def test_one_process_has_nobody_to_ask():
    assert common_verdict(None, None, due=False) is None
    assert common_verdict(None, "early", due=False) == "early"
    assert common_verdict("sigterm", "early", due=True) == "sigterm"


def test_the_weightiest_verdict_counts(monkeypatch):
    asked = []

    def gather(code):
        asked.append(int(code))
        return np.array([code, VERDICTS.index("interrupted"), -1])

    monkeypatch.setattr("jax.process_count", lambda: 3)
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
    assert common_verdict("early", due=False) is None
    assert asked == []
    assert common_verdict("early", None, due=True) == "interrupted"
    assert common_verdict("sigterm", due=True) == "sigterm"
    assert common_verdict(None, due=True) == "interrupted"
    assert asked == [1, 3, -1]
