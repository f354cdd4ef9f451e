"""A tiny text, and `shardopt train` in a process of its own."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The command with a model and a text that take seconds."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(
        "".join(f"the quick brown fox {i} jumps over the lazy dog.\n" for i in range(400))
    )
    sizes = "--dim 32 --layers 2 --length 16 --batch-size 8 --evaluate-every 4"
    return ["train", "--data", str(path), *sizes.split()]


@pytest.fixture
def shardopt():
    """Return a function that starts `shardopt` with CPU devices of its own choosing.

    None is left over.
    """
    started = []

    def run(*words, **how):
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
        }  # where it is not installed
        command = [sys.executable, "-m", "shardopt.cli", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes | how))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()


@pytest.fixture
def start(shardopt, tiny):
    """Return a function that starts `shardopt train`."""
    return lambda *words: shardopt(*tiny, *words)
