"""Compiled programs in jax's cache: what process 0 has compiled, the others find."""

import hashlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.paths import ROOT

from shardopt.runtime._processes import share_compiled_programs


@pytest.mark.fast
def test_the_key_of_a_program_does_not_depend_on_the_process(monkeypatch):
    from jax._src import cache_key

    monkeypatch.setattr(
        cache_key, "_hash_accelerator_config", lambda digest, devices: digest.update(b"topology")
    )
    options = cache_key._hash_serialized_compile_options
    monkeypatch.setattr(cache_key, "_hash_serialized_compile_options", options)
    share_compiled_programs()

    def key(*devices):
        digest = hashlib.sha256()
        cache_key._hash_accelerator_config(digest, np.array(devices))
        return digest.hexdigest()

    def device(process, platform="cpu", kind="cpu"):
        return SimpleNamespace(platform=platform, device_kind=kind, process_index=process)

    assert key(device(0), device(1)) == key(device(1), device(0)) != key(device(0))
    assert key(device(0, kind="other")) != key(device(0))
    assert key(device(0, "tpu")) == key(device(1, "tpu")) == hashlib.sha256(b"topology").hexdigest()


SCRIPT = """
import jax, numpy as np, shardopt as so
jax.config.update("jax_num_cpu_devices", 1)
so.initialize()
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
rows = jax.make_array_from_callback((2,), jax.NamedSharding(so.make_mesh(), jax.P("data")), lambda at: np.arange(2.0)[at])
found.clear()
total = jax.jit(lambda rows: rows.sum(), out_shardings=jax.NamedSharding(rows.sharding.mesh, jax.P()))(rows)
hits = found.count("/jax/compilation_cache/cache_hits")
print(f"process {jax.process_index()}: {float(total.addressable_data(0))}, {hits} found\\n", end="")
"""


@pytest.mark.slow
def test_all_processes_find_a_program_that_an_earlier_attempt_has_compiled(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
    }
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    outputs = []
    for attempt in ("a", "b"):
        command = [sys.executable, "-m", "shardopt.cli", "launch", "--processes", "2"]
        command += ["--log-dir", str(tmp_path / attempt), "--", str(script)]
        subprocess.run(command, env=environment, check=True, timeout=200)
        logs = [(tmp_path / attempt / f"process-{rank}.log").read_text() for rank in (0, 1)]
        outputs.append([re.findall(r"process .*", log) for log in logs])
    # a process that compiles later may find the stored program of the other one
    assert any(lines[0].endswith("1.0, 0 found") for lines in outputs[0])
    assert outputs[1] == [[f"process {rank}: 1.0, 1 found"] for rank in (0, 1)]
