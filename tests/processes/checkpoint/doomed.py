"""A writer that dies, or meets a full disk: `python doomed.py HOW FOLDER`.

See test_killed_writers.py.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import jax.numpy as jnp

from shardopt.checkpoint import _run_folder as run_folder
from shardopt.checkpoint import _write as write
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core._errors import CheckpointError


def die(*_, **__):
    """Go at once, as if killed from outside."""
    os.kill(os.getpid(), signal.SIGKILL)


def value(step):
    """Large enough that writing it takes a while."""
    return {"a": jnp.arange(500_000.0) * step}


def main(how, folder):
    checkpoints = Checkpoints(folder, every=1, keep=1 if how == "rotating" else 5)
    checkpoints.save(value(1), step=1)
    checkpoints.wait()
    match how:
        case "writing":
            checkpoints.save(value(2), step=2)
            die()
        case "manifest":
            write.write_manifest = die
        case "publish":
            write.publish = die
        case "rotating":
            run_folder.shutil.rmtree = die
        case "replacing":
            rename = Path.rename
            Path.rename = lambda self, to: die() if self.name == ".saving-1" else rename(self, to)
            checkpoints.save(value(7), step=1)
            checkpoints.wait()
        case "holding":
            print(os.getpid(), flush=True)
            sys.stdin.read()
        case "full":
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
            checkpoints.save(value(2), step=2)
            try:
                checkpoints.wait()
            except CheckpointError as error:
                print(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            checkpoints.save(value(3), step=3)
            checkpoints.close()
            return
    checkpoints.save(value(2), step=2)
    checkpoints.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
