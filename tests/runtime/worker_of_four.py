"""One of several processes that train: `python worker_of_four.py FOLDER STEPS`. Process 0 leaves the parameters there."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 1)
so.initialize()


def loss_fn(params, batch):
    hidden = jnp.tanh(batch[:, :8] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch[:, 8]) ** 2)


def batches():
    for step in range(steps):
        yield np.random.default_rng(step).normal(size=(16, 9)).astype(np.float32)


opt = so.fsdp(optax.adam(0.01), so.make_mesh(), loss_fn, min_shard_elements=1)
state = opt.init({"up": np.eye(8, 32, dtype=np.float32), "down": np.ones(32, np.float32)})
with so.Checkpoints(folder / "checkpoints", every=20, keep=2) as checkpoints:
    result = so.fit(opt, state, batches(), num_steps=steps, checkpoints=checkpoints, log_every=5, agree_every=5)
params = jax.jit(lambda params: params, out_shardings=jax.NamedSharding(opt.mesh, jax.P()))(result.state.params)
if jax.process_index() == 0 and result.stopped == "completed":
    np.savez(folder / "params.npz", **{name: np.asarray(leaf.addressable_data(0)) for name, leaf in params.items()})
print(result.stopped, result.step)
