"""A loss that is not finite ends a run, unless the optimizer skips the step."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.core import NonFiniteLossError
from shardopt.training._fit import fit


def spiked(batches, position):
    return [
        {**batch, "y": batch["y"] * np.nan} if i == position else batch
        for i, batch in enumerate(batches)
    ]


def test_a_nonfinite_loss_ends_the_run(opt, new_state, batches, memory):
    with pytest.raises(NonFiniteLossError, match="the loss became nan at step 7"):
        fit(
            opt,
            new_state(),
            spiked(batches, 7),
            num_steps=12,
            checkpoints=memory(5),
            progress=False,
        )


def test_a_nonfinite_loss_of_a_step_that_the_optimizer_skips_does_not_end_the_run(
    batches, mesh_of, loss_fn
):
    for tx in (
        optax.apply_if_finite(optax.sgd(0.1), 2),
        so.transforms.skip_anomalies(optax.sgd(0.1)),
    ):
        opt = so.ddp(optax.chain(tx), mesh_of(data=2), loss_fn)
        state = opt.init({"w": jnp.zeros(4), "b": jnp.zeros(())})
        data = spiked(batches, 3)
        assert fit(opt, state, data, num_steps=6, progress=False).stopped == "completed"
