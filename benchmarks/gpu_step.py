"""The kernels of a GPU in one step of a GPT, by the time that they take.

Run, with a CUDA build of jax: python -m benchmarks.gpu_step [--size 124M]. It takes half a minute
and writes results/gpu_step.json, beside earlier rows.
"""

import argparse
import collections
import datetime
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from .common import write_json
from .peers.gpu import SIZES
from .peers.task import Task, write_task

RESULTS = Path(__file__).parent / "results" / "gpu_step.json"
STEPS = 10
LISTED = 15


def measure(size: str) -> dict[str, Any]:
    """Return milliseconds of a step whose loss is read, and of the kernels that take most of it."""
    import jax

    from .peers.contestants import shardopt

    with tempfile.TemporaryDirectory() as folder:
        write_task(SIZES[size], Path(folder), count=4)
        steps = shardopt.ddp(Task(SIZES[size], Path(folder), 0, 1))
        for _ in range(3):
            next(steps)
        start = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        milliseconds = 1e3 * (time.perf_counter() - start) / STEPS
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                next(steps)
        (file,) = Path(folder).glob("**/*.xplane.pb")
        kernels = kernels_of(jax.profiler.ProfileData.from_file(str(file)))
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "config": SIZES[size]._asdict(),
        "milliseconds": milliseconds,
        "busy_milliseconds": sum(kernels.values()),
        "kernels": dict(kernels.most_common(LISTED)),
    }


def kernels_of(profile: Any) -> collections.Counter[str]:
    """Return milliseconds a step of each kernel of the first GPU."""
    kernels: collections.Counter[str] = collections.Counter()
    (plane,) = [plane for plane in profile.planes if plane.name == "/device:GPU:0"]
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                kernels[event.name] += event.duration_ns / 1e6 / STEPS
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="124M", choices=SIZES)
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
    row = measure(options.size)
    print(json.dumps(row, indent=2))
    print("wrote", write_json("gpu_step", [*rows, row], RESULTS))


if __name__ == "__main__":
    main()
