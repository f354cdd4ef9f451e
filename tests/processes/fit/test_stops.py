"""A run gets a signal in every phase, and is killed three seconds later. The last finished step is
on disk, and all checkpoints are whole.
"""

import os
import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support.processes import Fork
from support.stops import NUM_STEPS, batch_of, loss_fn

import shardopt as so

WORKER = Path(__file__).with_name("worker_stopped.py")

PHASES = {
    "compile": ["compile", "first_compile"],
    "data": ["data_sleep", "data_queue", "data_c", "data_swallows"],
    "evaluation": ["evaluation", "evaluate_sleep", "evaluate_c"],
    "restoring": ["restore"],
    "saving": ["save"],
    "generation": ["evaluate_generates", "evaluate_generates_at_once"],
    "others": ["log_sleep", "training"],
}
"""Members of each phase; each is a method or a branch in worker_stopped.py."""


def draw_cases():
    """Return fifty cases (phase, member, seconds until the signal, signal); seven at least a phase."""
    rng = random.Random(58)
    cases = []
    for phase, members in PHASES.items():
        for number in range(8 if phase == "data" else 7):
            member = members[number % len(members)]
            seconds = round(rng.uniform(0, 0.6), 2)
            number_of_signal = signal.SIGTERM if number % 3 else signal.SIGINT
            marks = [] if number == 0 else [pytest.mark.slow]
            name = f"{member}-{seconds}-{number_of_signal.name}"
            cases.append(pytest.param(member, seconds, number_of_signal, marks=marks, id=name))
    return cases


@pytest.fixture(scope="module")
def parameters():
    """Return the parameters after each step of an undisturbed run, by step."""
    opt = so.ddp(optax.adam(0.05), so.make_mesh(devices=jax.devices()[:1]), loss_fn)
    state = opt.init({"w": np.zeros(4, np.float32)})
    by_step = {}
    for step in range(NUM_STEPS):
        state, _ = opt.step(state, batch_of(step))
        by_step[step + 1] = np.asarray(state.params["w"])
    return by_step


def wait_for(condition, seconds):
    """Wait until the condition holds, at most so long; return whether it holds."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


def grace():
    """Return three seconds, and up to twenty if other programs use this machine too."""
    return min(20.0, 3 * max(1.0, 1.5 * os.getloadavg()[0] / (os.cpu_count() or 1)))


def steps_on_disk(folder):
    """Return the steps of the checkpoints that are complete."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return {int(name) for name in names if name.isdigit()}


@pytest.mark.parametrize(("phase", "seconds", "number"), draw_cases())
def test_the_last_finished_step_is_on_disk_three_seconds_after_a_signal(
    parameters, tmp_path, phase, seconds, number
):
    log = tmp_path / "log"
    process = Fork(WORKER, [tmp_path, phase], log, log)
    arrived = tmp_path / "arrived"
    try:
        assert wait_for(arrived.exists, 300)
        time.sleep(seconds)
        finished_step = int(arrived.read_text())
        newest_step = max(steps_on_disk(tmp_path / "run"), default=0)

        def is_saved():
            newer_steps = {step for step in steps_on_disk(tmp_path / "run") if step > newest_step}
            return bool(newer_steps) and max(newer_steps) >= finished_step

        os.kill(process.pid, number)
        # The kill comes as soon as the step is saved, and may hit the steps after it.
        wait_for(lambda: process.poll() is not None or is_saved(), grace())
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGKILL), log.read_text()

    opt = so.ddp(optax.adam(0.05), so.make_mesh(devices=jax.devices()[:1]), loss_fn)
    opt.abstract_state({"w": np.zeros(4, np.float32)})
    with so.Checkpoints(tmp_path / "run", every=4, keep=3) as checkpoints:
        assert checkpoints.latest() >= finished_step, log.read_text()
        for step in checkpoints.steps():
            state, extra = checkpoints.restore(opt, step=step)
            assert (int(state.step), extra["batches"]["drawn"]) == (step, step)
            np.testing.assert_allclose(state.params["w"], parameters[step], rtol=1e-4, atol=1e-6)


def test_each_phase_gets_a_signal_at_seven_moments():
    members = [case.values[0] for case in draw_cases()]
    counts = [sum(member in names for member in members) for names in PHASES.values()]
    assert len(members) == 50
    assert min(counts) >= 7
