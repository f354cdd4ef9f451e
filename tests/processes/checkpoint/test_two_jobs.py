"""Two jobs want to write to one folder, at ten random distances in time. One writes, and the error
of the other names the writer.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import ROOT

DOOMED = Path(__file__).with_name("doomed.py")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a job that takes the folder, saves, says its number and waits."""
    started = []

    def run():
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, str(DOOMED), "holding", str(tmp_path / "run")]
        started.append(
            subprocess.Popen(
                command, **pipes, text=True, env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""}
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(10))
def test_one_of_two_jobs_is_refused_and_a_dead_one_is_no_obstacle(start, tmp_path, draw):
    rng = random.Random(draw)
    jobs = [start()]
    time.sleep(rng.choice([0.0, rng.uniform(0, 3)]))
    jobs.append(start())
    while all(job.poll() is None for job in jobs):
        time.sleep(0.02)
    loser, winner = sorted(jobs, key=lambda job: job.poll() is None)
    assert winner.poll() is None
    _, said = loser.communicate()
    assert loser.returncode == 1
    refusal = re.search(r"CheckpointInUseError: (Checkpoints: .*\n.*)\n", said)[1]
    named = re.fullmatch(
        rf"Checkpoints: {tmp_path}/run is already being written to by process (\w+) on (.*), since"
        r" (.*)\.\n"
        r"Fix: stop that job, or use another directory\.",
        refusal,
    )
    # In the moment between taking the lock and writing its name there the winner is not known yet.
    assert named[1] in (str(winner.pid), "unknown")
    assert int(winner.stdout.readline()) == winner.pid
    os.kill(winner.pid, rng.choice([signal.SIGKILL, signal.SIGTERM]))
    winner.wait()
    third = start()
    # it has saved, next to the files of the dead job
    assert int(third.stdout.readline()) == third.pid
    assert (tmp_path / "run" / "1").is_dir()
