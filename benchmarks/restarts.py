"""How soon a job trains again after SIGKILL of one of four processes: from disk as before, and from
memory.

    python restarts.py --rounds 5

From disk: checkpoints every 50 steps, fresh processes that import and compile. From memory:
snapshots every 5 steps on two hosts each, and compiled programs from jax's cache. Interleaved, the same kill in each round.

Claims: at most 5 steps are lost, and the first new step comes in less than three quarters of
the time.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import write_json

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "tests" / "processes" / "launch" / "worker_with_snapshots.py"
STEPS = 180
EVERY = 50
MEMORY_EVERY = 5
PAUSE = 0.12
WAYS = {
    "disk": (0, {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
    "memory": (MEMORY_EVERY, {}),
}


def pid_of(rank, folder):
    """Return the process of this number that trains in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            f"RESTARTS_FOLDER={folder}".encode() in environment
            and f"JAX_PROCESS_ID={rank}".encode() in environment
        ):
            return int(process.name)
    raise AssertionError("it has ended")


def note(folder):
    """Return the steps that were reported, with the time of each."""
    path = folder / "steps"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        (int(step), float(at))
        for step, at in (line.split() for line in lines if line.endswith("\n"))
    ]


def restart(way, victim, at):
    """Kill a process once a step is reached.

    Return the seconds until the job trains again, and the steps that it lost.
    """
    memory_every, variables = WAYS[way]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "shardopt.cli",
            "launch",
            "--processes",
            "4",
            "--max-restarts",
            "1",
        ]
        command += ["--log-dir", str(folder / "logs"), "--", str(WORKER), name]
        command += [str(STEPS), str(memory_every), str(EVERY), str(PAUSE)]
        environment = {
            key: value for key, value in os.environ.items() if key != "XLA_FLAGS"
        } | variables
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RESTARTS_FOLDER": name}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as job:
            try:
                while not (seen := note(folder)) or seen[-1][0] < at:
                    assert job.poll() is None, job.stdout.read()
                    time.sleep(0.02)
                pid = pid_of(victim, name)
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                said = job.communicate(timeout=300)[0]
            finally:
                job.kill()
        assert job.returncode == 0, said
        steps = note(folder)
        before = max(step for step, when in steps if when <= killed + 0.2)
        after = [(step, when) for step, when in steps if when > killed + 0.2]
        return {
            "trains again": after[0][1] - killed,
            "first new step": next(when for step, when in after if step > before) - killed,
            "steps lost": before - after[0][0] + 1,
        }


def main(rounds):
    rng = random.Random(0)
    found = {way: [] for way in WAYS}
    for turn in range(rounds):
        victim = rng.randrange(4)
        at = rng.randrange(105, 145)
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            found[way].append(restart(way, victim, at))
            print(turn, way, found[way][-1], flush=True)
    results = {"rounds": rounds, "processes": 4, "every": EVERY, "memory_every": MEMORY_EVERY}
    for key in ("trains again", "first new step", "steps lost"):
        columns = {way: [one[key] for one in found[way]] for way in WAYS}
        results[key] = {way: round(statistics.median(column), 3) for way, column in columns.items()}
        results[key] |= {
            f"largest, {way}": round(max(column), 3) for way, column in columns.items()
        }
        ratios = [a / b for a, b in zip(columns["memory"], columns["disk"], strict=True)]
        results[key] |= {
            "ratio, median": round(statistics.median(ratios), 3),
            "ratios": [round(one, 3) for one in ratios],
        }
    holds = (
        results["first new step"]["ratio, median"] < 3 / 4
        and results["steps lost"]["largest, memory"] <= MEMORY_EVERY
    )
    results["holds"] = holds
    print(write_json(__file__, results))
    return 0 if holds else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    sys.exit(main(parser.parse_args().rounds))
