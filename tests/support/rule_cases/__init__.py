"""Random cases of each rule of the proof: primitive -> functions that draw a `RuleCase`.

`CASES` has a row for each primitive that the proof has a rule for. A file of this folder has the
cases of one file of `shardopt/separability`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from support.relation_meaning import RuleCase
from support.rule_cases import (
    calls,
    draws,
    elementwise,
    lookups,
    loops,
    moves,
    reductions,
    single_rows,
)

Draw = Callable[[np.random.Generator], RuleCase]


def _merged(*tables: Mapping[str, Sequence[Draw]]) -> dict[str, list[Draw]]:
    names = sorted({name for table in tables for name in table})
    return {name: [draw for table in tables for draw in table.get(name, ())] for name in names}


CASES: dict[str, list[Draw]] = _merged(
    calls.CASES,
    draws.CASES,
    elementwise.CASES,
    loops.CASES,
    lookups.CASES,
    moves.CASES,
    reductions.CASES,
    single_rows.CASES,
)
