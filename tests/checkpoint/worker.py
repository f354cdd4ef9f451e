"""One of two processes with two devices each: `python worker.py RANK PORT FOLDER`. See test_processes.py."""

import sys
from pathlib import Path

import jax

rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.checkpoint import Checkpoints, from_bytes, restore, save, to_bytes

so.initialize(f"127.0.0.1:{port}", 2, rank)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)


def batch(step):
    return np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)


def said(action):
    try:
        action()
    except so.CheckpointError as error:
        return str(error)
    return "nothing"


def equal(a, b):
    same = jax.jit(
        lambda a, b: jnp.stack([(x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))]).all()
    )
    return bool(same(a, b))


tx = optax.adamw(1e-2)
opt = so.fsdp(tx, so.make_mesh(), loss_fn, min_shard_elements=1)
params = {"up": np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32), "down": np.ones((32, 4), np.float32)}
import time

state = opt.init(params)
t = time.time()
with Checkpoints(folder / "run", every=1, keep=2) as checkpoints:
    for step in range(1, 4):
        state, _ = opt.step(state, batch(step))
        checkpoints.save(state, step=step, extra={"position": step})
    checkpoints.wait()
    print(rank, "saved", time.time() - t, checkpoints.steps())
    # the same step twice: barriers are met again under the same names
    checkpoints.save(state, step=3, extra={"position": 3})
    again, extra = checkpoints.restore(opt)
    assert equal(again, state) and extra == {"position": 3}
    second = said(lambda: Checkpoints(folder / "run", 1, 1))
print(rank, second)
ddp = so.ddp(tx, so.make_mesh(data=2, tensor=2), loss_fn, rules=[("up", jax.sharding.PartitionSpec(None, "tensor"))])
other = restore(folder / "run", ddp)
print(rank, jax.tree.map(lambda x: x.sharding.spec, other.params))
data = to_bytes(opt, state)
back = from_bytes(opt, data)
assert equal(back, state)
if rank == 0:
    (folder / "blob").write_bytes(data)
    victim = max((folder / "run" / "3").rglob("*/d/*"), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
from jax.experimental import multihost_utils

multihost_utils.sync_global_devices("damaged")
print(rank, said(lambda: restore(folder / "run", opt)))
print(rank, said(lambda: restore(folder / "nowhere", opt)))
