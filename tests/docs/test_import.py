"""`import shardopt` is quiet and light: no device is touched, no flag set, and what few programs
need is not loaded.
"""

import subprocess
import sys

import pytest

HEAVY = [
    "matplotlib",
    "ray",
    "orbax",
    "rich",
    "tyro",
    "grain",
    "safetensors",
    "flax",
    "torch",
    "pandas",
]
OF_WINGS = ["orbax", "grain", "matplotlib", "flax", "scipy.sparse"]
NAMES = f"[name for name in {HEAVY!r} if name in sys.modules]"
LOADED = f"import sys; import shardopt; print({NAMES})"


def said(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.slow
def test_the_search_finds_what_is_loaded():
    assert said(f"import matplotlib; {LOADED}") == "['matplotlib']"


LOOK = """
import contextlib, io, multiprocessing, os, signal, sys, threading
import jax, jax.numpy, optax

def look():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    children = multiprocessing.active_children()
    process = handlers, sys.excepthook, threading.enumerate(), children, os.getcwd()
    return process, dict(os.environ), dict(jax.config.values)

before = look()
"""
WINGS = f"""
import shardopt.cli, shardopt.data, shardopt.models.gpt
assert look() == before
print([name for name in {OF_WINGS!r} if name in sys.modules])
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    shardopt.cli.main(["train", "--help"])
print(sorted(jax._src.xla_bridge._backends))
"""


def test_no_thread_no_process_no_signal_handler_no_backend_and_nothing_that_few_programs_need():
    """The command line, models and data are as quiet. Help takes no accelerator out of use."""
    backends = "print(sorted(jax._src.xla_bridge._backends))"
    core = f"{LOADED}\nassert look() == before\n{backends}"
    assert said(LOOK + core + WINGS).split("\n") == ["[]"] * 4
