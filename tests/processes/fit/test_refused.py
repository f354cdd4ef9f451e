"""A process that ends alone, without a launcher, tells the others why, and all end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import free_port

WORKER = Path(__file__).with_name("worker_refused.py")
NO_ERROR = "its program ended without an error, or called sys.exit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "reason", "code"),
    [
        ("strategy", "TypeError: fsdp: tx must be an optax.GradientTransformation", 1),
        ("fit", "ValueError: fit: num_steps must be at least 0, got -1.", 1),
        ("own loop", "KeyError: 'run_name'", 1),
        ("evaluation", "PermissionError: held_out.npz cannot be read", 1),
        ("exit in an own loop", NO_ERROR, 3),
        ("exit in an evaluation", NO_ERROR, 3),
        ("own loop left", NO_ERROR, 0),
        ("own loop with fewer steps", NO_ERROR, 0),
    ],
)
def test_the_end_of_one_process_alone_ends_the_others_with_its_reason(place, reason, code):
    port = str(free_port())
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
    assert [process.returncode for process in processes] == [1, code]
    expected = f"another process has ended, and this one waits for it.\n  process 1: {reason}"
    assert expected in errors[0]
    assert "waiting for process 1" not in errors[0]  # it would be named after 30 s
    if reason != NO_ERROR:
        assert reason in errors[1]
