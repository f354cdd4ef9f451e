"""One of several processes that train: `python worker_with_snapshots.py FOLDER STEPS MEMORY_EVERY
EVERY PAUSE`.

Each step takes PAUSE seconds at least. The steps that process 0 draws are noted, with the time; the
parameters are left in the folder."""

import sys
import time
from pathlib import Path

import small_job

import shardopt as so

folder = Path(sys.argv[1])
steps = int(sys.argv[2])
memory_every = int(sys.argv[3])
every = int(sys.argv[4])
small_job.begin()
opt, params = small_job.strategy_and_params()
state = so.training.DeferredInit(params) if memory_every else opt.init(params)


def note(step, metrics):
    with (folder / "steps").open("a") as file:
        file.write(f"{step} {time.time()}\n")
    time.sleep(float(sys.argv[5]))  # not where batches are drawn: a restart draws them all


run_folder = so.Checkpoints(
    folder / "checkpoints", every=every, keep=2, memory_every=memory_every or None
)
with run_folder as checkpoints:
    result = so.fit(
        opt,
        state,
        so.GlobalRows(map(small_job.batch_of, range(steps))),
        num_steps=steps,
        checkpoints=checkpoints,
        log=note,
        log_every=1,
        progress=False,
    )
small_job.leave_params(folder, opt, result)
print(result.goodput)
