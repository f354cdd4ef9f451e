"""Muon where parameters are sharded: torch.optim.Muon on FSDP2's, and optax's with an owner for
every matrix, interleaved.

Run: python -m benchmarks.peers.muon --torch PYTHON [--sizes 128x4 256x4] [--rounds 8], where PYTHON
has torch 2.9 or later.

The GPT, batches and first parameters of the other comparison, two processes over gloo, a core each.
Muon, without Nesterov's step, on the four products of each block, AdamW on the rest; in fp32.
Contestants: optax's Muon under fsdp with `opt_state="matrices"` and "within";
torch.optim.Muon under `fully_shard`, as it is (its Newton-Schulz iteration is always in bf16) and
with that iteration in fp32; and AdamW under both. All take turns of a few steps.

Checked first: that losses agree, of all with Muon. Measured: seconds a step; bytes that both
processes send in one, off the counters of their sockets.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common import interleave, median_ratio, write_json
from .jobs import Contestant, Job, ask, running
from .measure import agreement
from .task import SIZES, Config, write_task

STRATEGIES = {"shardopt": ("muon", "muon_within", "fsdp"), "torch": ("muon", "muon_fp32", "fsdp")}
PROCESSES = 2
RESULTS = Path(__file__).parents[1] / "results" / "peers_muon.json"
TOLERANCE = 0.02
"""Of losses: bf16 rounds to three digits, and Newton-Schulz in it five times over."""


def family(pid: int) -> set[int]:
    """Return a process and all that descend from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            words = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(words[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def bytes_sent(job: Job) -> int:
    """Return what the sockets of a job have sent so far."""
    told = subprocess.run(["ss", "-tinpOH"], check=True, capture_output=True, text=True).stdout
    pids = set().union(*(family(one.pid) for one in job.launchers))
    total = 0
    for line in told.splitlines():
        owners = set(map(int, re.findall(r"pid=(\d+)", line)))
        sent = re.search(r"bytes_sent:(\d+)", line)
        total += int(sent[1]) if sent and owners & pids else 0
    return total


def measure(config: Config, python: str, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return what contestants took and sent.

    Raises:
      SystemExit: if two compute different things.
    """
    pythons = {"shardopt": sys.executable, "torch": python}
    contestants = [
        Contestant(library, strategy, PROCESSES, pythons[library])
        for library, strategies in STRATEGIES.items()
        for strategy in strategies
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_task(config, Path(folder), count=32)
        jobs = [stack.enter_context(running(each, Path(folder))) for each in contestants]
        seen = {job.contestant.name: [job.first[0]["results"][0]] for job in jobs}
        sent: dict[str, list[int]] = {name: [] for name in seen}

        def turn(job: Job) -> Callable[[], None]:
            def take() -> None:
                seen[job.contestant.name].extend(ask(job, steps)[0]["results"])

            return take

        times = interleave(
            {job.contestant.name: turn(job) for job in jobs}, rounds=rounds, warmup=3
        )
        for job in jobs:  # apart from what is timed
            before = bytes_sent(job)
            turn(job)()
            sent[job.contestant.name].append(bytes_sent(job) - before)
    groups = [
        {name: seen[name] for name in seen if (" muon" in name) is one} for one in (True, False)
    ]
    differences = [agreement(group, TOLERANCE, 1.0) for group in groups]
    seconds = {name: [one / steps for one in some] for name, some in times.items()}
    return {
        "config": config._asdict(),
        "differences": differences[0] | differences[1],
        "losses": {name: [loss for loss, _ in some[:10]] for name, some in seen.items()},
        "rounds": rounds,
        "steps_a_round": steps,
        "seconds_a_step": {name: statistics.median(some) for name, some in seconds.items()},
        "spread": {
            name: (max(some) - min(some)) / statistics.median(some)
            for name, some in seconds.items()
        },
        "bytes_a_step": {name: statistics.median(some) / steps for name, some in sent.items()},
        "ratios": {
            f"{one} / {other}": median_ratio(times[one], times[other])
            for one, other in (
                ("shardopt muon", "torch muon"),
                ("shardopt muon", "torch muon_fp32"),
                ("shardopt muon", "shardopt muon_within"),
                ("shardopt muon", "shardopt fsdp"),
                ("torch muon", "torch fsdp"),
                ("torch muon_fp32", "torch fsdp"),
                ("shardopt fsdp", "torch fsdp"),
            )
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers.muon",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--torch", metavar="PYTHON", required=True, help="a Python that has torch")
    parser.add_argument("--sizes", nargs="*", default=["128x4", "256x4"], choices=SIZES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {"sizes": {}}
    ask_version = "import torch; print(torch.__version__)"
    told = subprocess.run(
        [options.torch, "-c", ask_version], check=True, capture_output=True, text=True
    )
    results["torch"] = told.stdout.strip()
    for size in options.sizes:
        found = measure(SIZES[size], options.torch, rounds=options.rounds, steps=options.steps)
        for name, seconds in found["seconds_a_step"].items():
            sent = found["bytes_a_step"][name] / 1e6
            print(
                f"{size:8} {name:22} {seconds * 1e3:8.1f} ms {sent:8.2f} MB",
                found["differences"][name],
                flush=True,
            )
        print({name: round(value, 3) for name, value in found["ratios"].items()}, flush=True)
        results["sizes"][size] = found
        if not options.dry:
            write_json("peers_muon", results, RESULTS)


if __name__ == "__main__":
    main()
