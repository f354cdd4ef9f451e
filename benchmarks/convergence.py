"""What is lost in learning by sending less: held-out loss of compressed gradients and of replicas
that train apart.

Run: python benchmarks/convergence.py [--steps 6000] [--seeds 3], with --tune for the table of
learning rates, or with --only NAME... to run some again beside what the JSON has of the others
(runs are deterministic, and a seed of the control is run again to see that they are).

Control: `so.ddp` with exact gradients. Test: `so.ddp` with each reducer, with error feedback and
without it, and four replicas under `so.diloco`, `so.local_sgd` and streaming `so.diloco`, H = 50.
All are the same GPT on four fake devices, with the same first parameters, the same batches (so the
same tokens) and the same optimizer: AdamW, a learning rate that warms up over a tenth of the steps
and falls as a cosine. Gradients are not clipped: what is clipped after compression is lost to error
feedback, which believes it sent. Reducers that send less than int8 begin with exact means for a
tenth of the steps (`so.reducers.warm_up`), as their authors do; a run without is beside them. What
may differ is the peak of the learning rate: RATES holds those that `--tune` finds, by the same grid
for all, the control too, on a seed of its own. The momentum of DiLoCo's outer optimizer, OUTER, is
tuned likewise; its authors' 0.9 looks back over more rounds than there are time for. Text: the
bundled corpus, Python's standard library. Loss: nats a byte on held-out files. Replicas that train
apart are judged by their shared parameters.

A model so small is near the best it can do after so many steps. Before that, whatever delays
gradients shows: what top_k(0.01) keeps waits for some 100 steps, and a run of 1,000 steps is that
far behind.

Claims: mean over seeds of loss / loss of the control with the same seed: every reducer with error
feedback at most 1.02, DiLoCo at most 1.03. Bytes are read off the compiled programs, those of a
step after the warm-up; those of replicas are spread over H steps.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import fake_devices, write_json

fake_devices(4)

import jax
import jax.numpy as jnp
import numpy as np
from convergence_contenders import CONFIG, CONTROL, RATE, RATES, H, contenders, optimizer
from rich.console import Console
from rich.table import Table

import shardopt as so
from shardopt import data
from shardopt.models import gpt

BATCH = 16
LENGTH = 32
EVERY, HELD_OUT = 500, 128  # steps between points of a curve; batches of the last evaluation
GRID = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
TUNING_SEED = 1000
CONSOLE = Console(width=150)


class Text:
    """Batches of each seed, drawn once; and what is held out."""

    def __init__(self, steps: int):
        windows, held_out = data.split(data.open_corpus(), LENGTH)
        self.windows = windows
        self.steps = steps
        self.drawn = {}
        self.held_out = list(data.spread_batches(held_out, BATCH, HELD_OUT))

    def batches(self, seed: int) -> list[Any]:
        """Return the batches of a seed."""
        if seed not in self.drawn:
            self.drawn[seed] = list(
                itertools.islice(data.batches(self.windows, BATCH, seed=seed), self.steps)
            )
        return self.drawn[seed]

    def unigram_entropy(self) -> float:
        """Held-out loss of the best guess that sees nothing but how often each byte occurs in
        training.
        """
        batches = self.batches(0)
        counts = 1 + sum(np.bincount(batch["tokens"].ravel(), minlength=256) for batch in batches)
        shares = np.log(counts / counts.sum())
        return -float(np.mean([shares[batch["tokens"][:, 1:]].mean() for batch in self.held_out]))


def train(opt: so.ShardedOptimizer, text: Text, seed: int) -> dict[str, Any]:
    """Return the curve of held-out loss, on a quarter of the batches, and the loss at the end, on
    all of them.
    """
    state = opt.init(lambda rng: gpt.init(CONFIG, rng), jax.random.key(seed))
    curve = []
    start = time.perf_counter()

    def loss(count):
        return float(
            np.mean([float(opt.evaluate(state, batch)["loss"]) for batch in text.held_out[:count]])
        )

    for step, batch in enumerate(text.batches(seed), 1):
        state, metrics = opt.step(state, batch)
        # queues of programs with collectives deadlock on fake devices
        jax.block_until_ready(metrics)
        if step % EVERY == 0:
            curve.append([step, loss(HELD_OUT // 4)])
    return {"loss": loss(HELD_OUT), "curve": curve, "seconds": time.perf_counter() - start}


def bytes_per_step(opt: so.ShardedOptimizer, batch: Any) -> float:
    """What a device sends in a step, on average over H steps; read off the compiled programs."""
    state = opt.init(lambda rng: gpt.init(CONFIG, rng), jax.random.key(0))

    def sent(step):
        now = state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))
        return so.hlo.audit(opt.step.lower(now, batch), mesh=opt.mesh).total_wire_bytes

    fragments = getattr(opt.config, "fragments", None)
    if fragments is None:
        return sent(0)
    # In the second H steps: a fragment is due after every H / fragments steps, and sent in the next
    # step if delayed.
    due = [
        H + (f + 1) * H // fragments - (0 if opt.config.local_updates.delay else 1)
        for f in range(fragments)
    ]
    return sum(map(sent, due)) / H + sent(0) * (H - fragments) / H


def tune(text: Text, steps: int, names: list[str], grid: list[float]) -> None:
    table = Table(
        "",
        *map(str, grid),
        title=f"Held-out loss by peak learning rate, {steps} steps, seed {TUNING_SEED}",
    )
    for name in names:
        make = contenders(steps)[name].make
        losses = [train(make(optimizer(rate, steps)), text, TUNING_SEED)["loss"] for rate in grid]
        table.add_row(name, *(f"{loss:.4f}" for loss in losses))
        print(name, [f"{loss:.4f}" for loss in losses], flush=True)
    CONSOLE.print(table)


@functools.cache
def text_of(steps: int) -> Text:
    return Text(steps)


def one_run(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Train one contender on one seed, in a process of the pool."""
    jax.clear_caches()
    make = contenders(steps)[name].make
    return train(make(optimizer(RATES.get(name, RATE), steps)), text_of(steps), seed)


def take_core(cores: Any) -> None:
    """Keep this process of the pool on a core of its own: the steps are too small for several."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


def compare(
    text: Text, steps: int, seeds: int, names: list[str], known: dict[str, Any]
) -> dict[str, Any]:
    """Run these contenders, and return them among those that are known, in the order of
    `contenders`.
    """
    results = dict(known)
    context = multiprocessing.get_context("spawn")
    all_of_them = contenders(steps)
    cores = context.Queue()
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for core in available:
        cores.put(core)
    with ProcessPoolExecutor(len(available), context, take_core, (cores,)) as pool:
        again = pool.submit(one_run, CONTROL, steps, 0) if known else None
        runs_of = {
            name: [
                pool.submit(one_run, name, steps, seed)
                for seed in range(min(seeds, all_of_them[name].seeds or seeds))
            ]
            for name in names
        }
        for name in names:
            contender = all_of_them[name]
            runs = [run.result() for run in runs_of[name]]
            control = (
                results[CONTROL]["losses"] if CONTROL in results else [run["loss"] for run in runs]
            )
            ratios = [run["loss"] / exact for run, exact in zip(runs, control, strict=False)]
            ratio = float(np.mean(ratios))
            limit = contender.limit
            rate = RATES.get(name, RATE)
            results[name] = {
                "learning_rate": rate,
                "losses": [run["loss"] for run in runs],
                "ratios": ratios,
                "ratio": ratio,
                "limit": limit,
                "holds": None if limit is None else ratio <= limit,
                "bytes_per_step": bytes_per_step(
                    contenders(0)[name].make(optimizer(rate, steps)), text.held_out[0]
                ),
                "curves": [run["curve"] for run in runs],
                "seconds": sum(run["seconds"] for run in runs),
            }
            print(f"{name:30} {np.mean(results[name]['losses']):.4f}  {ratio:.4f}", flush=True)
        if again is not None and (loss := again.result()["loss"]) != results[CONTROL]["losses"][0]:
            raise SystemExit(
                f"the control ends at {loss}, not at {results[CONTROL]['losses'][0]} as in the"
                " JSON: run all"
            )
    return {name: results[name] for name in all_of_them if name in results}


def show(results: dict[str, Any], title: str) -> None:
    table = Table(
        "", "peak rate", "loss", "of exact ddp", "from", "to", "claim", "bytes of ddp", title=title
    )
    ddp = results[CONTROL]["bytes_per_step"]
    for name, row in results.items():
        claim = (
            ""
            if row["limit"] is None
            else f"<= {row['limit']:.2f} {'holds' if row['holds'] else 'MISSED'}"
        )
        numbers = [f"{x:.4f}" for x in (row["ratio"], min(row["ratios"]), max(row["ratios"]))]
        share = f"{row['bytes_per_step'] / ddp:.4f}"
        table.add_row(
            name,
            f"{row['learning_rate']:g}",
            f"{np.mean(row['losses']):.4f}",
            *numbers,
            claim,
            share,
        )
    CONSOLE.print(table)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--tune",
        nargs="*",
        metavar="NAME",
        help="only show losses by learning rate, of all or these",
    )
    parser.add_argument(
        "--grid",
        nargs="*",
        type=float,
        default=GRID,
        help="peaks of the learning rate to tune over",
    )
    parser.add_argument(
        "--only", nargs="*", metavar="NAME", help="run these, take the others from the JSON"
    )
    given = parser.parse_args()
    if given.steps % H:
        parser.error(
            f"--steps must be a multiple of H = {H}: replicas are judged by what they last"
            " agreed on"
        )
    text = Text(given.steps)
    if given.tune is not None:
        tune(text, given.steps, given.tune or list(contenders(given.steps)), given.grid)
        return
    names = list(contenders(given.steps))
    known = {}
    if given.only:
        before = json.loads((Path(__file__).parent / "results" / "convergence.json").read_text())[
            "results"
        ]
        unknown = set(given.only) - set(names)
        if unknown:
            parser.error(f"unknown {sorted(unknown)}; there are {names}")
        if (before["steps"], before["seeds"]) != (given.steps, given.seeds):
            parser.error(f"the JSON has {before['steps']} steps and {before['seeds']} seeds")
        names = given.only
        known = before["contenders"]
    results = compare(text, given.steps, given.seeds, names, known)
    entropy = text.unigram_entropy()
    tokens = given.steps * BATCH * LENGTH
    title = (
        f"{gpt.num_parameters(CONFIG):,} parameters, {tokens:,} tokens, {given.seeds} seeds;"
        f" unigrams {entropy:.3f}"
    )
    show(results, title)
    from convergence_plot import draw

    path = write_json(
        __file__,
        {
            "steps": given.steps,
            "tokens": tokens,
            "seeds": given.seeds,
            "unigrams": entropy,
            "contenders": results,
        },
    )
    draw(json.loads(path.read_text())["results"], Path(path).with_suffix(".png"))
    print("wrote", path, "and its picture")


if __name__ == "__main__":
    main()
