"""The same GPT trained by what people would use instead: torch, jax by hand, and shardopt,
interleaved in one run.

Run: python -m benchmarks.peers [--sizes 128x4 256x6] [--groups processes devices] [--rounds 8],
after `pip install -e '.[bench]'`; with --maxtext PYTHON and --levanter PYTHON also against those,
which that Python has. With --gpu: one GPU, against torch.compile with fused AdamW (gpu.py).

Contestants are jobs of their own, started by the launcher that their users would use (torchrun,
`shardopt launch`, none for jax by hand), all with the same first parameters, batches, AdamW and
fp32. Each takes its first step alone on the machine; then all are held still, and take turns of a
few steps. In group "processes" each is two processes over gloo, pinned to a core each; in group
"torch" likewise, shardopt and torch alone, for many sizes; in group "devices" one process has both
cores: as two simulated devices for jax, as two threads for torch, which has no such thing. Every
step reads the global loss and the global norm of the gradient.

Checked first: that all compute the same thing, by losses and norms of ten steps. Claims: tokens per
second at least torch's at the same strategy; peak memory of a process at most torch's, and 1.03 of
jax by hand.
"""

import argparse
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from ..common import write_json
from . import gpu
from .jobs import Contestant
from .measure import CHECKED_STEPS, measure
from .plot import draw
from .task import SIZES, Config


class Other(NamedTuple):
    """A library with a Python of its own: its strategies, and how it was installed when it was last
    run here.
    """

    strategies: tuple[str, ...]
    installed: str


LIBRARIES = ("shardopt", "jax", "torch")
GROUPS = {
    "processes": [
        *(
            Contestant(library, strategy, 2)
            for strategy in ("ddp", "zero1", "fsdp")
            for library in LIBRARIES
        ),
        Contestant("jax", "jit", 2),
        Contestant("jax", "unrolled", 2),
    ],
    "torch": [
        Contestant(library, strategy, 2)
        for strategy in ("ddp", "zero1", "fsdp")
        for library in ("shardopt", "torch")
    ],
    "devices": [
        *(
            Contestant(library, strategy, 1)
            for strategy in ("ddp", "zero1", "fsdp")
            for library in LIBRARIES[:2]
        ),
        Contestant("torch", "alone", 1),
    ],
}
OTHERS = {
    "maxtext": Other(
        ("ddp", "zero1", "fsdp"), "pip install 'maxtext[tpu]==0.2.5', on Python 3.12, 2.8 GB"
    ),
    "levanter": Other(
        ("ddp", "fsdp"),
        "pip install levanter==1.2.dev1644 jax==0.10.2 gitpython chex, on Python 3.12, 1.7 GB",
    ),
}
"""Libraries that do not fit beside torch and this jax: each is run by a Python of its own, named by
an option.
"""


def show(config: Config, group: str, found: dict[str, Any]) -> None:
    """Print a group: that all agree, then who was how fast and how large."""
    print(f"\n{config.name}, {group}: losses of the first {CHECKED_STEPS} steps")
    for name, losses in found["losses"].items():
        off, curve = found["differences"][name], " ".join(f"{loss:.5f}" for loss in losses)
        print(f"  {name:15} {curve}  off by {off['loss']:.0e}, norms by {off['grad_norm']:.0e}")
    print(
        "                  tokens/s  first step  MB imported, peak, peak of steps, compiled  lines "
        "  we / it, speed"
    )
    for name, row in found["contestants"].items():
        ratios = [
            f"{value:.3f}"
            for key, value in found["speed_ratios"].items()
            if key.endswith(f"/ {name}")
        ]
        sizes = [row[key] / 1e6 for key in ("imported_bytes", "peak_bytes", "peak_bytes_of_steps")]
        compiled = f"{row['compiled_bytes']['total'] / 1e6:.1f}" if row["compiled_bytes"] else "-"
        print(
            f"  {name:15} {row['tokens_per_second']:9.0f} {row['seconds_to_first_step']:9.1f} s"
            f" {sizes[0]:12.0f} {sizes[1]:5.0f} {sizes[2]:14.0f} {compiled:>9} {row['lines']:6}  "
            f" {' '.join(ratios)}"
        )


def versions_of(python: str, *packages: str) -> dict[str, str]:
    """Return the versions of packages that another Python has."""
    ask = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
    told = subprocess.run(
        [python, "-c", ask, *packages], check=True, capture_output=True, text=True
    )
    return dict(zip(packages, told.stdout.split(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="*", default=["128x4", "256x6"], choices=SIZES)
    parser.add_argument("--groups", nargs="*", default=["processes", "devices"], choices=GROUPS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    for name, other in OTHERS.items():
        told = f"measure {name} too, run by this Python, which has it: {other.installed}"
        parser.add_argument(f"--{name}", metavar="PYTHON", help=told)
    parser.add_argument(
        "--gpu", action="store_true", help="measure one GPU instead; refused where there is none"
    )
    parser.add_argument(
        "--dry", action="store_true", help="write nothing; on a GPU: with a tiny model"
    )
    options = parser.parse_args()
    if options.gpu:
        gpu.record(list(gpu.SIZES), rounds=options.rounds, steps=options.steps, tiny=options.dry)
        return
    path = Path(__file__).parents[1] / "results" / "peers.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {"cpu": {}}
    results.pop("gpu", None)  # once told here
    results |= {
        "torch": importlib.metadata.version("torch"),
        "others": {name: other.installed for name, other in OTHERS.items()},
    }
    more = []
    for name, other in OTHERS.items():
        if python := getattr(options, name):
            results[name] = versions_of(python, name, "jax")
            more += [Contestant(name, strategy, 1, python) for strategy in other.strategies]

    def keep() -> None:
        if not options.dry:
            print(
                "\nwrote", write_json("peers", results, path), "and a picture beside it", flush=True
            )
            draw(results, path.with_suffix(".png"))

    for size in options.sizes:
        config = SIZES[size]
        results["cpu"].setdefault(size, {"config": config._asdict()})
        for group in options.groups:
            contestants = GROUPS[group] + [
                each._replace(processes=GROUPS[group][0].processes) for each in more
            ]
            found = measure(contestants, config, rounds=options.rounds, steps=options.steps)
            show(config, group, found)
            if group == "torch":  # a table a CPU: which of the two is faster depends on it
                results["cpu"][size].setdefault(group, {})[found["cpu"]] = found
            else:
                results["cpu"][size][group] = found
            keep()  # a later group may fail


if __name__ == "__main__":
    main()
