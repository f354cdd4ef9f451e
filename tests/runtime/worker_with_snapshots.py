"""One of several processes that train: `python worker_with_snapshots.py FOLDER STEPS MEMORY_EVERY EVERY PAUSE`.

Each step takes PAUSE seconds at least. The steps that process 0 draws are noted, with the time; the parameters are left in the
folder.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

folder, steps, memory_every, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
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


def note(step, metrics):
    with (folder / "steps").open("a") as file:
        file.write(f"{step} {time.time()}\n")
    time.sleep(float(sys.argv[5]))  # not where batches are drawn: a restart draws them all


where = so.Checkpoints(folder / "checkpoints", every=every, keep=2, memory_every=memory_every or None)
with where as checkpoints:
    result = so.fit(
        opt,
        state,
        batches(),
        num_steps=steps,
        checkpoints=checkpoints,
        log=note,
        log_every=1,
        agree_every=5,
        progress=False,
    )
params = jax.jit(lambda params: params, out_shardings=jax.NamedSharding(opt.mesh, jax.P()))(result.state.params)
if jax.process_index() == 0 and result.stopped == "completed":
    np.savez(folder / "params.npz", **{name: np.asarray(leaf.addressable_data(0)) for name, leaf in params.items()})
print(result.goodput)
