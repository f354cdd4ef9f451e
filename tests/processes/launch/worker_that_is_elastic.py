"""One of several processes that train: `python worker_that_is_elastic.py FOLDER STEPS EVERY
MEMORY_EVERY TENSOR DRAWS`.

DRAWS says who draws a batch of 16 examples. With "each", each process draws all of it, from grain;
with "shared", each draws its rows. With "parts", there are as many parts as processes, and each
draws the rows of one part. Each process holds 4 rows for a pass at most: with fewer processes there
are more micro-batches. The parameters "seen" lose 1 for each time that an example was trained on.
Process 0 notes the attempt, the number of processes and the step."""

import os
import sys
import time
from pathlib import Path

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_job

import shardopt as so

folder, steps, every, memory_every, tensor = Path(sys.argv[1]), *map(int, sys.argv[2:6])
EXAMPLES = 16 * steps
ROWS = 16
SEED = 3
small_job.begin()


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"][:, :8] @ params["up"])
    error = jnp.mean((hidden @ params["down"] - batch["x"][:, 8]) ** 2)
    return error + jnp.mean(params["seen"][batch["number"]])


def example(number):
    return {
        "x": np.random.default_rng(number).normal(size=9).astype(np.float32),
        "number": np.int32(number),
    }


mesh = so.make_mesh(tensor=tensor)
shuffled = grain.MapDataset.range(EXAMPLES).shuffle(seed=SEED).map(example)
if sys.argv[6] == "each":
    batches = so.GlobalRows(shuffled.to_iter_dataset().batch(ROWS))
else:
    count = jax.process_count()
    rank = jax.process_index()
    rows = jax.NamedSharding(mesh, jax.P("data"))

    def to_global(batch):
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)

    rows_of_part = EXAMPLES // count
    part = slice(rank * rows_of_part, (rank + 1) * rows_of_part)
    own_rows = shuffled[rank::count] if sys.argv[6] == "shared" else shuffled[part]
    batches = own_rows.to_iter_dataset().batch(ROWS // count).map(to_global)

tx = optax.multi_transform(
    {"adam": optax.adam(0.01), "count": optax.sgd(float(ROWS))},
    {"up": "adam", "down": "adam", "seen": "count"},
)
opt = so.fsdp(
    tx,
    mesh,
    loss_fn,
    min_shard_elements=1,
    micro_batches=max(1, 4 // mesh.shape["data"]),
    rules=[("up", jax.P(None, "tensor"))] if tensor > 1 else (),
)
params = {
    "up": np.eye(8, 32, dtype=np.float32),
    "down": np.ones(32, np.float32),
    "seen": np.zeros(EXAMPLES, np.float32),
}


def note(step, metrics):
    with (folder / "steps").open("a") as file:
        file.write(f"{os.environ.get('SHARDOPT_RESTART', 0)} {jax.process_count()} {step}\n")
    time.sleep(0.05)


run_folder = so.Checkpoints(
    folder / "checkpoints", every=every, keep=2, memory_every=memory_every or None
)
with run_folder as checkpoints:
    result = so.fit(
        opt,
        opt.init(params),
        batches,
        num_steps=steps,
        checkpoints=checkpoints,
        log=note,
        log_every=1,
        progress=False,
    )
if not result.exit_code:
    small_job.leave_params(folder, opt, result)
sys.exit(result.exit_code)
