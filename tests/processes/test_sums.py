"""Sums between processes on CPU: gloo's reduce-scatter is wrong now and then, so none is handed to
it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.collectives import _shards as shards
from shardopt.collectives import per_device
from shardopt.runtime._launch import launch

pytestmark = pytest.mark.fast

SUMS = """
import os
os.environ.pop("XLA_FLAGS", None)  # one device a process
import jax, jax.numpy as jnp, numpy as np
import shardopt as so
from jax.sharding import Mesh, PartitionSpec as P
from shardopt.collectives._shards import psum_scatter

so.initialize()
n = 6_000_000

def wrong(seed):
    rank = jax.lax.axis_index("data")
    numbers = lambda x: (x % 97).astype(jnp.float32)
    off = 0
    for j in range(1, 4):
        mine = psum_scatter(numbers(jnp.arange(n)) * j + seed + rank, "data", 0)
        right = numbers(jnp.arange(n // 2) + rank * (n // 2)) * 2 * j + 2 * seed + 1
        off += jnp.sum(mine != right)
    return jax.lax.psum(off, "data")

mesh = Mesh(np.array(jax.devices()), ("data",))
run = jax.jit(jax.shard_map(wrong, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
assert "reduce-scatter" not in run.lower(jnp.float32(0)).compile().as_text()
print(sum(int(run(jnp.float32(seed))) for seed in range(100)))
"""


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_between_processes_is_exchanged_and_the_same(dim, mesh_of, monkeypatch):
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (4, 8, 12)), jnp.float32)
    spec = P("data") if dim == 0 else P(None, "data")

    def run(x):
        return shards.psum_scatter(x[0], "data", dim)

    def step():
        f = per_device(run, mesh_of(data=4), in_specs=(P("data"),), out_specs=spec)
        lowered = jax.jit(so.mesh.on_mesh(mesh_of(data=4), f)).lower(x)
        return lowered.compile()(x), {
            collective.kind
            for collective in so.hlo.audit(lowered, mesh=mesh_of(data=4)).collectives
        }

    one_process, kinds = step()
    assert kinds == {"reduce-scatter"}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    several, kinds = step()
    assert kinds == {"all-to-all"}
    np.testing.assert_array_equal(several, one_process)
    np.testing.assert_array_equal(several, x.sum(0))


@pytest.mark.slow
def test_three_hundred_sums_of_two_processes_are_right(tmp_path, capsys):
    """With `jax.lax.psum_scatter` one or two in a hundred are wrong."""
    command = [sys.executable, "-c", SUMS]
    assert launch(lambda attempt: command, processes=2, log_dir=tmp_path / "logs") == 0
    assert capsys.readouterr().out.split()[-1] == "0"
