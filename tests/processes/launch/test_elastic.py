"""Processes are lost and come back. The job goes on with the remaining processes and grows again,
as if there were one device.

Each example is trained on exactly once in the history that the parameters come from: they count it
themselves."""

import itertools
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
from support.processes import free_port, saved_arrays

WORKER = Path(__file__).with_name("worker_that_is_elastic.py")
STEPS = 60
EVERY = 20
MEMORY_EVERY = 4

pytestmark = pytest.mark.slow


class Job:
    """A job that trains, and what became of it."""

    def __init__(self, folder, *options, tensor=1, draws="each", memory_every=MEMORY_EVERY):
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JOB": str(folder)}
        # by the first of all draws
        environment["JAX_COMPILATION_CACHE_DIR"] = str(folder.parent / "compiled")
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
        command += [
            str(WORKER),
            str(folder),
            str(STEPS),
            str(EVERY),
            str(memory_every),
            str(tensor),
            draws,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def taken(self):
        """Return the attempt, the number of processes and the step of each line of the log."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]

    def wait_for(self, attempt, step):
        while not any(a == attempt and s >= step for a, _, s in self.taken()):
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.02)

    def kill(self, rank, *, vault=False):
        """Kill a process, and the memory of its host."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (
                    (process / "environ").read_bytes().decode(errors="replace").split("\0")
                )
                words = (process / "cmdline").read_bytes().decode().split("\0")
            except OSError:  # it has ended, or is another user's
                continue
            holds = (
                vault and any(word.endswith("vault.py") for word in words) and str(rank) in words
            )
            if f"JOB={self.folder}" in environment and (
                f"JAX_PROCESS_ID={rank}" in environment or holds
            ):
                os.kill(int(process.name), signal.SIGKILL)

    def end(self, code=0):
        try:
            said, _ = self.process.communicate(timeout=200)
        finally:
            self.process.kill()
        assert self.process.returncode == code, said
        return said

    def params(self):
        return saved_arrays(self.folder / "params.npz")


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("one"), "--processes", "1", memory_every=0)
    job.end()
    return job.params()


def assert_equal_to_one_device(job, one_device):
    params = job.params()
    np.testing.assert_array_equal(params["seen"], -np.ones(16 * STEPS))
    for name in ("up", "down"):
        np.testing.assert_allclose(params[name], one_device[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("draw", range(5))
def test_a_job_goes_on_with_fewer_at_once_and_grows_again(one_device, tmp_path, draw):
    rng = random.Random(draw)
    victim = rng.randrange(4)
    at = rng.randrange(6, 30)
    elastic = ["--processes", "1,2,4", "--max-restarts", "1"]
    job = Job(tmp_path, *elastic)
    job.wait_for(0, at)
    job.kill(victim, vault=True)  # of the other three, two can share the batch
    job.wait_for(1, at + 2)
    job.process.terminate()
    said = job.end(code=143)
    larger_job = Job(tmp_path, *elastic)
    said_by_larger_job = larger_job.end()
    assert f"launch: process {victim} of 4 was killed by SIGKILL; the others were ended.\n" in said
    assert "launch: starting again with 2 processes, restart 1 of 1.\n" in said
    resumed = [
        int(step)
        for step in re.findall(
            r"^Resuming from step (\d+) in ", said + said_by_larger_job, re.MULTILINE
        )
    ]
    in_memory = (
        f"Resuming from step {resumed[0]} in the memory of the hosts, the data from its saved"
        " state."
    )
    assert in_memory in said or resumed[0] % EVERY == 0  # the disk's is as new
    taken = job.taken()
    first_attempt = itertools.takewhile(lambda row: row[0] == 0, taken)
    lost = max(step for _, _, step in first_attempt) - resumed[0]
    assert 0 <= lost <= 2 * MEMORY_EVERY
    assert {(attempt, count) for attempt, count, _ in taken} >= {(0, 4), (1, 2)}
    last = max(step for attempt, _, step in taken if attempt == 1)
    assert resumed[1] == last  # nothing is lost when it grows
    assert taken[-1] == (0, 4, STEPS)
    assert_equal_to_one_device(job, one_device)


def test_the_disk_has_it_where_too_much_memory_is_lost(one_device, tmp_path):
    job = Job(tmp_path, "--processes", "2,4", "--max-restarts", "1", draws="shared")
    job.wait_for(0, EVERY + 2)
    for rank in (1, 2):
        job.kill(rank, vault=True)
    said = job.end()
    assert "launch: starting again with 2 processes, restart 1 of 1.\n" in said
    assert f"Resuming from step {EVERY} in {tmp_path}" in said
    # the state of one of four says nothing to one of two
    assert "the data by drawing 20 batches" in said
    assert_equal_to_one_device(job, one_device)


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_a_scheduler_that_loses_a_host_starts_the_job_with_fewer(memory, one_device, tmp_path):
    """No launcher: processes with the three variables, as schedulers start them, two to a host,
    which may keep snapshots.

    One host is lost with its memory, and what runs on the other is ended, but for its vault.
    """
    secret = {"SHARDOPT_VAULT_TOKEN": "known to this job"}
    vaults = []

    def start_vault():
        command = [sys.executable, "-m", "shardopt.cli", "vault", "--port", "0"]
        environment = os.environ | secret | {"PYTHONPATH": str(ROOT)}
        vaults.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return re.search(r"on port (\d+)\.", vaults[-1].stdout.readline())[1]

    places = [f"localhost:{start_vault()}" for _ in range(2 * memory)]

    def start(count):
        address = f"127.0.0.1:{free_port()}"
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": address,
        }
        environment |= secret | ({"SHARDOPT_VAULTS": ",".join(places)} if memory else {})
        every = MEMORY_EVERY if memory else 0
        command = [
            sys.executable,
            str(WORKER),
            str(tmp_path),
            str(STEPS),
            str(EVERY),
            str(every),
            "1",
            "shared",
        ]
        ranks = [
            {"JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(rank)} for rank in range(count)
        ]
        return [subprocess.Popen(command, env=environment | rank) for rank in ranks]

    def steps():
        return [int(line.split()[2]) for line in (tmp_path / "steps").read_text().splitlines()]

    processes = start(4)
    try:
        while not (tmp_path / "steps").exists() or max(steps(), default=0) < EVERY + 10:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        for process in vaults[1:] + processes[2:] + processes[:2]:
            process.kill()
        processes += start(2)
        assert [process.wait(200) for process in processes[4:]] == [0, 0]
    finally:
        for process in processes + vaults:
            process.kill()
            process.communicate()
    params = saved_arrays(tmp_path / "params.npz")
    np.testing.assert_array_equal(params["seen"], -np.ones(16 * STEPS))
    for name in ("up", "down"):
        np.testing.assert_allclose(params[name], one_device[name], rtol=0, atol=2e-5)
    taken = steps()
    repeated_step = min(step for step in taken if taken.count(step) == 2)
    assert repeated_step > EVERY + 2 if memory else repeated_step == EVERY + 1


def test_data_that_depends_on_the_number_of_processes_is_refused(tmp_path):
    job = Job(tmp_path, "--processes", "2,4", "--max-restarts", "1", draws="parts")
    job.wait_for(0, EVERY + 2)
    job.kill(3)
    said = job.end(code=1)
    assert "ValueError: fit: 4 processes drew other rows in the last batch" in said
    assert " than 2 processes: rows would be seen twice, or never.\n" in said


def test_a_mesh_that_does_not_fit_is_refused_in_words(tmp_path):
    job = Job(tmp_path, "--processes", "1:4", "--max-restarts", "1", tensor=2)
    job.wait_for(0, 2)
    job.kill(3)
    said = job.end(code=1)
    assert "launch: starting again with 3 processes, restart 1 of 1.\n" in said
    assert "make_mesh: " in said
    assert (
        "Fix: if 3 of 4 processes do not fit its mesh or its batch, name those that do: --processes"
        " 1,2,4.\n" in said
    )
