"""A run that starts again in its folder compiles nothing: XLA's compiler is counted."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.flags import QUICK_TO_COMPILE
from support.paths import ROOT
from support.processes import run_processes

WORKER = Path(__file__).with_name("worker_warm.py")
ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def run(kind, folder, num_devices=8, *, script=WORKER, **variables):
    """Return the facts that the worker printed, after it ended without a warning."""
    flags = list(QUICK_TO_COMPILE)
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append(ORDER)
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-W", "error", str(script), kind, str(folder), str(num_devices)]
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "kind",
    [
        "proved",
        pytest.param("by hand", marks=pytest.mark.slow),
        pytest.param("diloco", marks=pytest.mark.slow),
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("verified", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_is_started_again_compiles_nothing(tmp_path, kind):
    first = run(kind, tmp_path, PYTHONHASHSEED="1")
    second = run(kind, tmp_path, PYTHONHASHSEED="2")
    assert "jit_step" in first["compiled"]
    assert (second["step"], second["compiled"]) == (8, [])
    assert second["report"] == first["report"]


@pytest.mark.slow
def test_a_run_that_was_moved_with_its_script_compiles_nothing(tmp_path):
    scripts = [tmp_path / name / "job.py" for name in ("here", "there/and/back")]
    for script in scripts:
        script.parent.mkdir(parents=True)
        shutil.copyfile(WORKER, script)
    run("proved", tmp_path / "run", script=scripts[0])
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run("proved", tmp_path / "moved", script=scripts[1])["compiled"] == []


@pytest.mark.slow
def test_an_elastic_restart_on_a_mesh_that_was_there_before_compiles_nothing(tmp_path):
    assert "jit_step" in run("proved", tmp_path, 8)["compiled"]
    assert "jit_step" in run("proved", tmp_path, 4)["compiled"]
    assert run("proved", tmp_path, 8)["compiled"] == []
    assert run("proved", tmp_path, 4)["compiled"] == []


@pytest.mark.slow
def test_a_folder_of_the_user_is_used_also_for_programs_of_less_than_a_second(tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    assert "jit_step" in run("proved", tmp_path / "a", **cache)["compiled"]
    assert run("proved", tmp_path / "b", **cache)["compiled"] == []
    assert not (tmp_path / "a" / "compiled").exists()


@pytest.mark.slow
def test_without_the_cache_each_start_compiles(tmp_path):
    off = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    first = run("proved", tmp_path, **off)
    second = run("proved", tmp_path, **off)
    assert "jit_step" in first["compiled"]
    assert "jit_step" in second["compiled"]


@pytest.mark.slow
def test_two_processes_compile_nothing_when_they_start_again(tmp_path):
    worker = WORKER.with_name("worker_warm_pair.py")
    first = [json.loads(said.last) for said in run_processes(worker, 2, tmp_path, timeout=600)]
    second = [json.loads(said.last) for said in run_processes(worker, 2, tmp_path, timeout=600)]
    assert all("jit_step" in facts["compiled"] for facts in first)
    assert [facts["compiled"] for facts in second] == [[], []]
    assert [(facts["step"], facts["rate"]) for facts in first + second] == [(12, 0.01)] * 4
