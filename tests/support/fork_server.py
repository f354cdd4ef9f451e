"""A process that has imported jax and shardopt, and forks one for each script that a test starts.

Its input is lines of JSON: [SCRIPT, ARGUMENTS, OUT, ERR, STRICT] forks and prints the id of the
fork, and an id prints the status of that fork, or null while it runs. See processes.py.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path

import jax  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401

import shardopt
import shardopt.hlo
import shardopt.training
from support.memory import collect_seldom, keep_freed_memory

_ = shardopt.fit, shardopt.Checkpoints  # they are imported at the first use


def run(script, arguments, out, err, strict):
    """Run a script as the interpreter would: its errors, handlers and threads end this process."""
    files = [(os.devnull, os.O_RDONLY), (out, os.O_WRONLY), (err, os.O_WRONLY)]
    for descriptor, (path, flags) in enumerate(files):
        os.dup2(os.open(path, flags | os.O_CREAT | os.O_APPEND), descriptor)
    # A shell starts programs in the background so that they ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not strict:
        warnings.simplefilter("default")
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def main():
    keep_freed_memory()
    collect_seldom()
    gc.freeze()  # forks neither walk these objects nor copy their pages
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            with warnings.catch_warnings(action="ignore"):  # no thread of this process computes
                answer = os.fork()
            if answer == 0:
                run(*request)
                return
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
