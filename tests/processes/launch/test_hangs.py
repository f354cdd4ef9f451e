"""Ranks that are alive and stuck, under `shardopt launch --hang-timeout`: named right, restarted,
same parameters bit for bit.
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT
from support.processes import free_port, saved_arrays

WORKER = Path(__file__).with_name("worker_that_hangs.py")
PROCESSES = 3

pytestmark = pytest.mark.slow


def run(folder, fault, victim, step):
    """Run a job whose one process hangs at a step; return its messages, and its parameters at the
    end.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    # by the first of all draws
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder.parent / "compiled")
    options = ["--processes", str(PROCESSES), "--max-restarts", "1", "--hang-timeout", "4"]
    command = [
        sys.executable,
        "-m",
        "shardopt.cli",
        "launch",
        *options,
        "--log-dir",
        str(folder / "logs"),
        "--",
    ]
    command += [str(WORKER), str(folder), fault, str(victim), str(step)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as job:
        try:
            said, _ = job.communicate(timeout=300)
        finally:
            job.kill()
    assert job.returncode == 0, said
    return said, saved_arrays(folder / "params.npz")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    said, params = run(tmp_path_factory.mktemp("undisturbed"), "none", 0, 0)
    assert "hangs" not in said
    return params


IN = {
    "stopped": "is stopped by a signal",
    "collective": "is stopped by a signal",
    "busy": "in spin_in_python",
    "native": "in spin_in_native_code",
    "network": "is alive: it is cut off from the watch, or native code keeps its interpreter",
    "data": "in batches",
    "checkpoint": "in digest",
}

CAN_SAVE = ("busy", "data")
"""Faults in which Python can run on all processes, so that the end saves the last step."""


@pytest.mark.parametrize("draw", range(10))
@pytest.mark.parametrize("fault", IN)
def test_a_rank_that_hangs_is_named_and_the_outcome_is_that_of_an_undisturbed_run(
    undisturbed, tmp_path, fault, draw
):
    rng = random.Random(f"{fault} {draw}")
    victim = rng.randrange(PROCESSES)
    step = rng.randrange(21, 49)
    said, params = run(tmp_path, fault, victim, step)
    named = re.findall(r"^launch: (?:process|all) .*$", said, re.MULTILINE)
    assert len(named) == 1, said
    assert named[0].startswith(f"launch: process {victim} of {PROCESSES} hangs: "), said
    assert IN[fault] in said
    assert "launch: starting again with 3 processes, restart 1 of 1.\n" in said
    saved_step = str(step) if fault in CAN_SAVE else "[1-4]0"
    assert re.search(rf"^Resuming from step {saved_step} in ", said, re.MULTILINE), said
    assert params.keys() == undisturbed.keys()
    assert all(np.array_equal(params[name], undisturbed[name]) for name in params)


CLUSTER = """
import time, jax, shardopt as so
so.initialize()
so.runtime.watchdog(4)

def spin():
    while True: pass

for step in range(9):
    so.runtime.report_progress(step, "data")
    if step == 4 and jax.process_index() == 1: spin()
    so.runtime.report_progress(step, "wait")
    if step > 4: time.sleep(1000)
"""


def test_a_watchdog_ends_a_job_that_no_launcher_watches():
    address = f"127.0.0.1:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", CLUSTER]
    jobs = [
        subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(rank)}, **pipes)
        for rank in (0, 1)
    ]
    try:
        said = [job.communicate(timeout=200)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [124, 124], said
    assert re.search(
        r"^watchdog: process 1 of 2 hangs: without progress for \d s, last on \S+ at step 4 in 'data'\.$",
        said[0],
        re.M,
    )
    assert "in spin" in said[0]
    assert "watchdog: the stacks of process 0:" in said[0]
