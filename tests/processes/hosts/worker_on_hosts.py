"""One process of a job on several hosts: `python worker_on_hosts.py FOLDER STEPS SECONDS`, with
`ADDRESS COUNT RANK` after it where no launcher states the place.

It trains for so many steps, and pauses for some seconds before each. Each process writes the step
that it has reached to `step-RANK` in the folder. Process 0 leaves the parameters of the end there.
"""

import socket
import sys
import time
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).parents[1] / "launch"))
import small_job  # pyright: ignore[reportMissingImports]

import shardopt as so

folder = Path(sys.argv[1])
steps = int(sys.argv[2])
pause = float(sys.argv[3])
(folder / f"begins-{socket.gethostname()}").touch()
if len(sys.argv) > 4:
    small_job.begin(sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
else:
    small_job.begin()
opt, state = small_job.strategy_and_state()
reached = folder / f"step-{jax.process_index()}"


def batches():
    for step in range(steps):
        reached.write_text(str(step))
        time.sleep(pause)
        yield small_job.batch_of(step)


with so.Checkpoints(folder / "checkpoints", every=10, keep=2) as checkpoints:
    result = so.fit(
        opt, state, so.GlobalRows(batches()), num_steps=steps, checkpoints=checkpoints, log_every=5
    )
small_job.leave_params(folder, opt, result)
