"""The table of what to use says what the README says, whose table is checked against the
strategies.
"""

import re

import pytest
from support.paths import ROOT

import shardopt as so


def rows(path, column):
    """Return {name: cells} of the rows with a call in this column."""
    found = {}
    for line in (ROOT / path).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) <= column:
            continue
        if name := re.fullmatch(r"`(so\.\w+(?:\(stage=\d\))?)`", cells[column].split(",")[0]):
            found.setdefault(name[1], cells)
    return found


@pytest.mark.parametrize("name", ["so.ddp", "so.zero(stage=1)", "so.zero(stage=2)"])
def test_bytes_a_parameter_are_those_of_the_readme(name):
    assert rows("docs/choose.md", 2)[name][3] == rows("README.md", 0)[name][3]


def test_every_name_in_the_tables_exists():
    text = (ROOT / "docs" / "choose.md").read_text()
    names = re.findall(r"\bso\.([\w.]+)", text)
    assert len(names) > 20
    for name in names:
        thing = so
        for part in name.split("."):
            thing = getattr(thing, part)


def test_nothing_that_trains_is_left_out():
    text = (ROOT / "docs" / "choose.md").read_text()
    for name in (
        "ddp",
        "zero",
        "fsdp",
        "hybrid",
        "local_sgd",
        "diloco",
        "async_sgd",
        "parameter_server.async_local_sgd",
    ):
        assert f"`so.{name}" in text
