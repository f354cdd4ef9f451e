"""Tokens to reach a loss: Muon and SOAP against AdamW on a small GPT,
tuned alike.

Run: python benchmarks/matrices.py [--steps 800] [--seeds 3], with --only NAME... to run some beside
what the JSON has of the others, or with --draw for the picture alone.

Each optimizer has the same first parameters, batches and form of schedule. Its peak learning rate
is the best of the same grid, on a seed of its own; all else is its default, weight decay none.
Matrices are `gpt.matrices`; embedding, head and norms go to AdamW, at the same rate as the matrices
in SOAP, at AdamW's own best rate in Muon, whose steps have another size.

Measured: the tokens after which held-out loss, interpolated along the curve, is what AdamW has at
its end (mean over seeds), as a share of AdamW's tokens.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
from common import write_json
from small_gpt import BATCH, LENGTH, TUNING_SEED, Task, schedule

import shardopt as so
from shardopt.models import gpt

CONFIG = gpt.config(dim=32, num_layers=2, num_heads=2, max_length=32)
GRID = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
EVERY = 50
RESULTS = Path(__file__).parent / "results" / "matrices.json"
COLOURS = {"adamw": "black", "muon": "#3b6ea8", "soap": "#d1495b"}
Make = Callable[[float], optax.GradientTransformation]


def optimizers(steps: int, adam_rate: float) -> dict[str, Make]:
    def muon(peak: float) -> optax.GradientTransformation:
        numbers = so.optimizers.muon_dimension_numbers(gpt.matrices)
        rates = {
            "learning_rate": schedule(peak, steps),
            "adam_learning_rate": schedule(adam_rate, steps),
        }
        return optax.contrib.muon(**rates, muon_weight_dimension_numbers=numbers)

    return {
        "adamw": lambda peak: optax.adamw(schedule(peak, steps), weight_decay=0.0),
        "muon": muon,
        "soap": lambda peak: so.optimizers.soap(schedule(peak, steps), matrices=gpt.matrices),
    }


def steps_to(curve: list[list[float]], loss: float) -> float | None:
    """Return after how many steps a curve first comes down to a loss; None if it does not."""
    steps, losses = np.array(curve).T
    below = np.nonzero(losses <= loss)[0]
    if not len(below):
        return None
    i = below[0]
    return (
        float(np.interp(loss, losses[i - 1 : i + 1][::-1], steps[i - 1 : i + 1][::-1]))
        if i
        else float(steps[0])
    )


def compare(steps: int, seeds: int, names: list[str], known: dict[str, Any]) -> dict[str, Any]:
    task = Task(CONFIG)
    rows = dict(known)
    for name in names:
        adam_rate = rows["adamw"]["learning_rate"] if name != "adamw" else GRID[0]
        make = optimizers(steps, adam_rate)[name]
        tuned = {
            rate: task.train(make(rate), steps, [TUNING_SEED], EVERY)[0]["loss"] for rate in GRID
        }
        rate = min(tuned, key=lambda rate: tuned[rate])
        runs = task.train(make(rate), steps, range(seeds), EVERY)
        rows[name] = {
            "learning_rate": rate,
            "tuning": {str(key): value for key, value in tuned.items()},
        }
        rows[name] |= {key: [run[key] for run in runs] for key in ("loss", "curve", "seconds")}
        ends = [run["loss"] for run in runs] if name == "adamw" else rows["adamw"]["loss"]
        found = [steps_to(run["curve"], end) for run, end in zip(runs, ends, strict=True)]
        shares = [None if one is None else one / steps for one in found]
        rows[name] |= {"share_of_tokens": shares}
        rows[name]["mean_share"] = (
            None if None in shares else float(np.mean([x for x in shares if x is not None]))
        )
        print(
            f"{name:8} {rate:g} {np.mean(rows[name]['loss']):.4f} {rows[name]['mean_share']}",
            flush=True,
        )
    rows = {name: rows[name] for name in COLOURS if name in rows}
    return {
        "steps": steps,
        "tokens": steps * BATCH * LENGTH,
        "seeds": seeds,
        "grid": GRID,
        "runs": rows,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw held-out loss over tokens, the mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    tokens = results["tokens"] / results["steps"] / 1e6
    for name, row in results["runs"].items():
        steps = [step for step, _ in row["curve"][0]]
        losses = np.mean([[loss for _, loss in curve] for curve in row["curve"]], axis=0)
        told = "" if row["mean_share"] is None else f", {row['mean_share']:.2f} of the tokens"
        label = name if name == "adamw" else name + told
        axes.plot(tokens * np.array(steps), losses, label=label, color=COLOURS[name], linewidth=1.6)
    end = float(np.mean(results["runs"]["adamw"]["loss"]))
    axes.axhline(end, color="#6b7280", linewidth=0.8, linestyle=":")
    axes.set_ylim(end - 0.25, end + 0.9)
    axes.set_xlim(left=0)
    axes.set_xlabel("million tokens", color="#6b7280")
    axes.set_ylabel("held-out loss (nats a byte)", color="#6b7280")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(colors="#6b7280", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d1d5db")
    axes.legend(frameon=False)
    figure.suptitle(
        f"Tokens to AdamW's last loss, mean of {results['seeds']} seeds",
        fontsize=10,
        color="#6b7280",
    )
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", metavar="NAME", help="run these, take the others from the JSON"
    )
    parser.add_argument("--draw", action="store_true", help="only draw the picture again")
    given = parser.parse_args()
    if not given.draw:
        known = (
            json.loads(RESULTS.read_text())["results"]["runs"]
            if given.only and RESULTS.exists()
            else {}
        )
        print(
            write_json(
                __file__,
                compare(given.steps, given.seeds, given.only or ["adamw", "muon", "soap"], known),
            )
        )
    draw(json.loads(RESULTS.read_text())["results"], RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
