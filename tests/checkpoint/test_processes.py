"""Two processes over gloo save and restore together, agree on what is wrong, and share checkpoints with one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint import worker

from shardopt.checkpoint import from_bytes, restore, save

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, what process 0 found, what process 1 found)."""
    folder = tmp_path_factory.mktemp("processes")
    opt = four_devices()
    state = worker.run(opt, opt.init(worker.make_params()), 0, 2)
    save(folder / "alone", state)
    return folder, *(json.loads(output) for output in two_processes(worker, folder))


def two_processes(module, folder):
    """Run a script as two processes that know each other, and return the last line that each says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", module.__file__]
    processes = [
        subprocess.Popen([*command, str(rank), str(port), str(folder)], env=env, text=True, stdout=-1, stderr=-1)
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output.strip().split("\n")[-1] for output, _ in outputs]


def four_devices():
    """The workers' mesh in this process."""
    import optax

    import shardopt as so

    mesh = so.make_mesh(data=4, devices=jax.devices()[:4])
    return so.fsdp(optax.adamw(1e-2), mesh, worker.loss_fn, min_shard_elements=1)


def test_one_process_goes_on_where_two_were_and_they_where_it_was(run, same):
    folder, _, _ = run
    opt = four_devices()
    found = restore(folder / "run", opt, step=7)
    expected = worker.run(opt, restore(folder / "alone", opt), 2, 7)
    assert same(from_bytes(opt, (folder / "blob").read_bytes()), found)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-7)


def test_each_process_holds_only_its_shards(run):
    assert [found["held"] for found in run[1:]] == [16 * 32 / 2, 16 * 32 / 2]


def test_both_processes_see_the_same(run):
    folder, first, second = run
    for found in (first, second):
        assert found["again"] == [True, {"position": 7}, [5, 6, 7]]
        assert found["moved"] is True
        assert found["blob"] is True
        assert found["left"] == [5, 6, 7]
    damaged = first["spoiled"].split("\n")
    assert damaged[0] == f"restore: step 2 in {folder}/spoiled is damaged."
    assert len(damaged) == 7
    assert all(": its bytes are not those that were written (SHA-256 " in line for line in damaged[1:-1])
    assert damaged[-1] == (
        "Fix: bring the files back from a copy, or go back to step 1, which is whole (pass step=1, or delete "
        f"{folder}/spoiled/2)."
    )
    for key in ("spoiled", "nowhere", "second writer"):
        assert first[key] == second[key]
        assert first[key] is not None


def test_a_failure_in_one_process_is_heard_in_both(run):
    folder, first, second = run
    where = f"Checkpoints: step 8 could not be written to {folder}/run"
    assert second["failed write"].startswith(f"{where} (OSError: [Errno 5] Input/output error).\n")
    assert first["failed write"].startswith(f"{where} (OSError: process 1 failed; its message has the reason).\n")
