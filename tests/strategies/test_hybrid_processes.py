"""Four processes with a device each, over gloo, run the pipeline that one process runs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from strategies import worker_hybrid as worker

import shardopt as so


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each process found, and where they saved."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder = tmp_path_factory.mktemp("pipeline")
    environment = os.environ | {
        "PYTHONPATH": str(Path(so.__file__).parents[1]),
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-W", "error", worker.__file__]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([*command, str(rank), port, str(folder)], **pipes) for rank in range(4)]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, outputs
    return [json.loads(out.strip().split("\n")[-1]) for out, _ in outputs], folder


@pytest.mark.parametrize("schedule", worker.SCHEDULES)
def test_four_processes_equal_one(schedule, told, x64):
    opt = worker.make_opt(schedule)
    state, losses = worker.run(opt, opt.init(worker.make_params()), 0, 4)
    for found in told[0]:
        np.testing.assert_allclose(found[schedule]["losses"], losses, rtol=1e-12)
        for leaf, other in zip(found[schedule]["params"], jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-12)
    restored = so.restore(told[1] / schedule, opt)
    again, _ = worker.run(opt, restored, 2, 4)
    for leaf, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-12)


def test_each_process_holds_its_stage_alone_and_goes_on_from_what_all_saved(told):
    kernels = 4 * 8 * 8
    for found in told[0]:
        assert [found[name]["held"] for name in worker.SCHEDULES] == [kernels // 2, kernels // 4, kernels // 2]
        assert all(one["again"] for one in found.values())
