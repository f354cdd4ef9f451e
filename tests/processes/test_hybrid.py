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
def outcomes(tmp_path_factory):
    """Return the results of each process, and the folder with their checkpoint."""
    folder = tmp_path_factory.mktemp("pipeline")
    return [json.loads(said.last) for said in run_processes(worker.__file__, 4, folder)], folder


@pytest.mark.parametrize("schedule", worker.SCHEDULES)
def test_four_processes_equal_one(schedule, outcomes, x64):
    opt = worker.make_opt(schedule)
    state, losses = worker.run(opt, opt.init(worker.make_params()), 0, 4)
    for outcome in outcomes[0]:
        np.testing.assert_allclose(outcome[schedule]["losses"], losses, rtol=1e-12)
        for leaf, other in zip(
            outcome[schedule]["params"], jax.tree.leaves(state.params), strict=True
        ):
            np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-12)
    restored = so.restore(outcomes[1] / schedule, opt)
    resumed_state, _ = worker.run(opt, restored, 2, 4)
    for leaf, other in zip(
        jax.tree.leaves(resumed_state.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(leaf, other, rtol=1e-10, atol=1e-12)


def test_each_process_holds_its_stage_alone_and_goes_on_from_what_all_saved(outcomes):
    kernels = 4 * 8 * 8
    for outcome in outcomes[0]:
        assert [outcome[name]["held"] for name in worker.SCHEDULES] == [
            kernels // 2,
            kernels // 4,
            kernels // 2,
        ]
        assert all(schedule_outcome["again"] for schedule_outcome in outcome.values())
