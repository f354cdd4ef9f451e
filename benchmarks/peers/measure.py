"""Measure a list of contestants: start them, check that they agree, let them take turns, and read
their figures.
"""

import contextlib
import datetime
import functools
import importlib
import inspect
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common import cpu_name, interleave, median_ratio
from .jobs import Contestant, Job, ask, running
from .task import Config, write_task

CHECKED_STEPS = 10
OURS = "shardopt"
WARMUP = 3
ALONE = ("torch alone", "torch compiled", "torch autotuned", "maxtext stacked", "maxtext unstacked")
"""Rivals of every strategy: they use one device, or one process."""


def measure(
    contestants: Sequence[Contestant],
    config: Config,
    *,
    rounds: int,
    steps: int,
    loss_tolerance: float = 1e-4,
    norm_tolerance: float = 1e-2,
) -> dict[str, Any]:
    """Start contestants one after another, check that they agree, let them take turns, and return
    what was seen.

    Raises:
      SystemExit: if two compute different things: their speeds could not be compared.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_task(config, Path(folder), count=32)
        jobs = []
        for each in contestants:
            jobs.append(stack.enter_context(running(each, Path(folder))))
            print(
                f"  {each.name:15} took its first step after"
                f" {jobs[-1].seconds_to_first_step:.1f} s",
                flush=True,
            )
        lines = {each.name: lines_of(each) for each in contestants}
        seen = {
            job.contestant.name: job.first[0]["results"] + ask(job, CHECKED_STEPS - 1)[0]["results"]
            for job in jobs
        }
        differences = agreement(seen, loss_tolerance, norm_tolerance)
        for job in jobs:
            ask(job, "forget peak")
        cpu: dict[str, list[float]] = {job.contestant.name: [] for job in jobs}

        def turn(job: Job) -> None:
            told = ask(job, steps)
            cpu[job.contestant.name].append(max(each["cpu_seconds"] for each in told))

        turns = {job.contestant.name: functools.partial(turn, job) for job in jobs}
        times = interleave(turns, rounds=rounds, warmup=WARMUP)
        cpu = {name: each[WARMUP:] for name, each in cpu.items()}
        rows = {
            job.contestant.name: _row(job, times[job.contestant.name], config, steps)
            for job in jobs
        }
        for name, seconds in cpu.items():
            rows[name]["cpu_ms_of_a_step"] = 1e3 * statistics.median(seconds) / steps
    for name, count in lines.items():
        rows[name]["lines"] = count
    pairs = [
        (name, rival) for name in rows if name.startswith(OURS) for rival in rivals(name, rows)
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "steps_a_round": steps,
        "losses": {name: [loss for loss, _ in results] for name, results in seen.items()},
        "differences": differences,
        "contestants": rows,
        "speed_ratios": {
            f"{name} / {rival}": median_ratio(times[rival], times[name]) for name, rival in pairs
        },
        "cpu_ratios": {
            f"{name} / {rival}": median_ratio(cpu[name], cpu[rival]) for name, rival in pairs
        },
    }


def rivals(name: str, rows: Any) -> list[str]:
    """Return those that a contestant of ours is compared with: the same strategy, or the only one
    torch has there.
    """
    strategy = name.split()[1]
    same = [f"{library} {strategy}" for library in ("jax", "torch", "maxtext", "levanter")]
    same += ["jax unrolled"] if strategy == "ddp" else []
    return [each for each in rows if each in (*same, *ALONE)]


def agreement(
    seen: dict[str, list[tuple[float, float]]], loss_tolerance: float, norm_tolerance: float
) -> dict[str, dict[str, float]]:
    """Return how far losses and gradient norms of each are from those of the first, relatively.

    Raises:
      SystemExit: if they are further apart than the tolerances in one of the first steps.
    """
    reference = np.array(next(iter(seen.values())))[:CHECKED_STEPS]
    differences, wrong = {}, []
    for name, results in seen.items():
        loss, norm = np.max(np.abs(np.array(results)[:CHECKED_STEPS] / reference - 1), axis=0)
        differences[name] = {"loss": float(loss), "grad_norm": float(norm)}
        if not (loss <= loss_tolerance and norm <= norm_tolerance):
            wrong.append(name)
    if wrong:
        curves = "\n".join(f"{name:16} {results[:CHECKED_STEPS]}" for name, results in seen.items())
        raise SystemExit(
            f"peers: {', '.join(wrong)} computed something else; (loss, gradient norm) by"
            f" step:\n{curves}"
        )
    return differences


def lines_of(contestant: Contestant) -> int:
    """Count the lines a user writes beside the model: those of the functions, without blank lines
    and comments.
    """
    functions = importlib.import_module(f".contestants.{contestant.library}", __package__).LINES[
        contestant.strategy
    ]
    lines = [
        line.strip() for function in functions for line in inspect.getsource(function).splitlines()
    ]
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


def _row(job: Job, times: list[float], config: Config, steps: int) -> dict[str, Any]:
    told = ask(job, "memory")
    return {
        "tokens_per_second": config.batch * config.length * steps / statistics.median(times),
        "spread": (max(times) - min(times)) / statistics.median(times),
        "seconds_to_first_step": job.seconds_to_first_step,
        "imported_bytes": max(each["imported"] for each in job.first),
        "peak_bytes": max(
            [each["peak"] for each in job.first] + [each["peak_of_steps"] for each in told]
        ),
        "peak_bytes_of_steps": max(each["peak_of_steps"] for each in told),
        "compiled_bytes": told[0]["compiled"],
        "device_peak_bytes": told[0]["device_peak"],
    }
