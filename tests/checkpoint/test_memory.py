"""Snapshots in host memory: whole or not at all, of one's own host or the next, newer than the disk's."""

import json
import multiprocessing as mp
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.checkpoint.memory import mismatch, pack, place_snapshot, unpack
from shardopt.runtime import vault
from shardopt.runtime.messages import connect


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def make(devices, strategy=so.fsdp):
    mesh = so.make_mesh(data=devices, devices=jax.devices()[:devices])
    return strategy(optax.adam(0.1), mesh, loss_fn, min_shard_elements=1)


PARAMS = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.float32(0.5)}


@pytest.fixture
def vaults(monkeypatch):
    """Two vaults, and their addresses in the environment."""
    both = vault.Vaults(2)
    for name, value in both.environment().items():
        monkeypatch.setenv(name, value)
    yield both
    both.close()


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return all(np.array_equal(np.asarray(raw(x)), np.asarray(raw(y))) for x, y in pairs)


def test_what_is_packed_comes_back_on_the_same_devices_and_no_others():
    opt = make(4)
    state = opt.init(PARAMS)
    found = unpack(bytes(pack(state, 7, {"position": 3})))
    assert (found.step, found.extra) == (7, {"position": 3})
    assert mismatch(found, opt.abstract_state()) == ""
    back = place_snapshot(found, opt.abstract_state())
    assert equal(back, state)
    assert [leaf.sharding for leaf in jax.tree.leaves(back)] == [leaf.sharding for leaf in jax.tree.leaves(state)]
    other = make(2)
    other.init(PARAMS)
    assert mismatch(found, other.abstract_state()).startswith("this process held other shards of ")
    sgd = so.fsdp(optax.sgd(0.1), opt.mesh, loss_fn, min_shard_elements=1)
    sgd.init(PARAMS)
    assert mismatch(found, sgd.abstract_state()) == "it holds other leaves"


def test_a_vault_keeps_two_generations_of_what_arrives_whole(vaults):
    env = vaults.environment()
    address, token = env[vault.ADDRESSES].split(",")[0], env[vault.TOKEN]

    def keep(step, data=b"numbers"):
        vault.put(address, token, 1, step, data, vault.digest(data))

    for step in (5, 10, 15):
        keep(step)
    assert vault.steps(address, token, 1) == [10, 15]
    assert vault.steps(address, token, 0) == []
    assert vault.get(address, token, 1, 15) == b"numbers"
    assert vault.get(address, token, 1, 5) is None
    with pytest.raises(OSError, match="it did not arrive whole"):
        vault.put(address, token, 1, 20, b"numberz", vault.digest(b"numbers"))
    assert vault.steps(address, token, 1) == [10, 15]
    keep(12)  # wound back: what came after is of another history
    assert vault.steps(address, token, 1) == [10, 12]
    with pytest.raises(mp.AuthenticationError):
        connect(address, "guessed")
    vaults._all[0].process.kill()
    vaults._all[0].process.wait()
    assert vault.steps(address, token, 1) == []
    assert vault.get(address, token, 1, 12) is None
    again = vaults.environment()[vault.ADDRESSES].split(",")
    assert vault.steps(again[0], token, 1) == []


def test_snapshots_need_somewhere_to_go(tmp_path, monkeypatch):
    monkeypatch.delenv(vault.ADDRESSES, raising=False)
    text = (
        "Checkpoints: memory_every needs a process on each host that outlives training and keeps snapshots; there is none.\n"
        "Fix: start the job with shardopt launch --max-restarts 3, or leave memory_every out."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        so.Checkpoints(tmp_path / "run", every=2, keep=1, memory_every=1)
    assert not (tmp_path / "run").exists()


def batches(until):
    for step in range(until):
        yield np.random.default_rng(step).normal(size=(8, 8)).astype(np.float32)
    raise InterruptedError("the host is lost")


@pytest.mark.parametrize(
    ("lost", "resumed"),
    [((), "step 8 in the memory of the hosts"), ((0,), "step 8 in the memory"), ((0, 1), "step 5 in /")],
)
def test_fit_goes_on_from_the_newest_that_is_left(vaults, tmp_path, monkeypatch, capsys, lost, resumed):
    opt = make(4)
    unbroken = so.fit(opt, opt.init(PARAMS), batches(12), num_steps=12, progress=False).state

    def train(until):
        with so.Checkpoints(tmp_path, every=5, keep=2, memory_every=4) as checkpoints:
            return so.fit(
                opt, opt.init(PARAMS), batches(until), num_steps=12, checkpoints=checkpoints, progress=False
            ).state

    with pytest.raises(InterruptedError):
        train(9)
    for number in lost:
        vaults._all[number].process.kill()
        vaults._all[number].process.wait()
    for name, value in vaults.environment().items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    state = train(12)
    assert f"Resuming from {resumed}" in capsys.readouterr().err
    assert equal(state, unbroken)
    (attempts,) = json.loads((tmp_path / "goodput.json").read_text()).values()
    assert [one["ended_well"] for one in attempts] == [False, True]
