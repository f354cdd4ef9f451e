"""Mutants of the rules of the proof of losses, each of which must die by a property test.

    python benchmarks/rule_mutants.py --mutants 210
    python benchmarks/rule_mutants.py --only "_walk.py _row_maximum"    # prints, writes no results

A sample with a seed, of all files of `shardopt/separability` and of the table's rows. A mutant of
the results before stays in the sample. "unsound" and "error" die by a property test. "refuses" knew
fewer results than the rule, and no wrong one. `equivalent_rule_mutants.json` says why others are as
sound as the rule. What it does not name is open.
"""

import argparse
import collections
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import write_json
from support.rule_mutants import FILES, Bench, Mutant, mutants, row_mutants

SEED = 61
FEWEST = 12
"""The seed of the sample, and the number of mutants of each file at least."""
KILLED = ("unsound", "error")
HARMLESS = (*KILLED, "refuses")
RESULTS = Path(__file__).parent / "results" / "rule_mutants.json"
REASONS = Path(__file__).parent / "equivalent_rule_mutants.json"
"""Mutant -> why it is equivalent to the rule, or only more careful."""


def key(mutant: Mutant) -> str:
    """Return the name of a mutant without its line."""
    return re.sub(r"\.py:\d+", ".py", mutant.name)


def all_mutants() -> list[list[Mutant]]:
    """Return the mutants of each file, and of the rows of the table."""
    return [
        *(list(mutants(file)) for file in FILES),
        [mutant for mutant, _, _ in row_mutants()],
    ]


def sample(count: int, before: Collection[str]) -> list[Mutant]:
    """Return the mutants of a run before, and a sample of others up to a number.

    The sample has at least `FEWEST` of each file and of the rows.
    """
    draw = random.Random(SEED)
    groups = all_mutants()
    for group in groups:
        draw.shuffle(group)
    others = [mutant for group in groups for mutant in group[FEWEST:]]
    draw.shuffle(others)
    chosen = [mutant for group in groups for mutant in group[:FEWEST]]
    by_key = {key(mutant): mutant for mutant in [*others, *chosen]}
    names = dict.fromkeys([name for name in before if name in by_key])
    names |= dict.fromkeys(map(key, [*chosen, *others]))
    return [by_key[name] for name in list(names)[:count]]


def fates_of(chosen: Sequence[Mutant]) -> dict[str, str]:
    """Return the fate of each mutant."""
    bench = Bench()
    fates = {}
    for mutant in chosen:
        fates[key(mutant)] = bench.fate(mutant)
        print(f"{fates[key(mutant)]:9}{mutant.name}", flush=True)
    return fates


def main(count: int) -> None:
    start = time.perf_counter()
    before: dict[str, str] = json.loads(RESULTS.read_text())["results"]["fates"]
    fates = fates_of(sample(count, before))
    reasons: dict[str, str] = json.loads(REASONS.read_text())
    lived = [name for name, fate in fates.items() if fate not in HARMLESS]
    equivalent = {name: reasons[name] for name in lived if name in reasons}
    counts = collections.Counter(fates.values())
    killed = sum(counts[fate] for fate in KILLED)
    to_kill = len(fates) - counts["refuses"] - len(equivalent)
    results = {
        "seed": SEED,
        "mutants": len(fates),
        "killed": killed,
        **{fate: counts[fate] for fate in sorted(counts)},
        "equivalent": equivalent,
        "open": [name for name in lived if name not in reasons],
        "killed_of_those_neither_refusing_nor_equivalent": round(killed / to_kill, 4),
        "seconds": round(time.perf_counter() - start),
        "fates": fates,
    }
    print(counts, len(results["open"]), "open", write_json(__file__, results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=210)
    parser.add_argument("--only", nargs="+", help="parts of the names of mutants")
    options = parser.parse_args()
    if options.only:
        every = itertools.chain(*all_mutants())
        fates_of([x for x in every if any(part in key(x) for part in options.only)])
    else:
        main(options.mutants)
