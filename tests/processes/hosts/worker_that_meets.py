"""One process of a job on several hosts: `python worker_that_meets.py FOLDER`.

It adds the numbers of all processes over the network. Then it waits, until the folder has a file
`end`.
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
numbers = multihost_utils.process_allgather(np.asarray([jax.process_index()]))
text = f"{numbers.ravel().tolist()} place {place}"
(folder / f"met-{jax.process_index()}").write_text(text)
while not (folder / "end").exists():
    time.sleep(0.05)
