"""`benchmarks/measure_beside_maxtext.py` without chips and without MaxText."""

import subprocess
import sys

import pytest
from support.paths import ROOT
from support.scripts import imported


@pytest.fixture
def script():
    with imported("measure_beside_maxtext") as module:
        yield module


@pytest.mark.fast
def test_a_row_is_read_from_the_words_that_it_is_passed_on_in(script):
    row = script.row_of("v6e:2x4 2048 1")
    assert (row.chips, row.length, row.rows, row.model) == (8, 2048, 1, "llama3-8b")
    assert script.row_of(" ".join(script.row_words(row))) == row


@pytest.mark.fast
def test_steps_before_the_warm_ones_are_over_do_not_count(script):
    assert script.seconds_of([0.0, 50.0, 60.0, 61.0, 63.0], warm=3) == [1.0, 2.0]


@pytest.mark.slow  # it compiles a step of a decoder in a process of its own
def test_each_step_of_shardopt_is_reported_and_learns(script, tmp_path):
    done = script.run("shardopt", script.row_of("cpu:8 128 1"), sys.executable, 6, tmp_path)
    assert len(done["times"]) == 6
    assert done["times"] == sorted(done["times"])
    assert float(done["last"].split()[-1]) < 6.3  # log(512) is 6.24


@pytest.mark.fast
def test_a_side_that_fails_ends_the_run_with_its_last_lines(script, tmp_path):
    with pytest.raises(SystemExit, match=r"maxtext ended with code 1 after 0 steps:[^$]*No module"):
        script.run("maxtext", script.row_of("cpu:8 128 1"), sys.executable, 6, tmp_path)


@pytest.mark.fast
def test_steps_that_all_are_warm_are_refused():
    path = ROOT / "benchmarks" / "measure_beside_maxtext.py"
    command = [sys.executable, path, "--maxtext", sys.executable, "--steps", "5", "--warm", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--warm 5 must be at least 1 and less than --steps 5" in done.stderr
