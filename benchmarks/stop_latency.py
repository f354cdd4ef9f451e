"""Seconds from a signal to the beginning and to the end of the save, in each phase of `fit`.

Run: python benchmarks/stop_latency.py [--repeats 5]

Each run is one of tests/processes/fit/worker_stopped.py: a tiny state on two devices of the CPU. It
gets SIGTERM at a drawn time in its phase. The save begins when its folder appears, and ends when the
folder gets its name. "by itself" means that the run saved at the end of a step.

Claim: the save begins within a second.
"""

import argparse
import contextlib
import json
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
WORKER = ROOT / "tests/processes/fit/worker_stopped.py"

PHASES = (
    "compile",
    "data_sleep",
    "data_c",
    "evaluation",
    "evaluate_sleep",
    "evaluate_c",
    "evaluate_generates",
    "evaluate_generates_at_once",
    "log_sleep",
    "training",
)


def folders(run):
    """Return the names in the folder of a run."""
    return {path.name for path in run.iterdir()} if run.exists() else set()


def seconds_until_save(run, process):
    """Send SIGTERM; return the seconds until a save began, and until it was committed."""
    before = folders(run)
    sent = time.perf_counter()
    os.kill(process, signal.SIGTERM)
    began = None
    while time.perf_counter() - sent < 60:
        names = folders(run) - before - {"goodput.json.partial", "goodput.json"}
        if names and began is None:
            began = time.perf_counter() - sent
        if any(name.isdigit() for name in names):
            return began, time.perf_counter() - sent
        time.sleep(0.001)
    raise RuntimeError(f"nothing was saved in {run}")


def measure(worker, phase, rng):
    """Return the two times of one run."""
    folder = Path(tempfile.mkdtemp())
    worker.stdin.write(json.dumps([str(folder), phase]) + "\n")
    worker.stdin.flush()
    process = int(worker.stdout.readline())
    try:
        while not (folder / "arrived").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0.2, 0.6))
        return seconds_until_save(folder / "run", process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        worker.stdout.readline()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""},
    )
    rng = random.Random(0)
    rows = {}
    for phase in PHASES:
        times = [measure(worker, phase, rng) for _ in range(repeats)]
        begins, ends = zip(*times, strict=True)
        rows[phase] = {
            "begins": round(statistics.median(begins), 3),
            "begins_at_most": round(max(begins), 3),
            "is_on_disk": round(statistics.median(ends), 3),
        }
        print(phase, rows[phase], flush=True)
    worker.stdin.close()
    write_json(__file__, {"seconds": rows, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
