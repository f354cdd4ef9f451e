"""Snapshots in host memory: whole or not at all, of one's own host or the next, newer than the
disk's.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.checkpoint._memory import (
    MemorySnapshot,
    assemble,
    complete_steps,
    pack,
    place_snapshot,
    unpack,
)
from shardopt.runtime import _vault as vault
from shardopt.runtime._messages import connect


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def make(devices, strategy=so.fsdp):
    mesh = so.make_mesh(data=devices, devices=jax.devices()[:devices])
    return strategy(optax.adam(0.1), mesh, loss_fn, min_shard_elements=1)


PARAMS = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.float32(0.5)}


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)

    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return all(np.array_equal(np.asarray(raw(x)), np.asarray(raw(y))) for x, y in pairs)


def test_what_is_packed_comes_back_on_the_same_devices():
    opt = make(4)
    state = opt.init(PARAMS)
    piece = unpack(bytes(pack(state, 7, {"position": 3})))
    assert (piece.step, piece.extra) == (7, {"position": 3})
    snapshot, problem = assemble([piece], opt.abstract_state())
    assert problem == ""
    back = place_snapshot(snapshot, opt.abstract_state())
    assert equal(back, state)
    assert [leaf.sharding for leaf in jax.tree.leaves(back)] == [
        leaf.sharding for leaf in jax.tree.leaves(state)
    ]
    sgd = so.fsdp(optax.sgd(0.1), opt.mesh, loss_fn, min_shard_elements=1)
    sgd.init(PARAMS)
    assert assemble([piece], sgd.abstract_state()) == (None, "it holds other leaves")


def pieces_of(snapshot, count):
    """Yield the snapshot that each of `count` processes would pack. A process takes every
    `count`-th shard of a leaf. If a leaf has fewer shards, each process takes all.
    """
    for rank in range(count):
        leaves = {}
        for path, (kind, shards) in snapshot.leaves.items():
            mine = dict(list(shards.items())[rank::count]) if len(shards) >= count else shards
            leaves[path] = (kind, mine)
        yield MemorySnapshot(snapshot.step, {"rank": rank}, leaves)


@pytest.mark.parametrize(
    ("before", "after"),
    tiered([(4, 2), (2, 4), (4, 3), (4, 1)], lambda row: row in ((4, 3), (2, 4))),
)
def test_pieces_of_some_processes_become_the_state_of_others(before, after):
    """Whatever the order, and how often one comes.

    A piece that is missing is noticed, and one that is not needed is not read.
    """
    wide = {"w": np.arange(96, dtype=np.float32).reshape(12, 8), "b": np.float32(0.5)}
    old = make(before)
    new = make(after)
    state = old.init(wide, jax.random.key(7))
    new.init(wide, jax.random.key(8))
    pieces = list(pieces_of(unpack(bytes(pack(state, 7, {}))), before))
    for order in (pieces, pieces[::-1], [pieces[0], *pieces]):  # replicas hold the same
        snapshot, problem = assemble(order, new.abstract_state())
        assert problem == ""
        assert snapshot.extra == order[0].extra
        assert equal(place_snapshot(snapshot, new.abstract_state()), state)
    assert assemble(pieces[1:], new.abstract_state()) == (None, "a piece of it is lost or damaged")

    def one_is_enough():
        yield unpack(bytes(pack(state, 7, {})))
        raise AssertionError("another piece was read")

    assert assemble(one_is_enough(), new.abstract_state())[1] == ""


def test_a_vault_keeps_two_generations_of_what_arrives_whole(vaults):
    env = vaults.environment()
    address = env[vault.ADDRESSES].split(",")[0]
    token = env[vault.TOKEN]

    def keep(step, data=b"numbers", *, rank=1, group="0/2"):
        vault.put(address, token, rank, step, group, data, vault.digest(data))

    for step in (5, 10, 15):
        keep(step)
    assert vault.list_pieces(address, token) == [(1, 10, "0/2"), (1, 15, "0/2")]
    assert vault.get(address, token, 1, 15, "0/2") == b"numbers"
    assert vault.get(address, token, 1, 15, "1/2") is None
    assert vault.get(address, token, 1, 5, "0/2") is None
    with pytest.raises(OSError, match="it did not arrive whole"):
        vault.put(address, token, 1, 20, "0/2", b"numberz", vault.digest(b"numbers"))
    keep(12)  # wound back: what came after is of another history
    assert vault.list_pieces(address, token) == [(1, 10, "0/2"), (1, 12, "0/2")]
    keep(14, rank=0, group="1/1")
    # another piece of the attempt before may still be needed
    assert len(vault.list_pieces(address, token)) == 3
    keep(16, rank=0, group="1/1")
    assert vault.list_pieces(address, token) == [(0, 14, "1/1"), (0, 16, "1/1")]
    with pytest.raises(ConnectionRefusedError, match="it does not know the token of this run"):
        connect(address, "guessed")
    assert vault.list_pieces(address, "guessed") == []
    vaults._all[0].process.kill()
    vaults._all[0].process.wait()
    assert vault.list_pieces(address, token) == []
    assert vault.get(address, token, 0, 14, "1/1") is None
    new_addresses = vaults.environment()[vault.ADDRESSES].split(",")
    assert vault.list_pieces(new_addresses[0], token) == []


def test_only_steps_of_one_attempt_are_put_together():
    held = [
        ("a", 0, 9, "0/2"),
        ("a", 1, 9, "1/2"),
        ("b", 0, 8, "0/2"),
        ("b", 1, 8, "0/2"),
        ("b", 0, 8, "2/1"),
    ]
    complete_groups = complete_steps(held, later_than=7)
    assert [(complete_step.step, complete_step.group) for complete_step in complete_groups] == [
        (8, "2/1"),
        (8, "0/2"),
    ]
    assert complete_steps(held, later_than=8) == []


def test_snapshots_need_somewhere_to_go(tmp_path, monkeypatch):
    monkeypatch.delenv(vault.ADDRESSES, raising=False)
    text = (
        "Checkpoints: memory_every needs a process on each host that outlives training and keeps"
        " snapshots; there is none.\nFix: start the job with shardopt launch --max-restarts 3; of"
        " several hosts, shardopt vault on each and its environment with SHARDOPT_VAULTS; or leave"
        " memory_every out."
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
    tiered(
        [
            ((), "step 8 in the memory of the hosts"),
            ((0,), "step 8 in the memory"),
            ((0, 1), "step 5 in /"),
        ],
        lambda row: row[0] == (0, 1),
    ),
)
def test_fit_goes_on_from_the_newest_that_is_left(
    vaults, tmp_path, monkeypatch, capsys, lost, resumed
):
    opt = make(4)
    unbroken = so.fit(opt, opt.init(PARAMS), batches(12), num_steps=12, progress=False).state

    def train(until):
        with so.Checkpoints(tmp_path, every=5, keep=2, memory_every=4) as checkpoints:
            return so.fit(
                opt,
                opt.init(PARAMS),
                batches(until),
                num_steps=12,
                checkpoints=checkpoints,
                progress=False,
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
    assert [attempt["ended_well"] for attempt in attempts] == [False, True]
