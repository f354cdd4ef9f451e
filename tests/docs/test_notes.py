"""The notes have the dates and versions of the results files, and scripts print the tables that the
notes show.
"""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
from support.paths import ROOT

NOTES = sorted((ROOT / "docs" / "notes").glob("*.md"))
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = ["any_loss", "data_position", "muon_under_fsdp", "one_program_pipeline", "one_reduction"]


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_a_note_has_the_date_and_the_versions_of_each_results_file():
    rows = [
        row
        for note in NOTES
        for row in re.findall(r"^\| `([\w.]+)\.json` \| (.*) \|$", note.read_text(), re.MULTILINE)
    ]
    assert len(rows) > 20
    for name, row in rows:
        record = stored(name)
        date, commit, versions = row.split(" | ")
        assert date == record["date"], name
        assert re.fullmatch(r"[0-9a-f]{7}", commit), name
        assert (
            versions == f"jax {record['versions']['jax']}, Python {record['versions']['python']}"
        ), name


@pytest.mark.parametrize(
    "name", ["maxtext", "experts", "long_rows", "predictions", "tpu_compiler", "pipelines"]
)
def test_a_note_with_compiled_tables_names_the_libtpu(name):
    text = " ".join((ROOT / "docs" / "notes" / f"{name}.md").read_text().split())
    assert re.search(
        r"libtpu (0\.0\.\d+|of jax)|its libtpu; other tables of that week have 0\.0\.\d+", text
    )


def test_planning_says_which_libtpu_the_extra_installs():
    (pin,) = {
        match[1]
        for line in importlib.metadata.requires("jax") or ()
        if (match := re.match(r"libtpu==([\d.]+)\.\*;", line))
    }
    text = " ".join((ROOT / "docs" / "planning.md").read_text().split())
    assert re.search(
        rf"{re.escape(pin)}(\.\d+)? with (jax )?{re.escape(importlib.metadata.version('jax'))}",
        text,
    )


GUIDES = ["benchmarks", "blocks", "data_parallel", "experts", "failures", "losses", "planning"]
MOSTLY_CODE = ["any_loss", "losses_across_rows"]


@pytest.mark.parametrize("name", GUIDES + MOSTLY_CODE)
def test_a_guide_takes_five_minutes(name):
    words = (ROOT / "docs" / f"{name}.md").read_text().split()
    assert len(words) <= (1200 if name in MOSTLY_CODE else 1050)


@pytest.fixture
def load(monkeypatch):
    """Import a script of benchmarks/, and forget it afterwards."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which the scripts change
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in ("common", *SCRIPTS):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_note_has_the_table_of_its_script(name, load):
    text = (ROOT / "docs" / "notes" / f"{name}.md").read_text()
    assert load(name).table(stored(name)["results"]) in text
    assert f"python benchmarks/{name}.py" in text


def check_any_loss(results):
    assert all(row["shardopt"] < 1e-3 for row in results.values())
    assert (
        min(row["mean of devices"] for name, row in results.items() if name != "mean_over_rows")
        > 0.1
    )


def check_data_position(results):
    assert [row["processes"] for row in results["runs"]] == [4, 2, 3]
    assert results["same as one run"]
    assert results["twice"] == 0


def check_muon_under_fsdp(results):
    increases = {name: row["more"] for name, row in results.items()}
    assert (
        increases["experts, so.fsdp, matrices"]
        < increases["experts, marin's layout with data=1, update alone"] / 6
    )
    for name in ("stacked blocks", "separate matrices"):
        row = results[f"{name}, so.fsdp, matrices"]
        assert row["muon"] < 1.15 * row["adam"]


def check_one_program_pipeline(results):
    for name, row in results.items():
        growth = row["32"] / row["8"]
        assert (growth < 1.01) is ("one_f_one_b" in name), name


def check_one_reduction(results):
    times = {name: round(row["reductions"], 1) for name, row in results.items()}
    assert times["jit, scan over micro-batches"] == times["jit, optax.MultiSteps"] == 16
    assert (times["so.ddp"], times["so.zero(stage=1)"], times["so.fsdp"]) == (2, 1, 8)


CHECKS = {name: globals()[f"check_{name}"] for name in SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_stored_results_are_what_a_note_claims(name):
    CHECKS[name](stored(name)["results"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_finds_the_same_again(name):
    code = f"import json, {name} as script; print('RESULTS', json.dumps(script.run()))"
    # the script chooses the number of its devices, as it does for a user
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=ROOT / "benchmarks",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    CHECKS[name](json.loads(done.stdout.rpartition("RESULTS ")[2]))
