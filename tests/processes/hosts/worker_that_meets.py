"""One process of a job on several hosts: `python worker_that_meets.py FOLDER`.

It gathers the numbers of all processes over the network, and does so again when the folder has a file
`again`. It writes them to `first-RANK` and `second-RANK`. At last it asks for checkpoints in a
folder of its own, and writes the refusal to `refused-RANK`.
"""

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import shardopt as so

folder = Path(sys.argv[1])
place = os.environ["SHARDOPT_PLACE"]
jax.config.update("jax_num_cpu_devices", 1)
so.initialize()
rank = jax.process_index()


def meet(name):
    numbers = multihost_utils.process_allgather(np.asarray([rank]))
    (folder / f"{name}-{rank}").write_text(f"{numbers.ravel().tolist()} place {place}")


meet("first")
while not (folder / "again").exists():
    time.sleep(0.05)
meet("second")
try:
    so.Checkpoints(folder / f"own-{rank}", every=1, keep=1)
except so.errors.CheckpointError as error:
    (folder / f"refused-{rank}").write_text(str(error))
