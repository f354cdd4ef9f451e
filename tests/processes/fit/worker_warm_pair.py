"""One of two processes: `python worker_warm_pair.py RANK PORT FOLDER` runs worker_warm's run, and
prints the programs that XLA compiled here.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import worker_warm

import shardopt as so

rank = int(sys.argv[1])
port = sys.argv[2]
folder = Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
so.initialize(f"127.0.0.1:{port}", 2, rank)
tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
with so.Checkpoints(folder / "run", every=2, keep=2) as checkpoints:
    opt = so.fsdp(tx, so.make_mesh(), worker_warm.loss_fn, min_shard_elements=1)
    state = so.training.DeferredInit(worker_warm.init, jax.random.key(0))
    first = checkpoints.latest() or 0
    x = np.random.default_rng(rank).normal(size=(8, 16)).astype(np.float32)  # rows of this process
    batch = {"x": x, "y": x[:, 0]}
    result = so.fit(
        opt, state, [batch] * 20, num_steps=first + 4, checkpoints=checkpoints, progress=False
    )
    state = result.state
    # values of the host are placed by each process
    state.opt_state.hyperparams["learning_rate"] = 0.01
    state, _ = opt.step(state._replace(step=11), batch)
    step = int(state.step)
    rate = so.training.hyperparams(state)["learning_rate"]
print(json.dumps({"compiled": worker_warm.COMPILED, "step": step, "rate": round(rate, 6)}))
