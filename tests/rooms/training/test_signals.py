"""SIGTERM and Ctrl-C finish the step and save.

If several processes disagree, the weightiest verdict counts.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
from support.tiers import tiered

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core import NonFiniteLossError
from shardopt.training import EarlyStopping
from shardopt.training._fit import fit
from shardopt.training._resume import VERDICTS, common_verdict
from shardopt.training._stop import Stop


@pytest.fixture(autouse=True)
def handlers():
    """Install stand-ins for earlier handlers of the program, which must be back afterwards."""
    mine = {number: lambda *_: None for number in (signal.SIGTERM, signal.SIGINT)}
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
    resumed_checkpoints = memory(10, disk=checkpoints.disk, resume=True)
    resumed = fit(
        opt,
        new_state(),
        iter(batches),
        num_steps=30,
        checkpoints=resumed_checkpoints,
        progress=False,
    )
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
        stop = Stop()
        with stop.watched():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.verdict is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_back_after_an_error():
    def fail_after_signals():
        stop = Stop()
        with stop.watched():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError(stop.verdict)

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
        timer.join()  # a run is never over before its signal to end

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


def stop_in(function, step, *signals):
    """Return a function of a state that waits for its end at a step, after it sent signals."""

    def evaluate(state):
        if int(state.step) == step:
            for number in signals or (signal.SIGTERM,):
                os.kill(os.getpid(), number)
            time.sleep(600)
        return function(state)

    return evaluate


def loss_of(state):
    return {"distance": float(np.abs(np.asarray(state.params["w"]) - 0.3).sum())}


@pytest.mark.parametrize("step", [5, 15])
def test_an_evaluation_that_a_signal_ends_is_the_first_thing_after_the_restart(
    opt, new_state, batches, same, tmp_path, step
):
    """Early stopping, the best checkpoint and the history then equal an unbroken run."""

    def run(folder, evaluate):
        with Checkpoints(folder, every=5, keep=2, best="distance") as checkpoints:
            result = fit(
                opt,
                new_state(),
                iter(batches),
                num_steps=30,
                evaluate=evaluate,
                early_stopping=EarlyStopping("distance", patience=3),
                checkpoints=checkpoints,
                progress=False,
            )
            return result, checkpoints.steps(), checkpoints.best_step()

    unbroken, *unbroken_steps = run(tmp_path / "unbroken", loss_of)
    first, steps, _ = run(tmp_path / "broken", stop_in(loss_of, step))
    assert (first.step, first.stopped, max(steps)) == (step, "sigterm", step)
    evaluated = []
    second, *second_steps = run(
        tmp_path / "broken", lambda state: evaluated.append(int(state.step)) or loss_of(state)
    )
    assert evaluated[0] == step
    assert same(second.state, unbroken.state)
    assert (second.stopped, second.best) == (unbroken.stopped, unbroken.best)
    assert second_steps == unbroken_steps


class Counting:
    """An iterator with a state, that waits for its end when it draws a batch."""

    def __init__(self, batches, stop_at=None):
        self.batches = batches
        self.stop_at = stop_at
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        if self.drawn == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return self.batches[self.drawn - 1]

    def get_state(self):
        return {"drawn": self.drawn}

    def set_state(self, state):
        self.drawn = state["drawn"]


@pytest.mark.parametrize("stop_at", [2, 11, 24])
def test_a_batch_that_a_signal_interrupts_is_drawn_again(
    opt, new_state, batches, same, tmp_path, stop_at
):
    unbroken = fit(opt, new_state(), batches, num_steps=30, progress=False)
    for data in (Counting(batches, stop_at), Counting(batches)):
        with Checkpoints(tmp_path, every=10, keep=2) as checkpoints:
            result = fit(
                opt, new_state(), data, num_steps=30, checkpoints=checkpoints, progress=False
            )
            assert checkpoints.latest() == result.step
        assert result.step == (30 if data.stop_at is None else stop_at - 1)
    assert same(result.state, unbroken.state)


def test_a_run_without_checkpoints_leaves_the_code_of_the_user_too(opt, new_state, batches):
    evaluate = stop_in(loss_of, 4, signal.SIGINT), 2
    result = fit(opt, new_state(), batches, num_steps=30, evaluate=evaluate, progress=False)
    assert (result.step, result.stopped) == (4, "interrupted")


def test_a_signal_ends_the_last_evaluation(opt, new_state, batches, memory):
    checkpoints = memory(40)
    options = {"evaluate": stop_in(loss_of, 6), "checkpoints": checkpoints, "progress": False}
    result = fit(opt, new_state(), batches, num_steps=6, **options)
    assert (result.step, result.stopped) == (6, "sigterm")
    assert sorted(checkpoints.disk) == [6]


def test_an_evaluation_that_trains_something_else_is_left_too(opt, new_state, batches, memory):
    checkpoints = memory(40)

    def evaluate(state):
        probe, _ = opt.step(new_state(), batches[0])
        return stop_in(lambda _: {"probe": float(probe.step)}, 4)(state)

    options = {"checkpoints": checkpoints, "evaluate": (evaluate, 2), "progress": False}
    result = fit(opt, new_state(), batches, num_steps=30, **options)
    assert (result.step, result.stopped) == (4, "sigterm")
    assert sorted(checkpoints.disk) == [4]


def test_a_second_interrupt_leaves_an_evaluation_at_once(opt, new_state, batches):
    with pytest.raises(KeyboardInterrupt):
        fit(
            opt,
            new_state(),
            batches,
            num_steps=30,
            evaluate=(stop_in(loss_of, 4, signal.SIGINT, signal.SIGINT), 2),
            progress=False,
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_handler_of_the_user_is_called_once_the_run_has_saved(
    opt, new_state, batches, memory, number
):
    checkpoints = memory(40)
    saved_steps = []
    previous = signal.signal(number, lambda *_: saved_steps.append(sorted(checkpoints.disk)))
    try:
        fit(
            opt,
            new_state(),
            sending(batches, (3, number)),
            num_steps=30,
            checkpoints=checkpoints,
            progress=False,
        )
    finally:
        signal.signal(number, previous)
    assert saved_steps == [[3]]


def test_a_handler_that_exits_does_so_once_the_run_has_saved(opt, new_state, batches, memory):
    checkpoints = memory(40)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    options = {"num_steps": 30, "checkpoints": checkpoints, "progress": False}
    try:
        with pytest.raises(SystemExit):
            fit(opt, new_state(), sending(batches, (3, signal.SIGTERM)), **options)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert sorted(checkpoints.disk) == [3]


def test_the_descriptor_for_signals_of_before_is_back_and_hears_of_them(opt, new_state, batches):
    """asyncio has such a descriptor, and its loop runs in a notebook."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing)
    try:
        fit(opt, new_state(), sending(batches, (3, signal.SIGTERM)), num_steps=30, progress=False)
    finally:
        assert signal.set_wakeup_fd(previous) == writing
    assert bytes([signal.SIGTERM]) in os.read(reading, 64)


def test_a_state_that_is_not_finite_is_not_saved_at_a_signal(opt, new_state, batches, memory):
    checkpoints = memory(40)

    def data():
        yield batches[0]
        yield {"x": batches[1]["x"], "y": np.full(8, np.nan, np.float32)}
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    with pytest.raises(NonFiniteLossError):
        fit(opt, new_state(), data(), num_steps=30, checkpoints=checkpoints, progress=False)
    assert checkpoints.disk == {}


def test_one_process_has_nobody_to_ask():
    assert common_verdict(None, None, due=False) is None
    assert common_verdict(None, "early", due=False) == "early"
    assert common_verdict("sigterm", "early", due=True) == "sigterm"


def test_the_weightiest_verdict_counts(monkeypatch):
    codes = []

    def gather(code):
        codes.append(int(code))
        return np.array([code, VERDICTS.index("interrupted"), -1])

    monkeypatch.setattr("jax.process_count", lambda: 3)
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
    assert common_verdict("early", due=False) is None
    assert codes == []
    assert common_verdict("early", None, due=True) == "interrupted"
    assert common_verdict("sigterm", due=True) == "sigterm"
    assert common_verdict(None, due=True) == "interrupted"
    assert codes == [1, 3, -1]
