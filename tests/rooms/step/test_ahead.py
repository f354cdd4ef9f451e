"""Steps are compiled ahead of their first call: once, and with host memory given back in between."""

import ctypes
import subprocess
import sys

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.step import _compile as ahead


@pytest.fixture
def compiles():
    """Yield the events of this test, in order: "compiled" for a program of jax, and events that the
    test adds itself.
    """
    seen: list[str] = []

    def heard(name: str, _: float, **__) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append("compiled")

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield seen
    jax.monitoring.unregister_event_duration_listener(heard)


def test_a_step_is_compiled_once_and_memory_given_back_before_it_runs(
    compiles, mesh_of, monkeypatch
):
    monkeypatch.setattr(ahead, "trim_malloc", lambda: compiles.append("given back"))

    def loss_fn(params, batch):
        jax.debug.callback(lambda: compiles.append("ran"))
        return jnp.mean((batch @ params) ** 2)

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=1), loss_fn)
    state = opt.init(jnp.ones(3))
    batch = np.ones((2, 3), np.float32)
    compiles.clear()
    for _ in range(2):
        state, _ = opt.step(state, batch)
        jax.effects_barrier()
    assert compiles == ["given back", "compiled", "given back", "ran", "ran"]


def test_a_second_init_compiles_nothing(compiles, mesh_of):
    opt = so.ddp(
        optax.adam(0.1), mesh_of(data=2), lambda params, batch: jnp.mean((batch @ params) ** 2)
    )
    opt.init(np.ones(3, np.float32))
    compiles.clear()
    state = opt.init(np.zeros(3, np.float32))
    assert compiles == []
    np.testing.assert_array_equal(state.params, np.zeros(3))


def test_a_step_within_a_jitted_function_is_not_compiled_by_itself(compiles, mesh_of):
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(data=1), lambda params, batch: jnp.mean((batch @ params) ** 2)
    )
    state = opt.init(jnp.ones(3))
    batch = np.ones((2, 3), np.float32)
    both = jax.jit(lambda state, batch: opt.step(opt.step(state, batch)[0], batch)[0])
    compiles.clear()
    assert int(both(state, batch).step) == 2
    assert compiles == ["compiled"]


@pytest.mark.slow  # the other tests of this file
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="trim_malloc does nothing without glibc"
)
def test_giving_back_lowers_what_the_process_holds():
    code = """
import ctypes
from pathlib import Path
from shardopt.runtime._processes import trim_malloc

def held():
    return 1024 * next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in l)

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(60_000) for _ in range(2_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 60_000)
for piece in pieces[:-1]:  # the last keeps glibc from lowering the top of the heap by itself
    libc.free(piece)
before = held()
trim_malloc()
print(before - held())
"""
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert int(process.stdout) > 100e6


def test_without_malloc_trim_nothing_happens(monkeypatch):
    def none(_):
        raise OSError("no such library")

    from shardopt.runtime import _processes as host_memory

    monkeypatch.setattr(host_memory.ctypes, "CDLL", none)
    host_memory.trim_malloc()
