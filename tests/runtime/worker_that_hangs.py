"""One of several processes that train: `python worker_that_hangs.py FOLDER FAULT RANK STEP`. The fault is that of one rank.

It happens at one step of the first attempt. Process 0 leaves the parameters of the end in the folder.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
import shardopt.checkpoint.write as write

folder, fault, victim, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
steps, kept = 60, []
jax.config.update("jax_num_cpu_devices", 1)
so.initialize()
mine = jax.process_index() == victim
first = "SHARDOPT_RESTART" not in os.environ


def spin_in_python():
    while True:
        pass


def spin_in_native_code():
    re.match("(a*)*b", "a" * 99)


def lose_the_network():
    """Put a socket that nobody else has in the place of each connection; the others are not told."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                kept.append(os.dup(int(link.name)))  # or the kernel would close the connection
                kept.append(socket.socketpair())
                os.dup2(kept[-1][0].fileno(), int(link.name))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_a_collective():
    """The others come to this step late, and find one that is waiting for them, stopped."""
    if mine:
        threading.Timer(1.0, stop).start()
    else:
        time.sleep(2.0)


def hang_in_a_checkpoint():
    def digest(*_, **__):
        time.sleep(10**6)

    write.digest = digest


FAULTS = {
    "stopped": stop,
    "busy": spin_in_python,
    "native": spin_in_native_code,
    "network": lose_the_network,
    "collective": stop_in_a_collective,
    "data": lambda: time.sleep(10**6),
    "checkpoint": hang_in_a_checkpoint,
}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch[:, :8] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch[:, 8]) ** 2)


def batches():
    for step in range(steps):
        if fault != "none" and first and step == at and (mine or fault == "collective"):
            FAULTS[fault]()
        yield np.random.default_rng(step).normal(size=(15, 9)).astype(np.float32)


opt = so.fsdp(optax.adam(0.01), so.make_mesh(), loss_fn, min_shard_elements=1)
state = opt.init({"up": np.eye(8, 33, dtype=np.float32), "down": np.ones(33, np.float32)})
with so.Checkpoints(folder / "checkpoints", every=10, keep=2) as checkpoints:
    result = so.fit(opt, state, batches(), num_steps=steps, checkpoints=checkpoints, log_every=5, agree_every=5)
params = jax.jit(lambda params: params, out_shardings=jax.NamedSharding(opt.mesh, jax.P()))(result.state.params)
if jax.process_index() == 0 and result.stopped == "completed":
    np.savez(folder / "params.npz", **{name: np.asarray(leaf.addressable_data(0)) for name, leaf in params.items()})
