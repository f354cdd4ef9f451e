"""Mutants of the rules of the proof of losses, each of which must die by a property test.

    python benchmarks/rule_mutants.py --mutants 210
    python benchmarks/rule_mutants.py --again    # only those that lived, after new property tests

A sample with a seed, of all files of `shardopt/separability` and of the table's rows. "unsound" and
"error" die by a property test. "refuses" only knows fewer results, so it is as sound as the rule.
The results file says of what is left why it is equivalent, or that it is open.
"""

import argparse
import collections
import json
import random
import re
import sys
import time
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import write_json
from support.rule_mutants import FILES, Bench, Mutant, mutants, row_mutants

SEED = 61
FEWEST = 12
"""The seed of the sample, and the number of mutants of each file at least."""
FEW = 16
MANY = 40
"""The seeds of the cases of a rule: a mutant that outlives the first meets the others."""
KILLED = ("unsound", "error")
RESULTS = Path(__file__).parent / "results" / "rule_mutants.json"


def key(mutant: Mutant) -> str:
    """Return the name of a mutant without its line."""
    return re.sub(r"\.py:\d+", ".py", mutant.name)


def sample(count: int, before: Collection[str]) -> list[Mutant]:
    """Return the mutants of a run before, and a sample of others up to a number.

    The sample has at least `FEWEST` of each file and of the rows.
    """
    draw = random.Random(SEED)
    groups = [list(mutants(file)) for file in FILES]
    groups.append([mutant for mutant, _, _ in row_mutants()])
    for group in groups:
        draw.shuffle(group)
    others = [mutant for group in groups for mutant in group[FEWEST:]]
    draw.shuffle(others)
    chosen = [mutant for group in groups for mutant in group[:FEWEST]]
    by_key = {key(mutant): mutant for mutant in [*others, *chosen]}
    names = dict.fromkeys([name for name in before if name in by_key])
    names |= dict.fromkeys(map(key, [*chosen, *others]))
    return [by_key[name] for name in list(names)[:count]]


def main(count: int, again: bool) -> None:
    start = time.perf_counter()
    first = Bench(range(FEW))
    others = Bench(range(FEW, MANY))
    before: dict[str, str] = json.loads(RESULTS.read_text())["results"]["fates"] if again else {}
    chosen = sample(count, before)
    fates = {}
    for mutant in chosen:
        if before.get(key(mutant)) in KILLED:
            fates[key(mutant)] = before[key(mutant)]
            continue
        fate = first.fate(mutant)
        if fate not in KILLED:
            later = others.fate(mutant)
            fate = later if later in KILLED or fate in ("survives", "unused") else fate
        fates[key(mutant)] = fate
        print(f"{fate:9}{mutant.name}", flush=True)
    counts = collections.Counter(fates.values())
    killed = sum(counts[fate] for fate in KILLED)
    results = {
        "seed": SEED,
        "cases": len(first.cases) + len(others.cases),
        "mutants": len(chosen),
        "killed": killed,
        "ran_again": again,
        **{fate: counts[fate] for fate in sorted(counts)},
        "killed_of_those_not_refusing": round(killed / (len(chosen) - counts["refuses"]), 4),
        "seconds": round(time.perf_counter() - start),
        "fates": fates,
    }
    print(counts, write_json(__file__, results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=210)
    parser.add_argument("--again", action="store_true", help="run those that lived in the results")
    options = parser.parse_args()
    main(options.mutants, options.again)
