"""No mutant of a compiled program that computes something else is proved: seeded mutants, judged by interpretation."""

import json
import os
import subprocess
import sys

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow

ROWS = (
    "ddp, adamw, micro_batches=2, data=4 tensor=2",
    "zero1, adamw, micro_batches=2, data=8",
    "fsdp, adamw, micro_batches=1, data=8",
)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_program_is_wrong_and_no_wrong_program_is_proved(row, seed, tmp_path):
    script, path = ROOT / "benchmarks" / "compiled_proof.py", tmp_path / "results.json"
    command = [sys.executable, str(script), "--only", row, "--mutants", "20", "--seed", str(seed), "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT / "benchmarks", env=environment, capture_output=True, text=True, check=False
    )
    result = json.loads(path.read_text())["results"]["cpu"]
    assert result["missed"] == [], done.stdout
    assert result["programs"]["wrong"] == result["programs"]["errors"] == 0, done.stdout
    counts = [sum(row.get(verdict, 0) for row in result["mutants"].values()) for verdict in ("wrong", "unknown")]
    assert sum(counts) > 15, done.stdout
    assert counts[0] > 0.5 * sum(counts), done.stdout
