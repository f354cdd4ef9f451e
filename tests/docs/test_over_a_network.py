"""The page on networks has the numbers of its three results files."""

import importlib
import json
import sys

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "over_a_network.md").read_text()


@pytest.fixture
def script(request, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module(request.param)
    for name in ("common", "over_network_methods", request.param):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "script", ["faults_on_hosts", "ray_on_hosts", "over_network"], indirect=True
)
def test_the_page_has_the_tables_of_the_results(script):
    rows = json.loads(script.RESULTS.read_text())["results"]["rows"]
    assert script.table(rows) in PAGE


@pytest.mark.parametrize("script", ["over_network"], indirect=True)
def test_the_planned_seconds_of_ddp_are_within_15_percent_at_other_bandwidths(script):
    planned = json.loads(script.RESULTS.read_text())["results"]["planned"]
    assert script.planned_table(planned) in PAGE
    assert len(planned) == 3
    assert all(abs(row["planned"] / row["measured"] - 1) < 0.15 for row in planned)


@pytest.mark.parametrize("script", ["faults_on_hosts"], indirect=True)
def test_no_seeded_run_had_an_outcome_that_is_a_fault(script):
    rows = json.loads(script.RESULTS.read_text())["results"]["rows"]
    assert {row["outcome"] for row in rows} == {"right", "stopped"}
    assert all(row["message"] for row in rows if row["outcome"] == "stopped")


@pytest.mark.parametrize("script", ["ray_on_hosts"], indirect=True)
def test_each_run_on_ray_made_all_updates_once_and_is_replayed(script):
    for row in json.loads(script.RESULTS.read_text())["results"]["rows"]:
        assert (row["outcome"], row["updates"], row["each_once"]) == ("right", 300, True)
        assert row["replay_same_bits"]
