"""Four processes under `shardopt launch`, one killed, all told to end, or their checkpoints
deleted, at ten random moments.

Nothing is lost but time.

The parameters at the end equal the parameters of an undisturbed run, bit for bit. The reason is
that gloo sums over as many processes in the same order each time."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT
from support.processes import saved_arrays

WORKER = Path(__file__).with_name("worker_of_four.py")
STEPS = 400
ENDS_WITHIN = 60
"""Seconds from the kill to the launcher's report."""

pytestmark = pytest.mark.slow


@pytest.fixture
def start():
    """Return a function that starts the job in a folder, errors on standard output."""
    started = []

    def run(folder, *options):
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "shardopt.cli", "launch", "--processes", "4", *options]
        command += ["--log-dir", str(folder / "logs"), "--", str(WORKER), str(folder), str(STEPS)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The parameters at the end of a run that nobody disturbs, and how many seconds of steps it
    had.
    """
    folder = tmp_path_factory.mktemp("unbroken")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-m",
        "shardopt.cli",
        "launch",
        "--processes",
        "4",
        "--log-dir",
        str(folder / "logs"),
    ]
    began = None
    with subprocess.Popen(
        [*command, "--", str(WORKER), str(folder), str(STEPS)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        for line in job.stdout:
            began = began or (time.monotonic() if line.startswith("step ") else None)
    assert job.returncode == 0
    return saved_arrays(folder / "params.npz"), time.monotonic() - began


def pid_of(rank, folder):
    """Return the process of this number that trains in a folder, or None."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            place = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if str(folder).encode() in words and f"JAX_PROCESS_ID={rank}".encode() in place:
            return int(process.name)
    return None


def same(folder, params):
    final_params = saved_arrays(folder / "params.npz")
    return final_params.keys() == params.keys() and all(
        np.array_equal(final_params[name], params[name]) for name in params
    )


@pytest.mark.parametrize("draw", range(10))
def test_one_of_four_is_killed(start, unbroken, tmp_path, draw):
    """It is killed at any time from its start on: while it imports, connects, compiles, trains or
    saves.
    """
    rng = random.Random(draw)
    victim = rng.randrange(4)
    trains = draw >= 2
    delay = rng.uniform(0, 0.7 * unbroken[1] if trains else 8)
    job = start(tmp_path, "--max-restarts", "1")
    said = [next(line for line in job.stdout if line.startswith("step "))] if trains else []
    time.sleep(delay)
    while (pid := pid_of(victim, tmp_path)) is None:
        assert job.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    for line in job.stdout:
        said.append(line)
        if line.startswith("launch: process"):
            assert time.monotonic() - killed < ENDS_WITHIN
            assert (
                line
                == f"launch: process {victim} of 4 was killed by SIGKILL; the others were ended.\n"
            )
    text = "".join(said)
    assert job.wait() == 0, text
    assert text.count("launch: process") == 1, text
    assert "launch: starting again with 4 processes, restart 1 of 1.\n" in text
    if re.search(r"^step [1-9]\d\d/", text.partition("launch: process")[0], re.MULTILINE):
        assert re.search(r"^Resuming from step [1-9]\d*0 in ", text, re.MULTILINE)
    assert same(tmp_path, unbroken[0])


@pytest.mark.parametrize("draw", range(10))
def test_four_are_told_to_end(start, unbroken, tmp_path, draw):
    """SIGTERM to the launcher, as a cluster sends it, and the job started again: as often as it
    takes.
    """
    rng = random.Random(100 + draw)
    trains = draw >= 2
    saved = []
    job = start(tmp_path)
    said = [next(line for line in job.stdout if line.startswith("step "))] if trains else []
    time.sleep(rng.uniform(0, 0.7 * unbroken[1] if trains else 8))
    job.send_signal(signal.SIGTERM)
    signal_time = time.monotonic()
    said += list(job.stdout)
    job.wait()
    assert time.monotonic() - signal_time < ENDS_WITHIN
    text = "".join(said)
    if trains:  # it answers: saves, and ends well
        stopped, step = re.search(r"^(sigterm|completed) (\d+)$", text, re.MULTILINE).groups()
        # a process that has trained, and ends, is ended by the signal as any program
        assert job.returncode == 0 or (stopped == "completed" and job.returncode == 143), text
        assert (stopped, int(step)) != ("completed", 0)
        saved = sorted(
            int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()
        )
        assert saved[-1] == int(step)
    else:  # before there is anything to save it may simply end
        # -SIGTERM is the launcher's own end, while it is importing itself: a shell calls both 143.
        assert job.returncode in (0, 128 + signal.SIGTERM, -signal.SIGTERM), text
        assert "Traceback" not in text
    restarted_job = start(tmp_path)
    text = "".join(restarted_job.stdout)
    assert restarted_job.wait() == 0, text
    if saved:
        assert f"Resuming from step {saved[-1]} in" in text or saved[-1] == STEPS
    assert same(tmp_path, unbroken[0])


@pytest.mark.parametrize("draw", range(10))
def test_all_four_end_with_the_reason_when_their_checkpoints_are_deleted(
    start, unbroken, tmp_path, draw
):
    """At any moment, or as soon as one is being written: none waits for one that could not write."""
    rng = random.Random(200 + draw)
    folder = tmp_path / "checkpoints"
    job = start(tmp_path)
    said = [next(line for line in job.stdout if line.startswith("step "))]
    time.sleep(rng.uniform(0, 0.7 * unbroken[1]))
    while draw % 2 and job.poll() is None and not list(folder.glob(".saving-*")):
        time.sleep(0.001)
    shutil.rmtree(folder, ignore_errors=True)  # files may come while it is being emptied
    deleted = time.monotonic()
    said += list(job.stdout)
    assert time.monotonic() - deleted < unbroken[1] + ENDS_WITHIN
    text = "".join(said)
    assert job.wait() != 0, text
    assert re.search(
        rf"{folder} was deleted, replaced or unmounted while the job ran|somebody deletes files"
        "|the folder was deleted or replaced meanwhile",
        text,
    ), text
    committed = [path.name for path in folder.glob("*") if path.name.isdecimal()]
    assert str(STEPS) not in committed
