"""One of two processes gets a signal, and both are killed three seconds later: the last step that both
have finished is on disk.
"""

import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support.processes import Fork, free_port
from support.stops import batch_of, loss_fn
from support.tiers import tiered

import shardopt as so

WORKER = Path(__file__).with_name("worker_stopped_together.py")

CASES = [
    # phase, the processes that are in it, the process that gets the signal
    ("evaluate_sleep", "01", 0),
    ("evaluate_sleep", "0", 1),
    ("evaluate_c", "1", 1),
    ("evaluation", "01", 1),
    ("evaluate_batches", "01", 0),
    ("evaluate_wrapped", "01", 1),
    ("data_c", "1", 0),
    ("data_sleep", "0", 0),
    ("data_queue", "01", 1),
    ("compile", "01", 0),
]

LEFT = ["data_sleep", "data_queue", "evaluation", "evaluate_batches", "evaluate_wrapped"]
"""Phases that both processes leave, so that they end by themselves."""

QUICK = [("data_sleep", "0"), ("evaluate_batches", "01")]


def start(folder, phase, blocked):
    """Start both processes."""
    port = free_port()
    processes = []
    for rank in range(2):
        log = folder / f"log-{rank}"
        processes.append(Fork(WORKER, [rank, port, folder, phase, blocked], log, log))
    return processes


@pytest.mark.parametrize(
    ("phase", "blocked", "receiver"), tiered(CASES, lambda case: case[:2] in QUICK)
)
def test_the_last_step_of_both_is_on_disk_after_a_signal_to_one(tmp_path, phase, blocked, receiver):
    processes = start(tmp_path, phase, blocked)

    def texts():
        return "".join((tmp_path / f"log-{rank}").read_text() for rank in range(2))

    try:
        deadline = time.monotonic() + 300
        while not all((tmp_path / f"arrived-{rank}").exists() for rank in blocked):
            assert time.monotonic() < deadline, texts()
            assert all(process.poll() is None for process in processes), texts()
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(processes[receiver].pid, signal.SIGTERM)
        grace = min(30.0, 3 * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1)))
        end = time.monotonic() + grace
        while not (tmp_path / "run" / "10").exists() and time.monotonic() < end:
            time.sleep(0.02)
        if phase in LEFT:
            assert [process.wait(120) for process in processes] == [0, 0], texts()
    finally:
        for process in processes:
            process.kill()
    opt = so.ddp(optax.adam(0.05), so.make_mesh(devices=jax.devices()[:1]), loss_fn)
    opt.abstract_state({"w": np.zeros(4, np.float32)})
    state = opt.init({"w": np.zeros(4, np.float32)})
    for step in range(10):
        state, _ = opt.step(state, batch_of(step))
    with so.Checkpoints(tmp_path / "run", every=4, keep=3) as checkpoints:
        assert checkpoints.latest() == 10, texts()
        restored, extra = checkpoints.restore(opt, step=10)
    assert (int(restored.step), extra["batches"]["drawn"]) == (10, 10)
    np.testing.assert_allclose(restored.params["w"], state.params["w"], rtol=1e-4, atol=1e-6)
