"""Four processes with a device each, over gloo, run the pipeline that one process runs."""

import json

import jax
import numpy as np
import pytest
from processes import worker_hybrid as worker
from support.processes import run_processes

import shardopt as so

pytestmark = pytest.mark.slow  # four processes


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each process found, and where they saved."""
    folder = tmp_path_factory.mktemp("pipeline")
    return [json.loads(said.last) for said in run_processes(worker.__file__, 4, folder)], folder


@pytest.mark.parametrize("schedule", worker.SCHEDULES)
def test_four_processes_equal_one(schedule, told, x64):
    opt = worker.make_opt(schedule)
    state, losses = worker.run(opt, opt.init(worker.make_params()), 0, 4)
    for found in told[0]:
        np.testing.assert_allclose(found[schedule]["losses"], losses, rtol=1e-12)
        for leaf, other in zip(
            found[schedule]["params"], jax.tree.leaves(state.params), strict=True
        ):
            np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-12)
    restored = so.restore(told[1] / schedule, opt)
    again, _ = worker.run(opt, restored, 2, 4)
    for leaf, other in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-12)


def test_each_process_holds_its_stage_alone_and_goes_on_from_what_all_saved(told):
    kernels = 4 * 8 * 8
    for found in told[0]:
        assert [found[name]["held"] for name in worker.SCHEDULES] == [
            kernels // 2,
            kernels // 4,
            kernels // 2,
        ]
        assert all(one["again"] for one in found.values())
