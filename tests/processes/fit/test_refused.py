"""A process that fails alone, without a launcher, tells the others why, and all end."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT

WORKER = Path(__file__).with_name("worker_refused.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("strategy", "TypeError: fsdp: tx must be an optax.GradientTransformation"),
        ("fit", "ValueError: fit: num_steps must be at least 0, got -1."),
        ("own loop", "KeyError: 'run_name'"),
        ("evaluation", "PermissionError: held_out.npz cannot be read"),
    ],
)
def test_an_error_of_one_process_alone_ends_the_others_with_its_message(place, error):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), port, place],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1]
    assert (
        f"another process has ended with an error, and this one waits for it.\n  process 1: {error}"
        in errors[0]
    )
    assert error in errors[1]
    assert "waiting for process 1" not in errors[0]  # it would be named after 30 s
