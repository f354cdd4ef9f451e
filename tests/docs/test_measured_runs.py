"""`benchmarks/measured_runs.py` without a compiler: the halves, and what is weak about a run."""

import json

import pytest
from support.scripts import imported

pytestmark = pytest.mark.fast


@pytest.fixture
def script():
    with imported("measured_runs") as module:
        yield module


def test_the_stored_halves_are_those_of_the_seed(script):
    stored = json.loads(script.RESULTS.read_text())["results"]
    rows = stored["runs"]
    runs = [{"id": int(key), "chip": row["chip"], "complete": True} for key, row in rows.items()]
    halves = {str(key): half for key, half in script.halves(runs, stored["seed"]).items()}
    assert halves == {key: row["half"] for key, row in rows.items()}
    other = script.halves(runs, stored["seed"] + 1)
    assert {str(key): half for key, half in other.items()} != halves


def test_each_generation_has_both_halves(script):
    runs = [{"id": number, "chip": "v6e", "complete": number != 3} for number in range(8)]
    halves = script.halves([*runs, {"id": 9, "chip": "H100", "complete": True}])
    assert sorted(halves) == [0, 1, 2, 4, 5, 6, 7]
    assert sorted(halves.values()) == ["fit"] * 3 + ["test"] * 4


def test_a_run_says_what_is_weak_about_its_seconds(script):
    run = {"step_seconds": {"kind": "stated"}, "conflicts": []}
    assert script.mark(run) == ""
    assert script.mark(run | {"step_seconds": {"kind": "derived"}}) == "derived"
    disputed = {"step_seconds": {"kind": "derived upper bound"}, "conflicts": ["two lines differ"]}
    assert script.mark(disputed) == "derived upper bound, disputed"
