"""`watchdog`: a program next to process 0 watches a job on a cluster, as `shardopt launch` does on
one machine.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from shardopt.core import calling, error_text, value_error
from shardopt.runtime import _progress as progress
from shardopt.runtime._program import start

_KEY = "shardopt/watchdog"


@calling("watchdog")
def watchdog(hang_timeout: float, *, port: int = 0) -> None:
    """End a job on a cluster when one of its processes hangs, and say which process hangs and
    where.

    All processes call it, after `so.initialize` and before `so.fit`, which reports progress. Your
    own training loop must call `so.runtime.report_progress`. Under `shardopt launch --hang-timeout`
    it does nothing: there the launcher watches.

    Args:
      hang_timeout: seconds without progress that count as a hang. An action that happens for the
        first time may compile, so it may take ten times as long.
      port: the port of the program on the host of process 0; 0 for any free port. Reports travel
        over the network of the job, with a token made for this run.

    Raises:
      ValueError: if `hang_timeout` is not positive, or this process is already watched.
      RuntimeError: if the program cannot be started.

    A separate program next to process 0 watches, so a stopped process or a busy interpreter does
    not disturb it. Each process reports to it about once a second. If a process begins nothing new
    for too long, and no other process is behind it:

    1. The program writes to the standard error of process 0: the process that lags, its step and
       phase, and the Python stacks of all processes that answer.
    2. All processes that answer exit with code 124.
    3. The launcher of the job ends the others and starts the job again: `srun
       --kill-on-bad-exit=1`, or a JobSet with `backoffLimit: 0`.

    If the host of process 0 dies, or is cut off, this program is gone too. Then the other processes
    say so after `hang_timeout` seconds, and jax ends them.

    To get the stacks at any time, send SIGUSR2: they are written to a file in the folder for
    temporary files.
    """
    if not hang_timeout > 0:
        raise value_error(f"hang_timeout must be more than 0 seconds, got {hang_timeout:g}.")
    if progress.ADDRESS in os.environ:
        return
    if progress.is_reported():
        raise value_error("this process is watched already.", fix="call it once.")
    from jax._src.distributed import global_state

    client = global_state.client
    rank = global_state.process_id or 0  # jax.process_index() would start a backend
    if client is None or rank == 0:
        ready_line = _start(global_state.num_processes or 1, hang_timeout, port)
        if client is not None:
            client.key_value_set(_KEY, ready_line)
    else:
        ready_line = client.blocking_key_value_get(_KEY, 300_000)
    watch_info = json.loads(ready_line)
    if rank:
        host = (global_state.coordinator_address or "127.0.0.1:0").rpartition(":")[0]
    else:
        host = os.environ.get(progress.LISTEN_ADDRESS, "127.0.0.1")
    stacks = Path(tempfile.mkdtemp(prefix="shardopt-")) / f"process-{rank}.stacks"
    local_environment = {
        progress.ADDRESS: f"{host}:{watch_info['port']}",
        progress.STACKS: str(stacks),
    }
    progress.start_reports(rank, watch_info | local_environment)


def _start(count: int, timeout: float, port: int) -> str:
    """Start the watching program, and return the JSON line with its port.

    The program ends when this process does.
    """
    program = start("_watch", count, timeout, port, progress.listen_address())
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        fix = f"choose another port= than {port}." if port else "look at what it said above."
        raise RuntimeError(error_text("the program that watches could not be started.", fix=fix))
    _running.append(program)
    return line


_running: list[subprocess.Popen[str]] = []
"""The programs that this process started. Their input pipes close when this process ends, and then
they end too.
"""
