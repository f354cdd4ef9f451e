"""A step of one device by the CPU time of its process, which other work on the machine changes less
than its wall time.

Run: taskset -c 0 python -m benchmarks.peers.core. The batch is the half that each of two processes
has in group "processes". Claim: so.ddp takes at most 1.05 times the fastest jax by hand.
"""

import importlib.metadata
import os
from pathlib import Path

from ..common import write_json
from .jobs import Contestant
from .measure import measure
from .task import SIZES

CONTESTANTS = [
    Contestant("shardopt", "ddp", 1),
    Contestant("jax", "ddp", 1),
    Contestant("jax", "unrolled", 1),
    Contestant("torch", "alone", 1),
]


def main() -> None:
    if len(os.sched_getaffinity(0)) > 1:
        raise SystemExit(
            "peers.core: give it one core: taskset -c 0 python -m benchmarks.peers.core"
        )
    results = {"torch": importlib.metadata.version("torch"), "cpu": {}}
    path = Path(__file__).parents[1] / "results" / "peers_core.json"
    for size, config in reversed(SIZES.items()):
        config = config._replace(batch=config.batch // 2, simulated=1)
        # at 256 x 4 this batch meets a steep place, where rounding moves a norm of 16 by 1.4%
        found = measure(CONTESTANTS, config, rounds=7, steps=2, norm_tolerance=3e-2)
        results["cpu"][size] = {"config": config._asdict(), "core": found}
        for name, row in found["contestants"].items():
            print(f"{config.name}, {name}: {row['cpu_ms_of_a_step']:.0f} ms of CPU a step")
        print(found["cpu_ratios"], flush=True)
        write_json("peers_core", results, path)  # a later size may fail


if __name__ == "__main__":
    main()
