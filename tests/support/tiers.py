"""Tiers: a file marks itself with `pytestmark`, a test with a decorator, and a row of a table
through `tiered`.

`fast` is a mark for files that are pure Python or compile few programs. In such a file, `slow` and
`default` take a test out of the fast tier."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest


def has_fast(path: Path) -> bool:
    """Whether some test of a file may be of the fast tier."""
    text = path.read_text()
    return "mark.fast" in text or "fast=" in text


def is_slow(path: Path) -> bool:
    """Whether a file marks all its tests as slow."""
    return bool(
        re.search(r"^pytestmark = (\[\n    )?pytest\.mark\.slow\b", path.read_text(), re.MULTILINE)
    )


def tiered(
    table: Iterable,
    quick: Callable,
    *,
    fast: Callable = lambda row: False,
    ids: Callable | None = None,
) -> list:
    """Return the rows for `parametrize`. Rows that are not quick are slow; rows that are fast run
    with -m fast too.
    """
    marked = []
    for row in table:
        mark = [pytest.mark.fast] if fast(row) else [] if quick(row) else [pytest.mark.slow]
        values = row if type(row) is tuple else (row,)
        marked.append(pytest.param(*values, marks=mark, id=ids and ids(row)))
    return marked
