"""What uneven experts cost on an expert axis, and whether copies of hot ones would pay: loads of
training, played through.

Run: python benchmarks/expert_loads.py [--steps 500]

Decoders of two blocks, 8 experts of which a byte goes through 2, and 32 of which it goes through 4,
learn the bundled corpus, 2,048 bytes a step, balanced by biases, by the loss over the batch, or not
at all. The loads of each step and block are played through by `so.planning.imbalance` on 8 devices:
an expert or four on each, without copies and with room for one more on each, which holds the
hottest of the step before. Slowdown: the busiest device over the mean, averaged over blocks and the
second half of the steps; chance is that of choices by dice.
"""

import argparse
import itertools
from pathlib import Path

import jax
import numpy as np
import optax
from common import write_json

import shardopt as so
from shardopt import data
from shardopt.models import moe
from shardopt.planning import expected_imbalance, imbalance, plot_expert_loads

BATCH, LENGTH, DEVICES = 32, 64, 8
SHAPES = {"2 of 8": (8, 2, 48), "4 of 32": (32, 4, 24)}
BALANCES = {
    "biases": {"score": "sigmoid", "balance": "bias", "balance_rate": 0.02},
    "loss": {"balance": "loss", "balance_rate": 0.1},
    "nothing": {"balance": None},
}


def loads_of(config: moe.MoEConfig, batches: list) -> np.ndarray:
    """Return the loads of each step: [steps, blocks, experts]."""
    rate = optax.warmup_cosine_decay_schedule(1e-4, 3e-3, len(batches) // 10, len(batches), 3e-4)
    mesh = so.make_mesh(devices=jax.devices()[:1])
    opt = so.ddp(optax.adamw(rate), mesh, moe.model(config), frozen=moe.frozen)
    state, found = opt.init(lambda rng: moe.init(config, rng), jax.random.key(0)), []
    for batch in batches:
        state, _ = opt.step(state, batch)
        found.append(np.asarray(state.params["router_load"]))
    return np.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    windows, _ = data.split(data.open_corpus(), LENGTH)
    batches = list(itertools.islice(data.batches(windows, BATCH, seed=0), options.steps))
    results = {}
    for shape, (experts, top_k, hidden) in SHAPES.items():
        sizes = {
            "dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "num_experts": experts,
            "top_k": top_k,
            "hidden": hidden,
        }
        chance = expected_imbalance(
            BATCH * LENGTH, num_experts=experts, top_k=top_k, devices=DEVICES
        )
        for balance, how in BALANCES.items():
            loads = loads_of(moe.MoEConfig(**sizes, **how), batches)
            late = loads[options.steps // 2 :]
            alone, copied = imbalance(late, DEVICES), imbalance(late, DEVICES, replicas=1)
            results[f"{shape}, {balance}"] = {
                "slowdown": alone.slowdown,
                "worst": alone.worst,
                "by_block": alone.each.mean(axis=0).tolist(),
                "with_copies": copied.slowdown,
                "chance": chance,
                "experts_held": (experts // DEVICES + 1) / (experts // DEVICES),
            }
            print(f"{shape}, {balance}: {results[f'{shape}, {balance}']}", flush=True)
            if (shape, balance) == ("2 of 8", "biases"):
                plot_expert_loads(loads, devices=DEVICES, path=options.out / "expert_loads.png")
    write_json(__file__, results, options.out / "expert_loads.json")


if __name__ == "__main__":
    main()
