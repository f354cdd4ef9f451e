"""One of several processes that train: `python worker_that_hangs.py FOLDER FAULT RANK STEP`.

The fault hits one rank.

It happens at one step of the first attempt. Process 0 leaves the parameters of the end in the
folder."""

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
import small_job

import shardopt as so
import shardopt.checkpoint._write as write

folder = Path(sys.argv[1])
fault = sys.argv[2]
victim = int(sys.argv[3])
at = int(sys.argv[4])
steps = 60
open_sockets = []
small_job.begin()
mine = jax.process_index() == victim
first = "SHARDOPT_RESTART" not in os.environ


def spin_in_python():
    while True:
        pass


def spin_in_native_code():
    re.match("(a*)*b", "a" * 99)


def lose_the_network():
    """Put a socket that nobody else has in the place of each connection.

    The others are not told.
    """
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                # or the kernel would close the connection
                open_sockets.append(os.dup(int(link.name)))
                open_sockets.append(socket.socketpair())
                os.dup2(open_sockets[-1][0].fileno(), int(link.name))


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


def batches():
    for step in range(steps):
        if fault != "none" and first and step == at and (mine or fault == "collective"):
            FAULTS[fault]()
        yield small_job.batch_of(step, rows=15)


opt, state = small_job.strategy_and_state(width=33)
with so.Checkpoints(folder / "checkpoints", every=10, keep=2) as checkpoints:
    result = so.fit(
        opt,
        state,
        so.GlobalRows(batches()),
        num_steps=steps,
        checkpoints=checkpoints,
        log_every=5,
    )
small_job.leave_params(folder, opt, result)
