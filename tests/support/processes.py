"""Scripts as several processes of one job: `python worker.py RANK PORT FOLDER`, each with its own
part to say.
"""

import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from shardopt.runtime._stored_programs import ORDER_FLAG
from support.flags import QUICK_TO_COMPILE

ROOT = Path(__file__).parents[2]


class Said(NamedTuple):
    """The output of a process.

    `last` is the last line of its standard output, as gloo talks there too.
    """

    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.strip().split("\n")[-1]


def run_processes(script, count, folder, *, strict=True, timeout=300) -> list[Said]:
    """Run a script as `count` processes that find each other at PORT, and return the output of
    each.

    With `strict` warnings are errors in them too. A process that fails fails the test, with the
    output of all processes; none is left over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = " ".join(QUICK_TO_COMPILE)
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += f" {ORDER_FLAG}=false"  # programs are stored, as in tests/conftest.py
    environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    # a process may read a program that process 0 is writing; it then compiles it
    half_written = "ignore:Error reading persistent compilation cache entry"
    warnings = ["-W", "error", "-W", half_written] if strict else []
    command = [sys.executable, *warnings, str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [
        subprocess.Popen([*command, str(rank), str(port), str(folder)], **pipes)
        for rank in range(count)
    ]
    try:
        said = [Said(*process.communicate(timeout=timeout)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * count, "\n".join(
        f"process {i}: {code}\n{said[i].err[-3000:]}" for i, code in enumerate(codes)
    )
    return said
