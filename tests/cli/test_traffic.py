"""What `shardopt train` says that a pipeline sends, against the placement formula."""

import jax
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.cli.communication import measure

STAGES, MICRO, LAYERS, WIDTH, ROWS = 2, 4, 4, 64, 32


@pytest.mark.parametrize(
    ("placement", "apart", "times"),
    # fsdp gathers forward and backward and scatters, each micro-batch; a ring sends half of what an all-reduce does
    [("fsdp", False, 3 * MICRO / 2), ("zero1", False, 1), ("ddp", False, 1), ("fsdp", True, 3 * MICRO / 2)],
)
def test_a_pipeline_sends_what_its_schedule_runs(placement, apart, times):
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x: x + jax.numpy.tanh(x @ w["kernel"]),
        loss=lambda outer, x, batch: ((x - batch) ** 2).mean(),
    )
    mesh = so.make_mesh(replica=2 if apart else 1, data=2 if apart else 4, pipeline=STAGES)
    how = {"schedule": so.schedules.eager_one_f_one_b, "micro_batches": MICRO, "placement": placement}
    opt = so.hybrid(optax.sgd(0.1), mesh, model, **how)
    if apart:
        opt = so.local_sgd(opt, sync_every=4)
    state = opt.init({"blocks": {"kernel": np.full((LAYERS, WIDTH, WIDTH), 1e-2, np.float32)}})
    found = measure(opt, state, np.ones((ROWS, WIDTH), np.float32))

    held, data = LAYERS / STAGES * WIDTH * WIDTH * 4, mesh.shape["data"]
    expected = 2 * (data - 1) / data * held * times
    if apart:  # and once in four steps the average of two replicas, of shards
        expected += 2 * (1 / 2) * held / data / 4
    assert found.sent == pytest.approx(expected, rel=0.01)
    size = mesh.size // STAGES
    assert found.ddp == pytest.approx(2 * (size - 1) / size * held)
