"""Each mutant of a compiled program that computes something else is found: seeded mutants, judged
by interpretation.
"""

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


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_no_program_is_wrong_and_no_wrong_program_is_proved(seed, row, tmp_path):
    script = ROOT / "benchmarks" / "compiled_proof.py"
    path = tmp_path / "results.json"
    command = [
        sys.executable,
        str(script),
        "--only",
        row,
        "--mutants",
        "20",
        "--seed",
        str(seed),
        "--json",
        str(path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT / "benchmarks",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    result = json.loads(path.read_text())["results"]["cpu"]
    assert result["missed"] == result["not_found"] == [], done.stdout
    programs = result["programs"]
    assert programs["proved"] == sum(programs.values()) > 0, done.stdout
    assert sum(row.get("wrong", 0) for row in result["mutants"].values()) > 15, done.stdout
