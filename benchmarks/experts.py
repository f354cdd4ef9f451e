"""What experts give at equal flops, and what keeps their loads equal: held-out loss and imbalance
over training.

Run: python benchmarks/experts.py [--steps 1000] [--seeds 3]

Control: a decoder with one mlp of 3 D hidden units in each block. Test: 8 experts of half as many,
2 of which each byte goes through, so that active parameters and flops are the same but for the
router, balanced by biases of a sigmoid router (rate BIAS_RATE; those of a softmax lag behind its
scores), by the loss over the batch (factor LOSS_RATE), or not at all. All have the same attention,
batches, optimizer and learning rate: AdamW, warmed up over a tenth of the steps, then a cosine;
what may differ is nothing else. Text: the bundled corpus, Python's standard library. Loss: nats a
byte on held-out files, without the term for balance. Imbalance: the load of the busiest expert over
the mean, averaged over blocks and the last quarter of the steps; 1 is balanced, 4 is all on two of
eight.

Claims: with biases the loss is below the control's for every seed, and the imbalance at most 1.5.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import write_json

import shardopt as so
from shardopt import data
from shardopt.models import moe

BATCH = 16
LENGTH = 32
DIM = 32
RATE = 3e-3
BIAS_RATE = 0.02
LOSS_RATE = 0.1
EVERY, HELD_OUT = 125, 32  # steps between points of a curve; batches of an evaluation
SHAPE = {"dim": DIM, "num_layers": 1, "num_heads": 2}
CONTENDERS = {
    "dense": moe.config(**SHAPE, num_experts=1, top_k=1, hidden=3 * DIM, balance=None),
    "experts, biases": moe.config(
        **SHAPE, hidden=3 * DIM // 2, score="sigmoid", balance="bias", balance_rate=BIAS_RATE
    ),
    "experts, loss": moe.config(
        **SHAPE, hidden=3 * DIM // 2, balance="loss", balance_rate=LOSS_RATE
    ),
    "experts, nothing": moe.config(**SHAPE, hidden=3 * DIM // 2, balance=None),
}


def train(
    opt: so.ShardedOptimizer, config: moe.config, batches: list, held_out: list, seed: int
) -> dict[str, Any]:
    """Return the curves of held-out loss and of imbalance, and both at the end."""
    state = opt.init(lambda rng: moe.init(config, rng), jax.random.key(seed))
    losses = []
    imbalance = []
    start = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        state, metrics = opt.step(state, batch)
        imbalance.append(metrics["load_imbalance"])
        if step % EVERY == 0:
            losses.append(
                [
                    step,
                    float(np.mean([opt.evaluate(state, one)["cross_entropy"] for one in held_out])),
                ]
            )
    imbalance = [float(one) for one in imbalance][1:]  # each is that of the step before
    return {
        "loss": losses[-1][1],
        "imbalance": float(np.mean(imbalance[-len(batches) // 4 :])),
        "losses": losses,
        "imbalances": [
            round(float(np.mean(some)), 3) for some in np.array_split(imbalance, len(batches) // 10)
        ],
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    windows, rest = data.split(data.open_corpus(), LENGTH)
    held_out = list(data.spread_batches(rest, BATCH, HELD_OUT))
    drawn = [
        list(itertools.islice(data.batches(windows, BATCH, seed=seed), options.steps))
        for seed in range(options.seeds)
    ]
    warmup = options.steps // 10
    rate = optax.warmup_cosine_decay_schedule(RATE / warmup, RATE, warmup, options.steps, RATE / 10)
    results = {}
    for name, config in CONTENDERS.items():
        mesh = so.make_mesh(devices=jax.devices()[:1])
        opt = so.ddp(optax.adamw(rate), mesh, moe.model(config), rules=moe.rules)
        runs = [train(opt, config, batches, held_out, seed) for seed, batches in enumerate(drawn)]
        sizes = {
            "parameters": moe.num_parameters(config),
            "active": moe.num_parameters(config, active=True),
        }
        results[name] = sizes | {"runs": runs}
        shown = ", ".join(f"{run['loss']:.3f} (imbalance {run['imbalance']:.2f})" for run in runs)
        print(
            f"{name:18} {sizes['active']:,} of {sizes['parameters']:,} parameters active: {shown}",
            flush=True,
        )
    biased = results["experts, biases"]["runs"]
    claims = {
        "loss below the control's for every seed": all(
            run["loss"] < control["loss"]
            for run, control in zip(biased, results["dense"]["runs"], strict=True)
        ),
        "imbalance with biases at most 1.5": all(run["imbalance"] <= 1.5 for run in biased),
    }
    path = write_json(
        __file__,
        {"steps": options.steps, "claims": claims, "contenders": results},
        options.out / "experts.json",
    )
    plot(results, path.with_suffix(".png"))
    print(claims, path)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw held-out loss and imbalance over steps, each seed a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for colour, (name, found) in zip(
        ("black", "tab:blue", "tab:orange", "tab:red"), results.items(), strict=True
    ):
        for i, run in enumerate(found["runs"]):
            label = name if i == 0 else None
            left.plot(*zip(*run["losses"], strict=True), color=colour, label=label)
            if name != "dense":
                steps = 10 * np.arange(1, len(run["imbalances"]) + 1)
                right.plot(steps, run["imbalances"], color=colour, label=label)
    left.set(
        xlabel="step",
        ylabel="held-out nats a byte",
        title="8 experts, 2 active, beside an mlp of the same flops",
    )
    right.set(xlabel="step", ylabel="busiest expert / mean", title="imbalance of loads")
    left.legend(frameon=False)
    right.legend(frameon=False)
    right.axhline(1, color="grey", linewidth=0.5)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
