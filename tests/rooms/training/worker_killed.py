"""A run of 150 steps that somebody kills: `python worker_killed.py FOLDER`.

See test_fit_checkpoints.py.
"""

import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import grain
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.training import jsonl
from shardopt.training._fit import fit

folder = Path(sys.argv[1])
rows = np.random.default_rng(0).normal(size=(640, 5)).astype(np.float32)
data = grain.MapDataset.source(rows).shuffle(seed=1).repeat().batch(8).to_iter_dataset()


def loss_fn(params, batch):
    hidden = jnp.tanh(batch[:, :4] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch[:, 4]) ** 2)


opt = so.fsdp(optax.adam(0.01), so.make_mesh(), loss_fn, min_shard_elements=1)
state = opt.init({"up": np.eye(4, 16, dtype=np.float32), "down": np.ones(16, np.float32)})


def slowly(step, metrics):
    """Tell the parent where we are, and give it time."""
    print(step, file=sys.stderr, flush=True)
    time.sleep(0.02)


with Checkpoints(folder / "checkpoints", every=3, keep=2) as checkpoints:
    log = [jsonl(folder / "log.jsonl"), slowly]
    result = fit(
        opt,
        state,
        data,
        num_steps=150,
        checkpoints=checkpoints,
        log=log,
        log_every=1,
        progress=False,
    )
np.savez(
    folder / "params.npz",
    **{name: np.asarray(value) for name, value in result.state.params.items()},
)
