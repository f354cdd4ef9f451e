"""`watchdog`: a job on a cluster is watched by a program beside process 0, as `shardopt launch --hang-timeout` does on one machine."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from shardopt.core.errors import format_error
from shardopt.runtime import progress

_WATCH = Path(__file__).with_name("watch.py")
_KEY = "shardopt/watchdog"


def watchdog(hang_timeout: float, *, port: int = 0) -> None:
    """End a job on a cluster when one of its processes hangs, after saying which one and in what; its launcher restarts it.

    A program beside process 0, which neither a stopped process nor a busy interpreter disturbs, hears of each process once a
    second or so. When nothing new begins on one for too long, and none is behind it, it writes to the standard error of
    process 0 who lags, in which step and phase, and the Python stacks of all that answer; then all that answer exit with
    code 124. One that does not is left to the launcher of the job: `srun --kill-on-bad-exit=1`, a JobSet with
    `backoffLimit: 0`. A rank that is slow by its own work is named there as well.

    All processes call it, after `so.initialize` and before `so.fit`, which reports by itself; a loop of your own calls
    `so.report_progress`. The stacks can be asked for at any time by SIGUSR2, into a file in the folder for temporary files.
    Under `shardopt launch --hang-timeout` it does nothing: there the launcher watches.

    Args:
      hang_timeout: seconds without progress that are too long. What is done for the first time may compile, and may take
        ten times as long.
      port: on which process 0 is reported to, over the network of the job, with a token made for this run; 0 for any that
        is free.

    Raises:
      ValueError: if `hang_timeout` is not positive, or this process is watched already.
      RuntimeError: if the program that watches cannot be started.
    """
    if not hang_timeout > 0:
        raise ValueError(format_error("watchdog", f"hang_timeout must be more than 0 seconds, got {hang_timeout:g}."))
    if progress.ADDRESS in os.environ:
        return
    if progress.is_reported():
        raise ValueError(format_error("watchdog", "this process is watched already.", fix="call it once."))
    from jax._src.distributed import global_state

    client, rank = global_state.client, jax.process_index()
    if client is None or rank == 0:
        told = _start(jax.process_count(), hang_timeout, port)
        if client is not None:
            client.key_value_set(_KEY, told)
    else:
        told = client.blocking_key_value_get(_KEY, 300_000)
    where = json.loads(told)
    host = (global_state.coordinator_address or "127.0.0.1:0").rpartition(":")[0] if rank else "127.0.0.1"
    stacks = Path(tempfile.mkdtemp(prefix="shardopt-")) / f"process-{rank}.stacks"
    own = {progress.ADDRESS: f"{host}:{where['port']}", progress.STACKS: str(stacks)}
    progress.start_reports(rank, where | own)


def _start(count: int, timeout: float, port: int) -> str:
    """Start the program, and return the line in which it says where it listens. It ends when this process does."""
    command = [sys.executable, "-I", "-S", str(_WATCH), str(count), str(timeout), str(port)]
    one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert one.stdout is not None
    line = one.stdout.readline()
    if not line:
        fix = f"choose another port= than {port}." if port else "look at what it said above."
        raise RuntimeError(format_error("watchdog", "the program that watches could not be started.", fix=fix))
    _running.append(one)
    return line


_running: list[subprocess.Popen[str]] = []
"""Kept for as long as this process lives, with the pipe whose end tells the program that it does not."""
