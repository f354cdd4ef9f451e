"""One of two processes with two devices each: `python worker_processes.py RANK PORT FOLDER`.

It prints its report as one JSON line. See test_processes.py.
"""

import datetime
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.checkpoint import _checkpoints as clocks
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core import NonFiniteLossError
from shardopt.training import EarlyStopping, evaluation, hyperparams
from shardopt.training._fit import fit

rank = int(sys.argv[1])
port = sys.argv[2]
folder = Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
so.initialize(f"127.0.0.1:{port}", 2, rank)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def batches(count, *, bad=None, stop=None):
    for step, rng in zip(range(count), map(np.random.default_rng, itertools.count()), strict=False):
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        x = rng.normal(size=(8, 4)).astype(np.float32)
        yield {"x": x, "y": np.full(8, np.nan, np.float32) if step == bad else x.sum(1)}


tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
opt = so.fsdp(tx, so.make_mesh(), loss_fn, min_shard_elements=1)
fixed = list(batches(2))
report = {}


def new_state():
    return opt.init(lambda key: {"w": jax.random.normal(key, 4) * 0}, jax.random.key(0))


def run(name, state, data, **options):
    logged = []
    options = {"num_steps": 30, "log_every": 5, "progress": True} | options
    result = fit(
        opt, state, so.GlobalRows(data), log=lambda step, metrics: logged.append(step), **options
    )
    report[name] = {
        "step": result.step,
        "stopped": result.stopped,
        "logged": logged,
        "history": result.history,
    }
    return result


gather = jax.jit(
    lambda x: x, out_shardings=jax.sharding.NamedSharding(opt.mesh, jax.sharding.PartitionSpec())
)
unbroken = run("whole", new_state(), batches(40), evaluate=evaluation(opt, so.GlobalRows(fixed)))
with Checkpoints(folder, every=10, keep=2) as checkpoints:
    run(
        "sigterm", new_state(), batches(40, stop=12 if rank == 1 else None), checkpoints=checkpoints
    )
with Checkpoints(folder, every=10, keep=2) as checkpoints:
    resumed = run("resumed", new_state(), batches(40), checkpoints=checkpoints)
report["resumed"]["same"] = bool(
    (gather(unbroken.state.params["w"]) == gather(resumed.state.params["w"])).all()
)
report["params"] = np.asarray(gather(resumed.state.params["w"])).tolist()
run(
    "early",
    new_state(),
    batches(40),
    evaluate=(lambda state: {"mine": 1.0 if rank == 1 else -float(state.step)}, 4),
    early_stopping=EarlyStopping("mine", patience=2),
)
run("exhausted", new_state(), batches(17))
try:
    run("nan", new_state(), batches(40, bad=8))
except NonFiniteLossError as error:
    report["nan"] = [error.step, error.position]
state = so.replace(new_state(), hyperparams={"learning_rate": 0.25})
report["hyperparams"] = hyperparams(run("changed", state, batches(40), num_steps=3).state)

state = resumed.state
numbers = np.arange(4, dtype=np.float64)
of_one, of_all = (
    so.replace(state, params={"w": w}).params["w"] for w in (numbers, jnp.asarray(numbers))
)
twice = so.replace(state, params={"w": jax.jit(lambda w: 2 * w)(of_one)}).params["w"]
report["replace"] = [np.asarray(gather(w)).tolist() for w in (of_one, of_all, twice)]
report["replace"].append(
    [str(w.sharding) == str(state.params["w"].sharding) for w in (of_one, of_all, twice)]
)

seconds = [0.0]
clocks._clock = lambda: seconds[0] * (1 if rank == 0 else 1000)  # only that of process 0 counts


def minutes(source):
    for batch in source:
        seconds[0] += 60
        yield batch


with Checkpoints(folder / "by_time", datetime.timedelta(minutes=10), keep=None) as checkpoints:
    run("by time", new_state(), minutes(batches(40)), checkpoints=checkpoints, log_every=4)
    report["by time"]["saved"] = checkpoints.steps()
print(json.dumps(report), flush=True)
