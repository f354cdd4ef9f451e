"""Rows such that every pair of values of every two factors occurs in at least one."""

import itertools
import random
from collections.abc import Sequence


def all_pairs(factors: dict[str, list], allowed=lambda row: True, seed: int = 0) -> list[dict]:
    """Cover all pairs greedily: of some random rows around an uncovered pair, keep the one that
    covers most.
    """
    draw = random.Random(seed)
    names = list(factors)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while open_pairs:
        target = min(open_pairs)
        tries = []
        for _ in range(60):
            row = {name: draw.randrange(len(values)) for name, values in factors.items()} | dict(
                target
            )
            if allowed({name: factors[name][i] for name, i in row.items()}):
                tries.append(row)
        if not tries:
            open_pairs.discard(target)  # the two exclude each other
            continue
        best = max(tries, key=lambda row: len(_pairs(row, names) & open_pairs))
        open_pairs -= _pairs(best, names)
        rows.append({name: factors[name][i] for name, i in best.items()})
    return rows


def lighten(rows: list[dict], name: str, value) -> list[dict]:
    """Give a factor its cheapest value wherever every pair stays covered without the other one."""
    rows = [dict(row) for row in rows]
    for row in rows:
        lost = [{name: row[name], other: row[other]} for other in row if other != name]
        if all(
            any(row is not candidate and pair.items() <= candidate.items() for candidate in rows)
            for pair in lost
        ):
            row[name] = value
    return rows


def few(rows: list[dict], times: int = 1, *, start: Sequence[dict] = ()) -> list[dict]:
    """Return few of the rows, found greedily. Each value of each factor comes so often in them.

    `start` is among them.
    """
    chosen = list(start)
    for repeat in range(times):
        unchosen_rows = [row for row in rows if row not in chosen]
        missing = set().union(*map(_values, unchosen_rows))
        if repeat == 0:
            missing = missing.difference(*map(_values, start))
        while missing:
            row = max(unchosen_rows, key=lambda row, missing=missing: len(missing & _values(row)))
            missing = missing - _values(row)
            chosen.append(row)
    return chosen


def _values(row: dict) -> set:
    return {(name, str(value)) for name, value in row.items()}


def _pairs(row: dict[str, int], names: list[str]) -> set:
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}
