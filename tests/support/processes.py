"""Scripts as several processes of one job: `python worker.py RANK PORT FOLDER`, each with its own
part to say.
"""

import atexit
import functools
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardopt.runtime._stored_programs import ORDER_FLAG
from support.flags import QUICK_TO_COMPILE
from support.paths import ROOT, TESTS


class Said(NamedTuple):
    """The output of a process.

    `last` is the last line of its standard output, as gloo talks there too.
    """

    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.strip().split("\n")[-1]


@functools.cache
def _server():
    """Start the process that has imported jax, whose forks are the processes of scripts."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")]))
    flags = " ".join(QUICK_TO_COMPILE)
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += f" {ORDER_FLAG}=false"  # programs are stored, as in tests/conftest.py
    environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    # a process may read a program that process 0 is writing; it then compiles it
    half_written = "ignore:Error reading persistent compilation cache entry"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-W", "error", "-W", half_written, "-m", "support.fork_server"]
    server = subprocess.Popen(command, env=environment, text=True, **pipes)

    def close():
        server.stdin.close()
        server.wait(60)
        server.stdout.close()

    atexit.register(close)
    return server


def _ask(request):
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


class Fork:
    """A process that runs a script. jax is imported once, for all processes of all tests.

    With `strict`, warnings are errors in it.
    """

    def __init__(self, script, arguments, out, err, *, strict=False):
        self.returncode = None
        words = [str(word) for word in arguments]
        self.pid = _ask([str(script), words, str(out), str(err), strict])

    def poll(self):
        """Return its code, or None while it runs."""
        if self.returncode is None:
            self.returncode = _ask(self.pid)
        return self.returncode

    def wait(self, timeout):
        """Wait until it ends, and return its code."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} runs for more than {timeout} s")
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        """Kill it if it runs, and wait for its end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(60)


def free_port():
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(script, count, folder, *, strict=True, timeout=300) -> list[Said]:
    """Run a script as `count` processes that find each other at PORT, and return the output of
    each.

    With `strict` warnings are errors in them too. A process that fails fails the test, with the
    output of all processes; none is left over."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        files = [(Path(place, f"{rank}.out"), Path(place, f"{rank}.err")) for rank in range(count)]
        processes = [
            Fork(script, [rank, port, folder], *files[rank], strict=strict) for rank in range(count)
        ]
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        said = [Said(out.read_text(), err.read_text()) for out, err in files]
    assert codes == [0] * count, "\n".join(
        f"process {i}: {code}\n{said[i].err[-3000:]}" for i, code in enumerate(codes)
    )
    return said


def saved_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` that a process has written."""
    with np.load(path) as archive:
        return dict(archive)
