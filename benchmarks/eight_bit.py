"""What 8-bit moments cost in learning: held-out loss of AdamW with `so.transforms.eight_bit` over
that in fp32.

Run: python benchmarks/eight_bit.py [--steps 6000] [--seeds 3]

A byte-level GPT on one device, the same first parameters, batches and schedule for both. Moments of
all leaves of two or more dims are rounded; norms stay in fp32.

Claim: mean over seeds of loss / loss in fp32 at most 1.01.
"""

import argparse
from typing import Any

import numpy as np
import optax
from common import write_json
from small_gpt import Task, schedule

import shardopt as so
from shardopt.models import gpt

CONFIG = gpt.config(dim=32, num_layers=1, num_heads=2, max_length=32)
RATE = 1.6e-2
EVERY = 500
LIMIT = 1.01


def optimizers(steps: int) -> dict[str, optax.GradientTransformation]:
    adamw = optax.adamw(schedule(RATE, steps))
    return {
        "fp32": adamw,
        "8 bits": so.transforms.eight_bit(adamw, min_elements=1024),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    task = Task(CONFIG)
    rows = {}
    for name, tx in optimizers(given.steps).items():
        runs = task.train(tx, given.steps, range(given.seeds), EVERY)
        rows[name] = {key: [run[key] for run in runs] for key in ("loss", "curve", "seconds")}
        rows[name]["state_bytes"] = runs[0]["state_bytes"]
        ratios = [a / b for a, b in zip(rows[name]["loss"], rows["fp32"]["loss"], strict=True)]
        rows[name] |= {"ratios": ratios, "ratio": float(np.mean(ratios))}
        print(f"{name:8} {np.mean(rows[name]['loss']):.4f}  {rows[name]['ratio']:.4f}", flush=True)
    size = gpt.num_parameters(CONFIG)
    results: dict[str, Any] = {
        "steps": given.steps,
        "learning_rate": RATE,
        "parameters": size,
        "limit": LIMIT,
    }
    results |= {"holds": rows["8 bits"]["ratio"] <= LIMIT, "runs": rows}
    print(write_json(__file__, results))


if __name__ == "__main__":
    main()
