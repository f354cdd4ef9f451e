"""Estimated seconds of steps beside seconds that others measured on TPUs, and the share e of the HBM
bandwidth that these runs give.

    python benchmarks/measured_runs.py --runs FILE [--draw] [--compile ID --maxtext PYTHON]
        [--programs FOLDER]

FILE has public measured runs, one a line. Those on TPUs that state enough to be compiled again are
drawn into two halves within each generation, by `SEED`: e is fitted on one half, and the errors of
the other half are published. `--draw` writes both halves into results/measured_runs.json. They were
committed before the first of these runs was compiled.

`--compile` compiles a run by MaxText's own `train_compile`, with the words and flags of the run, in
the Python of an environment with MaxText. Flags that libtpu refuses are left out, and the result
lists them. The texts are kept in FOLDER. Without it, the texts there are read again.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from common import write_json

RESULTS = Path(__file__).parent / "results" / "measured_runs.json"
SEED = 65
HALVES = ("fit", "test")
GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")
SHARES = [round(0.3 + 0.01 * step, 2) for step in range(71)]
"""Shares of the HBM bandwidth among which the fit chooses."""


def mark(run: dict[str, Any]) -> str:
    """Return what is weak about the seconds of a run: they are derived, a bound, or disputed."""
    kind = run["step_seconds"]["kind"]
    weak = [] if kind == "stated" else [kind]
    return ", ".join([*weak, *["disputed"] * bool(run["conflicts"])])


def halves(runs: list[dict[str, Any]], seed: int = SEED) -> dict[int, str]:
    """Return the half of each run that can be compiled again, by its id.

    Within a generation the numbers of both halves differ by at most one, and errors get the larger.
    """
    drawn = {}
    for chip in GENERATIONS:
        ids = sorted(run["id"] for run in runs if run["chip"] == chip and run["complete"])
        random.Random(f"{seed} {chip}").shuffle(ids)
        count = len(ids) // 2
        drawn |= dict.fromkeys(ids[:count], "fit") | dict.fromkeys(ids[count:], "test")
    return drawn


def drawn_rows(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each run that was drawn: what it is, its half and its measured seconds."""
    half_of = halves(runs)
    return {
        str(run["id"]): {
            "name": run["name"],
            "chip": run["chip"],
            "chips": run["chips"],
            "slices": run["slices"],
            "half": half_of[run["id"]],
            "measured_seconds": run["step_seconds"]["value"],
            "mark": mark(run),
        }
        for run in sorted(runs, key=lambda run: run["id"])
        if run["id"] in half_of
    }


def main() -> None:
    """Draw, or read what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the measured runs")
    parser.add_argument("--draw", action="store_true", help="write both halves")
    options = parser.parse_args()
    runs = json.loads(options.runs.read_text(encoding="utf-8"))
    if options.draw:
        write_json(__file__, {"seed": SEED, "runs": drawn_rows(runs)}, RESULTS)


if __name__ == "__main__":
    main()
