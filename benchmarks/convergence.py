"""What is lost in learning by sending less: held-out loss of compressed gradients and of replicas that train apart.

Run: python benchmarks/convergence.py [--steps 1500] [--seeds 3], or with --tune for the table of learning rates.

Control: `so.ddp` with exact gradients. Test: `so.ddp` with each reducer, with error feedback and without it, and four
replicas under `so.diloco`, `so.local_sgd` and streaming `so.diloco`, H = 50. All are the same GPT on four fake devices,
with the same first parameters, the same batches (so the same tokens) and the same optimizer: AdamW, gradients clipped
to norm 1, a learning rate that warms up over a tenth of the steps and falls as a cosine. What may differ is the peak of
the learning rate: RATES holds those that `--tune` finds, by the same grid for all, the control too, on a seed of its own.
RATES is empty so far: no rate is tuned yet.
Text: the bundled corpus, Python's standard library. Loss: nats a byte on held-out files. Replicas that train apart are
judged by their shared parameters.

Claims: mean over seeds of loss / loss of the control with the same seed: every reducer with error feedback at most 1.02,
DiLoCo at most 1.03. Bytes are read off the compiled programs; those of replicas are spread over H steps.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import fake_devices, write_json

fake_devices(4)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import shardopt as so
from shardopt import data
from shardopt.models import gpt

CONFIG = gpt.GPTConfig(dim=64, num_layers=2, num_heads=4, max_length=64)
DEVICES, BATCH, LENGTH, H = 4, 8, 64, 50
EVERY, HELD_OUT = 100, 128  # steps between points of a curve; batches of the last evaluation
RATE, GRID, TUNING_SEED = 2e-3, (1e-3, 2e-3, 4e-3), 1000
RATES: dict[str, float] = {}
"""Peaks of the learning rate other than RATE, as --tune found them."""
CONSOLE = Console(width=150)
Make = Callable[[optax.GradientTransformation], so.ShardedOptimizer]


class Contender(NamedTuple):
    """A way to train; `limit` is what it may lose, None where nothing is claimed."""

    make: Make
    limit: float | None = None


def contenders() -> dict[str, Contender]:
    model, plain, apart = gpt.model(CONFIG), so.make_mesh(data=DEVICES), so.make_mesh(replica=DEVICES, data=1)

    def compressed(reducer):
        return lambda tx: so.ddp(tx, plain, model, reducer=reducer)

    def replicas(combine, **how):
        return lambda tx: combine(so.ddp(tx, apart, model), sync_every=H, **how)

    found = {"ddp, exact": Contender(lambda tx: so.ddp(tx, plain, model))}
    reducers = {
        "bf16": so.reducers.exact(jnp.bfloat16),
        "int8": so.reducers.int8(),
        "sign": so.reducers.sign(),
        "top_k(0.01)": so.reducers.top_k(0.01),
        "power_sgd(4)": so.reducers.power_sgd(4),
    }
    for name, reducer in reducers.items():
        found[f"{name}, error feedback"] = Contender(compressed(so.reducers.error_feedback(reducer)), 1.02)
        found[f"{name}, none"] = Contender(compressed(reducer))
    found["DiLoCo"] = Contender(replicas(so.diloco), 1.03)
    found["Streaming DiLoCo"] = Contender(replicas(so.diloco, fragments=2, delay=5, mix=0.5))
    found["Local SGD"] = Contender(replicas(so.local_sgd))
    return found


def optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.1 * peak, peak, steps // 10, steps, 0.1 * peak)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


class Text:
    """Batches of each seed, drawn once; and what is held out."""

    def __init__(self, steps: int):
        windows, held_out = data.split(data.open_corpus(), LENGTH)
        self.windows, self.steps, self.drawn = windows, steps, {}
        self.held_out = list(data.spread_batches(held_out, BATCH, HELD_OUT))

    def batches(self, seed: int) -> list[Any]:
        """Return the batches of a seed."""
        if seed not in self.drawn:
            self.drawn[seed] = list(itertools.islice(data.batches(self.windows, BATCH, seed=seed), self.steps))
        return self.drawn[seed]

    def unigram_entropy(self) -> float:
        """Held-out loss of the best guess that sees nothing but how often each byte occurs in training."""
        batches = next(iter(self.drawn.values()))
        counts = 1 + sum(np.bincount(batch["tokens"].ravel(), minlength=256) for batch in batches)
        shares = np.log(counts / counts.sum())
        return -float(np.mean([shares[batch["tokens"][:, 1:]].mean() for batch in self.held_out]))


def train(opt: so.ShardedOptimizer, text: Text, seed: int) -> dict[str, Any]:
    """Return the curve of held-out loss, on a quarter of the batches, and the loss at the end, on all of them."""
    state, curve, start = opt.init(lambda rng: gpt.init(CONFIG, rng), jax.random.key(seed)), [], time.perf_counter()

    def loss(count):
        return float(np.mean([float(opt.evaluate(state, batch)["loss"]) for batch in text.held_out[:count]]))

    for step, batch in enumerate(text.batches(seed), 1):
        state, metrics = opt.step(state, batch)
        jax.block_until_ready(metrics)  # queues of programs with collectives deadlock on fake devices
        if step % EVERY == 0:
            curve.append([step, loss(HELD_OUT // 4)])
    return {"loss": loss(HELD_OUT), "curve": curve, "seconds": time.perf_counter() - start}


def bytes_per_step(opt: so.ShardedOptimizer, batch: Any) -> float:
    """What a device sends in a step, on average over H steps; read off the compiled programs."""
    state = opt.init(lambda rng: gpt.init(CONFIG, rng), jax.random.key(0))

    def sent(step):
        now = state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))
        return so.audit(opt.step.lower(now, batch), mesh=opt.mesh).total_wire_bytes

    if (fragments := getattr(opt.config, "fragments", None)) is None:
        return sent(0)
    # In the second H steps: a fragment is due after every H / fragments steps, and sent in the next step if delayed.
    due = [H + (f + 1) * H // fragments - (0 if opt.config.delay else 1) for f in range(fragments)]
    return sum(map(sent, due)) / H + sent(0) * (H - fragments) / H


def tune(text: Text, steps: int, names: list[str], grid: list[float]) -> None:
    table = Table("", *map(str, grid), title=f"Held-out loss by peak learning rate, {steps} steps, seed {TUNING_SEED}")
    for name in names:
        make = contenders()[name].make
        losses = [train(make(optimizer(rate, steps)), text, TUNING_SEED)["loss"] for rate in grid]
        table.add_row(name, *(f"{loss:.4f}" for loss in losses))
        print(name, [f"{loss:.4f}" for loss in losses], flush=True)
    CONSOLE.print(table)


def compare(text: Text, steps: int, seeds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, contender in contenders().items():
        rate = RATES.get(name, RATE)
        opt = contender.make(optimizer(rate, steps))
        runs = [train(opt, text, seed) for seed in range(seeds)]
        control = results["ddp, exact"]["losses"] if results else [run["loss"] for run in runs]
        ratios = [run["loss"] / exact for run, exact in zip(runs, control, strict=True)]
        ratio, limit = float(np.mean(ratios)), contender.limit
        results[name] = {
            "learning_rate": rate,
            "losses": [run["loss"] for run in runs],
            "ratios": ratios,
            "ratio": ratio,
            "limit": limit,
            "holds": None if limit is None else ratio <= limit,
            "bytes_per_step": bytes_per_step(opt, text.held_out[0]),
            "curves": [run["curve"] for run in runs],
            "seconds": sum(run["seconds"] for run in runs),
        }
        print(f"{name:30} {np.mean(results[name]['losses']):.4f}  {ratio:.4f}", flush=True)
        jax.clear_caches()
    return results


def show(results: dict[str, Any], title: str) -> None:
    table = Table("", "peak rate", "loss", "of exact ddp", "from", "to", "claim", "bytes of ddp", title=title)
    ddp = results["ddp, exact"]["bytes_per_step"]
    for name, row in results.items():
        claim = "" if row["limit"] is None else f"<= {row['limit']:.2f} {'holds' if row['holds'] else 'MISSED'}"
        numbers = [f"{x:.4f}" for x in (row["ratio"], min(row["ratios"]), max(row["ratios"]))]
        share = f"{row['bytes_per_step'] / ddp:.4f}"
        table.add_row(name, f"{row['learning_rate']:g}", f"{np.mean(row['losses']):.4f}", *numbers, claim, share)
    CONSOLE.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", nargs="*", metavar="NAME", help="only show losses by learning rate, of all or these")
    parser.add_argument("--grid", nargs="*", type=float, default=GRID, help="peaks of the learning rate to tune over")
    given = parser.parse_args()
    if given.steps % H:
        parser.error(f"--steps must be a multiple of H = {H}: replicas are judged by what they last agreed on")
    text = Text(given.steps)
    if given.tune is not None:
        tune(text, given.steps, given.tune or list(contenders()), given.grid)
        return
    results = compare(text, given.steps, given.seeds)
    entropy = text.unigram_entropy()
    tokens = given.steps * BATCH * LENGTH
    title = f"{gpt.num_parameters(CONFIG):,} parameters, {tokens:,} tokens, {given.seeds} seeds; unigrams {entropy:.3f}"
    show(results, title)
    from convergence_plot import draw

    path = write_json(
        __file__,
        {"steps": given.steps, "tokens": tokens, "seeds": given.seeds, "unigrams": entropy, "contenders": results},
    )
    draw(json.loads(path.read_text())["results"], Path(path).with_suffix(".png"))
    print("wrote", path, "and its picture")


if __name__ == "__main__":
    main()
