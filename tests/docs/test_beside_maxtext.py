"""`benchmarks/beside_maxtext.py` without a compiler: rows, what is compared with what, the table and the picture."""

import json
import sys

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.fast


@pytest.fixture
def script(monkeypatch):
    """Import the script, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__("beside_maxtext")
    for name in ("common", "beside_maxtext"):
        del sys.modules[name]


def program(seconds, gigabytes):
    memory = {"arguments": 1e9, "outputs": 2e9, "temporary": (gigabytes - 1) * 1e9, "aliased": 2e9}
    return {"seconds": seconds, "compute": 0.9 * seconds, "exposed": 0.1 * seconds, "memory": memory}


def test_rows_have_names_of_their_own(script):
    rows = (*script.TABLE, *script.MORE)
    assert len({row.name for row in rows}) == len(rows)
    assert script.TABLE[-1].name == "llama3-8b v5p:4x4x4 4096 x 1 tensor=4"
    assert script.TABLE[-1].chips == 64
    assert "sparse_core" in script.TABLE[-1].flags
    assert "sparse_core" not in script.Row("v5e:16x16", 2048, 1).flags


def test_both_are_told_the_same_of_vmem(script):
    from shardopt.config import _compiler_options as compiler_options

    assert script.VMEM_KIB == compiler_options._VMEM_KIB


def test_the_claim_is_one_over_the_other(script):
    found = {"shardopt": program(0.9, 6) | {"commit": "abc1234"}, "maxtext": program(1.0, 5)}
    assert script.compared(found) == pytest.approx({"ratio": 0.9, "memory_ratio": 6 / 5})
    assert script.compared({"shardopt": program(1, 1), "maxtext": {"error": "does not fit"}}) == {}
    line = script.table({"a": found | script.compared(found)}).splitlines()[-1]
    assert line == "| a | 900 (90), 6.0 | 1000 (100), 5.0 | 0.900 | 1.200 | abc1234 |"


def test_the_picture_is_drawn_from_what_is_there(script, tmp_path):
    found = {"shardopt": program(0.9, 6), "maxtext": program(1.0, 5)}
    script.draw({"a row": found | script.compared(found), "not yet": {}}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_says_which_commit_compiled_it(script):
    assert script.commit().removesuffix(", changed").isalnum()


def test_what_is_published_is_what_was_compiled(script):
    """The table of docs/notes/maxtext.md is that of the JSON."""
    results = json.loads(script.RESULTS.read_text())["results"]
    text = (ROOT / "docs" / "notes" / "maxtext.md").read_text()
    for line in script.table(results).splitlines():
        assert line in text


def test_each_row_of_the_table_is_ahead_by_a_twentieth_in_no_more_memory(script):
    results = json.loads(script.RESULTS.read_text())["results"]
    for row in script.TABLE:
        assert results[row.name]["ratio"] <= 0.95, row.name
        assert results[row.name]["memory_ratio"] <= 1, row.name
