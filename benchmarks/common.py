"""What every benchmark shares: fake devices, interleaved timing, JSON with hardware and versions."""

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def fake_devices(count: int) -> None:
    """Ask for fake CPU devices, where there is no accelerator; call before jax makes a backend."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def one_core() -> None:
    """Keep this process on one core, so that seconds count the work of all fake devices.

    Call before jax starts threads.

    Several cores finish sooner what is spread over devices evenly: they would charge a schedule for
    who waits for whom.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit(
            "this benchmark counts work by the seconds of one core, which it can ask for on Linux"
            " only"
        )
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def keep_memory() -> None:
    """Let the C library keep what is freed, as accelerators do; call before jax starts threads.

    XLA:CPU asks for all temporary memory of a step anew, and a step of megabytes spends up to a
    quarter of its seconds on fresh pages, more or fewer of them as the kernel has it. Memory is
    measured apart.
    """
    trim_threshold, most_mmaps, most_arenas = -1, -4, -8  # of <malloc.h>
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        raise SystemExit(
            "this benchmark counts work without that of fresh memory, which it can ask for on Linux"
            " only"
        )
    for option, value in ((trim_threshold, 2**31 - 1), (most_mmaps, 0), (most_arenas, 1)):
        libc.mallopt(option, value)


def interleave(
    contenders: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time each contender once a round, in an order that turns every round; seconds a call.

    Both see the same noise, so ratios within a round mean something where absolute times do not.
    With `time.process_time` as clock, seconds are those that cores worked for this process,
    whatever else runs on them.
    """
    import jax

    names = list(contenders)
    times = {name: [] for name in contenders}
    for turn in range(-warmup, rounds):
        for name in names if turn % 2 else names[::-1]:
            start = clock()
            jax.block_until_ready(contenders[name]())
            if turn >= 0:
                times[name].append(clock() - start)
    return times


def median_ratio(times: list[float], baseline: list[float]) -> float:
    """Return the median over rounds of time / baseline time."""
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of ranks, in which there are no ties."""
    ranks = [[sorted(one).index(value) for value in one] for one in (a, b)]
    return statistics.correlation(*ranks)


def write_json(script: str, results: Any, path: Path | None = None) -> Path:
    """Write results, with when, where and with what they were measured, beside the script or to a
    path.
    """
    import jax

    packages = [
        "jax",
        "jaxlib",
        "optax",
        "flax",
        "orbax-checkpoint",
        "numpy",
        "libtpu",
        "jax-cuda12-plugin",
    ]
    ran = Path(sys.argv[0])
    record = {
        "benchmark": Path(script).stem,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(
            [ran.parent.name if ran.stem == "__main__" else ran.name, *sys.argv[1:]]
        ),
        "hardware": {
            "machine": platform.machine(),
            "cpu": cpu_name(),
            "cores": (
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            ),
            "devices": [str(jax.devices()[0].device_kind), jax.device_count()],
        },
        "versions": (
            {"python": platform.python_version()}
            | {name: version for name in packages if (version := _version(name)) is not None}
        ),
        "results": results,
    }
    path = path or Path(script).parent / "results" / f"{Path(script).stem}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def commit() -> str | None:
    """Return the commit of this tree, with "changed" if the code differs from it.

    None outside a git checkout.
    """

    def git(*words: str) -> str:
        run = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "shardopt", "benchmarks/*.py")
        return git("rev-parse", "--short=7", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the name of the CPU's model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
