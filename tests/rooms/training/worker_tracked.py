"""A run of six steps with a real tracker: `python worker_tracked.py TRACKER FOLDER [STEP]`.

It kills itself at step STEP.
"""

import os
import signal
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import optax

import shardopt as so

name, folder = sys.argv[1], Path(sys.argv[2])
last_step = int(sys.argv[3]) if len(sys.argv) > 3 else None
options = {"wandb": {"mode": "offline", "dir": str(folder)}, "trackio": {"auto_log_cpu": False}}
tracker = getattr(so.training, name)("a project", "run-1", **options.get(name, {}))


def kill(step, metrics):
    """Kill this process at its last step, once the tracker has the metrics of that step."""
    if step == last_step:
        os.kill(os.getpid(), signal.SIGKILL)


opt = so.ddp(
    optax.sgd(0.1), so.make_mesh(data=2), lambda params, batch: ((batch @ params["w"]) ** 2).mean()
)
state, batch = opt.init({"w": np.ones(4, np.float32)}), np.eye(4, dtype=np.float32)
with so.Checkpoints(
    folder / "checkpoints", every=2, keep=2, resume=last_step is None
) as checkpoints:
    so.fit(
        opt,
        state,
        [batch] * 6,
        num_steps=6,
        checkpoints=checkpoints,
        log=[tracker, kill],
        log_every=1,
        metrics_every=3,
        progress=False,
    )
