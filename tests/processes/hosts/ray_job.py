"""The driver of asynchronous training on a Ray of several hosts: `python ray_job.py ADDRESS FOLDER
UPDATES`.

It goes on from the checkpoints in the folder. It leaves the result there as `result.json`, or the
error as `error.json`.
"""

import json
import socket
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np
import optax
import ray

import shardopt as so

ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
address, folder, updates = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
params = {"weight": np.ones((8, 4), np.float32)}


def loss_fn(params, batch):
    return ((batch["x"] @ params["weight"] - batch["y"]) ** 2).mean()


def plain_batches(worker):
    draw = np.random.default_rng(worker)
    while True:
        yield {
            "x": draw.normal(size=(8, 8)).astype(np.float32),
            "y": draw.normal(size=(8, 4)).astype(np.float32),
        }


def batches_of(worker):
    Path(folder, f"worker-{worker}").write_text(socket.gethostname())
    for batch in plain_batches(worker):
        time.sleep(0.1)
        yield batch


def evaluate(params):
    Path(folder, "version").write_text(str(time.time()))
    return {}


options = {"max_staleness": 4, "backend": "ray", "max_restarts": 2, "hang_timeout": 60.0}
opt = so.async_sgd(optax.sgd(0.02, momentum=0.9), loss_fn, workers=2, address=address, **options)
try:
    with so.Checkpoints(folder / "run", every=10, keep=2) as checkpoints:
        result = opt.run(
            params,
            batches_of,
            num_updates=updates,
            checkpoints=checkpoints,
            evaluate=evaluate,
            evaluate_every=5,
            log_path=folder / "log.jsonl",
        )
except Exception as error:
    notes = traceback.format_exc()[-1500:]
    text = json.dumps({"error": f"{type(error).__name__}: {error}", "trace": notes})
    (folder / "error.json").write_text(text)
    raise
log = so.parameter_server.Log.load(folder / "log.jsonl")
again = opt.replay(log, params, plain_batches)
same = all(
    np.array_equal(one, other)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(result.params), strict=True)
)
# After a resume the log goes on from its checkpoint, so it holds each push that was applied.
pushes = [(event.worker, event.version) for event in log if event.kind == "push"]
versions = [version for _, version in pushes]
metrics = result.metrics
(folder / "result.json").write_text(
    json.dumps(
        {
            "stopped": metrics["stopped"],
            "updates": metrics["updates"],
            "pushes": metrics["pushes"],
            "pushes_in_log": len(pushes),
            "each_once": versions == list(range(1, len(pushes) + 1)),
            "killed": metrics["killed"],
            "hung": metrics["hung"],
            "lost_updates": metrics["lost_updates"],
            "resumed_from": metrics.get("resumed_from"),
            "resumes": [event.kind for event in log].count("resume"),
            "joins": [event.kind for event in log].count("join"),
            "replay_same_bits": same,
        }
    )
)
