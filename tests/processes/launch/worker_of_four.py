"""One of several processes that train: `python worker_of_four.py FOLDER STEPS`.

Process 0 leaves the parameters there.
"""

import sys
from pathlib import Path

import small_job

import shardopt as so

folder = Path(sys.argv[1])
steps = int(sys.argv[2])
small_job.begin()
opt, state = small_job.strategy_and_state()
batches = so.GlobalRows(map(small_job.batch_of, range(steps)))
with so.Checkpoints(folder / "checkpoints", every=20, keep=2) as checkpoints:
    result = so.fit(
        opt,
        state,
        batches,
        num_steps=steps,
        checkpoints=checkpoints,
        log_every=5,
    )
small_job.leave_params(folder, opt, result)
print(result.stopped, result.step)
