"""Four processes that keep snapshots in the memory of two hosts each.

One is killed, with its host's memory, or both holders.

The parameters at the end equal the parameters of an undisturbed run, bit for bit.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT
from support.processes import saved_arrays

WORKER = Path(__file__).with_name("worker_with_snapshots.py")
STEPS = 100
MEMORY_EVERY = 5
EVERY = 30

pytestmark = pytest.mark.slow


def processes(folder):
    """Return the words and the environment of what runs for a job, by pid."""
    commands = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            if f"JOB={folder}" in environment:
                commands[int(process.name)] = (
                    (process / "cmdline").read_bytes().decode().split("\0"),
                    environment,
                )
        except OSError:  # it has ended, or is another user's
            continue
    return commands


def run(folder, *, at=None, victim=0, lost=()):
    """Run the job; at a step kill a process and the vaults of some hosts.

    Return the messages, the parameters and the steps.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JOB": str(folder)}
    # by the first of all draws
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder.parent / "compiled")
    options = [
        "--processes",
        "4",
        "--max-restarts",
        "1",
        "--log-dir",
        str(folder / "logs"),
    ]
    command = [
        sys.executable,
        "-m",
        "shardopt.cli",
        "launch",
        *options,
        "--",
        str(WORKER),
        str(folder),
        str(STEPS),
    ]
    command += [str(MEMORY_EVERY), str(EVERY), "0.03"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            before = 0
            if at is not None:
                while before < at:
                    assert job.poll() is None, job.stdout.read()
                    time.sleep(0.01)
                    before = max(taken(folder), default=0)
                all_of_it = processes(folder)
                doomed = [
                    pid for pid, (_, env) in all_of_it.items() if f"JAX_PROCESS_ID={victim}" in env
                ]
                vaults = {str(number) for number in lost}
                for pid, (words, _) in all_of_it.items():
                    if any(word.endswith("vault.py") for word in words) and vaults & set(words):
                        doomed.insert(0, pid)
                for pid in doomed:
                    os.kill(pid, signal.SIGKILL)
                before = max(taken(folder))
            said, _ = job.communicate(timeout=300)
        finally:
            job.kill()
    assert job.returncode == 0, said
    return said, saved_arrays(folder / "params.npz"), before


def taken(folder):
    path = folder / "steps"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [int(line.split()[0]) for line in lines if line.endswith("\n")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"))[1]


def same(params, other_params):
    return params.keys() == other_params.keys() and all(
        np.array_equal(params[name], other_params[name]) for name in params
    )


@pytest.mark.parametrize("draw", range(20))
def test_a_host_is_lost_and_no_more_steps_than_between_snapshots(undisturbed, tmp_path, draw):
    rng = random.Random(draw)
    victim = rng.randrange(4)
    at = rng.randrange(10, 90)
    said, params, before = run(tmp_path, at=at, victim=victim, lost=[victim])
    assert f"launch: process {victim} of 4 was killed by SIGKILL; the others were ended.\n" in said
    resumed = int(re.search(r"^Resuming from step (\d+) in ", said, re.MULTILINE)[1])
    assert "in the memory of the hosts, " in said or resumed % EVERY == 0  # the disk's is as new
    assert before - resumed <= MEMORY_EVERY + 1, said  # one more is on its way to the log
    assert same(params, undisturbed)


@pytest.mark.parametrize("draw", range(4))
def test_both_holders_of_a_snapshot_are_lost_and_the_disk_has_it(undisturbed, tmp_path, draw):
    rng = random.Random(50 + draw)
    victim = rng.randrange(4)
    at = rng.choice([40, 50, 75, 85])
    said, params, _ = run(tmp_path, at=at, victim=victim, lost=[victim, (victim + 1) % 4])
    resumed = re.search(r"^Resuming from step (\d+) in (\S+)", said, re.MULTILINE)
    assert int(resumed[1]) == at // EVERY * EVERY
    assert resumed[2].startswith(str(tmp_path))
    assert same(params, undisturbed)
