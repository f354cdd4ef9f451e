"""Tiers: rooms and files that are fast, being pure Python or few compiled programs; and rows of a table that are slow.

Single tests elsewhere are marked with `pytest.mark.fast`. What is marked slow is never fast.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOMS = ["audit", "collectives", "data", "mesh", "partition"]
FILES = {
    "": ["tiers"],
    "checkpoint": ["record", "run_folder", "tree"],
    "cli": ["options", "plan"],
    "docs": ["commands"],
    "fuzz": ["mesh_strings", "rules"],
    "local_updates": ["refusals"],
    "parameter_server": ["clock", "ray_refusals", "rules", "server", "simulation", "views"],
    "pipeline": [
        "ahead",
        "check",
        "construct",
        "cut",
        "papers",
        "plot",
        "schedule",
        "schedules",
        "search",
        "ticks",
        "timing",
    ],
    "planning": ["aot", "compiled_time", "layout", "search"],
    "reducers": ["refusals"],
    "runtime": ["files", "lock"],
    "strategies": ["hybrid_refusals", "refusals"],
    "training": ["arguments", "early_stopping", "loggers"],
    "transforms": ["refusals"],
}
PATHS = [TESTS / room for room in ROOMS]
PATHS += [TESTS / room / f"test_{name}.py" for room, names in FILES.items() for name in names]
LONG = {
    TESTS / "data" / "test_packing.py": ["test_an_iterator_goes_on_from_any_state_and_packing_twice_is_the_same"],
    TESTS / "pipeline" / "test_papers.py": ["test_searched_schedules_have_the_bubbles_of_table_5[16-128-11.325]"],
    TESTS / "planning" / "test_search.py": ["test_the_fastest_recomputes_least_of_what_fits"],
}
"""Tests of fast files that take over three seconds; fast tests reach the same code."""


def is_fast(path: Path, name: str = "") -> bool:
    """Whether a whole file is of the fast tier, and the test of that name as part of it."""
    return name not in LONG.get(path, []) and any(path == one or one in path.parents for one in PATHS)


def has_fast(path: Path) -> bool:
    """Whether some test of a file may be of the fast tier."""
    text = path.read_text()
    return is_fast(path) or "mark.fast" in text or "fast=" in text


def tiered(
    table: Iterable, quick: Callable, *, fast: Callable = lambda row: False, ids: Callable | None = None
) -> list:
    """Return the rows for `parametrize`: those that are not quick are slow, those that are fast run with -m fast too."""
    marked = []
    for row in table:
        mark = [pytest.mark.fast] if fast(row) else [] if quick(row) else [pytest.mark.slow]
        values = row if type(row) is tuple else (row,)
        marked.append(pytest.param(*values, marks=mark, id=ids and ids(row)))
    return marked
