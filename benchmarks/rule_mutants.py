"""Mutants of the rules of the proof of losses, each of which must die by a property test.

    python benchmarks/rule_mutants.py --mutants 240

A sample with a seed, of all files of `shardopt/separability` and of the table's rows. "unsound" and
"error" die by a property test. "refuses" only knows fewer results, so it is as sound as the rule.
What is left is shown with its reason, or is open.
"""

import argparse
import collections
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import write_json
from support.rule_mutants import FILES, Bench, Mutant, mutants, row_mutants

SEED, FEWEST = 61, 12
"""The seed of the sample, and the number of mutants of each file at least."""
FEW, MANY = 16, 40
"""The seeds of the cases of a rule: a mutant that outlives the first meets the others."""
KILLED = ("unsound", "error")


def sample(count: int) -> list[Mutant]:
    """Return a sample of mutants, with at least `FEWEST` of each file and of the rows."""
    draw = random.Random(SEED)
    groups = [list(mutants(file)) for file in FILES]
    groups.append([mutant for mutant, _, _ in row_mutants()])
    for group in groups:
        draw.shuffle(group)
    others = [mutant for group in groups for mutant in group[FEWEST:]]
    draw.shuffle(others)
    chosen = [mutant for group in groups for mutant in group[:FEWEST]]
    return chosen + others[: max(0, count - len(chosen))]


def main(count: int, only: str) -> None:
    start = time.perf_counter()
    first, others = Bench(range(FEW)), Bench(range(FEW, MANY))
    chosen = [mutant for mutant in sample(count) if only in mutant.name]
    fates = {}
    for mutant in chosen:
        fate = first.fate(mutant)
        if fate not in KILLED:
            later = others.fate(mutant)
            fate = later if later in KILLED or fate in ("survives", "unused") else fate
        fates[mutant.name] = fate
        print(f"{fate:9}{mutant.name}", flush=True)
    counts = collections.Counter(fates.values())
    killed = sum(counts[fate] for fate in KILLED)
    results = {
        "seed": SEED,
        "cases": len(first.cases) + len(others.cases),
        "mutants": len(chosen),
        "killed": killed,
        **{fate: counts[fate] for fate in sorted(counts)},
        "killed_of_those_not_refusing": round(killed / (len(chosen) - counts["refuses"]), 4),
        "seconds": round(time.perf_counter() - start),
        "fates": fates,
    }
    print(counts, write_json(__file__, results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=240)
    parser.add_argument("--only", default="", help="a text of the names of the mutants to run")
    options = parser.parse_args()
    main(options.mutants, options.only)
