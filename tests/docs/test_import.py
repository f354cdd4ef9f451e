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


def test_no_thread_no_process_no_signal_handler_no_backend_and_nothing_that_few_programs_need():
    code = (
        "import signal, threading, multiprocessing, jax, optax\nlook = lambda: ({n:"
        " signal.getsignal(n) for n in signal.valid_signals()}, threading.enumerate(),"
        " sys.excepthook,\n                multiprocessing.active_children(),"
        " dict(jax.config.values), dict(os.environ), os.getcwd())\nimport os, sys\nbefore ="
        " look()\nimport shardopt\nassert look() =="
        f" before\nprint(sorted(jax._src.xla_bridge._backends), {NAMES})"
    )
    assert said(code) == "[] []"
