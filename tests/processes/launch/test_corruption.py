"""A process whose device computes wrong ends with its own code, and the launcher goes on without
it.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support import faults
from support.paths import ROOT
from support.processes import saved_arrays

import shardopt as so
from shardopt.core._errors import CORRUPTED
from shardopt.training._fit import fit

WORKER = Path(__file__).with_name("worker_with_a_fault.py")
MESSAGE = (
    "fit: 1 device has wrong bits in the gradient of its own rows, at step 5 (batch 5, both counted"
    " from 0). The step is not used, and nothing was saved."
)

pytestmark = pytest.mark.slow


def saved_steps(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


def test_a_process_ends_with_the_code_of_its_device(tmp_path):
    """Without a launcher, and after the handlers of atexit."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(WORKER), str(tmp_path)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == CORRUPTED, ended.stderr
    assert f"{MESSAGE}\n  device 1 (cpu, process 0)\n" in ended.stderr
    assert ended.stdout.endswith("the handlers of atexit ran\n")
    assert saved_steps(tmp_path) == ["2", "4"]


def test_the_launcher_goes_on_without_the_process_of_the_wrong_device(shardopt, tmp_path):
    options = [
        "--processes",
        "2:3",
        "--max-restarts",
        1,
        "--log-dir",
        tmp_path / "logs",
    ]
    job = shardopt("launch", *options, "--", WORKER, tmp_path, stderr=subprocess.STDOUT)
    said, _ = job.communicate(timeout=500)
    assert job.returncode == 0, said
    assert "launch: process 1 of 3 ended with exit code 117; the others were ended.\n" in said
    assert "launch: starting again with 2 processes without place 1, restart 1 of 1.\n" in said
    assert "Resuming from step 4 in" in said
    for rank in range(3):  # all processes know which one is wrong, if jax lets them say it
        log = (tmp_path / "logs" / f"process-{rank}.log").read_text()
        is_ended_by_jax = rank == 2 and "JAX distributed service detected fatal errors" in log
        is_named = re.search(rf"{re.escape(MESSAGE)}\n  device \d+ \(cpu, process 1\)\nFix: ", log)
        assert is_named or is_ended_by_jax
    assert saved_steps(tmp_path) == ["2", "4", "6", "8"]
    opt = so.ddp(
        optax.adam(0.01),
        so.make_mesh(data=2, devices=jax.devices()[:2]),
        faults.loss,
        view="unproved",
    )
    data = itertools.islice(faults.batches(3), 8)
    expected = fit(
        opt, opt.init(faults.first_params()), data, num_steps=8, progress=False
    ).state.params
    final_params = saved_arrays(tmp_path / "params.npz")
    for name, leaf in expected.items():
        np.testing.assert_allclose(final_params[name], leaf, rtol=1e-4, atol=1e-6)
