"""A verified run restores the state that it saved, or the copy before it: sums of the bits tell a
wrong copy.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import faults

import shardopt as so
from shardopt.checkpoint import _checkpoints, _memory
from shardopt.checkpoint._sums import leaf_sums, total_of

DEVICES = 2
VERIFIED = {"cross_check_every": 4, "progress": False}
FROZEN = ["base"]
PARAMS = {
    name: np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)
    for seed, name in enumerate(["base", "w"])
}


def loss_fn(params, batch):
    return jnp.mean((batch @ (params["base"] + params["w"])) ** 2)


@pytest.fixture(scope="module")
def opt():
    """A trained matrix, and a frozen one: checkpoints may have a hash in its place."""
    mesh = so.make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES])
    return so.fsdp(optax.sgd(0.1), mesh, loss_fn, rules=[("base", "frozen")], min_shard_elements=1)


def first_state(opt):
    return opt.init(PARAMS)


def batches(until=8):
    for step in range(8):
        if step == until:
            raise InterruptedError("the job is killed")
        yield np.random.default_rng(step).normal(size=(4, 8)).astype(np.float32)


def train(opt, folder, *, until=8, every=2, hash_only=(), memory_every=None, options=VERIFIED):
    """Train to step 8; be killed after `until` batches."""
    settings = {"every": every, "keep": None, "hash_only": hash_only, "memory_every": memory_every}
    with so.Checkpoints(folder, **settings) as checkpoints:
        return so.fit(
            opt, first_state(opt), batches(until), num_steps=8, checkpoints=checkpoints, **options
        ).state


@pytest.fixture(scope="module")
def unbroken(opt, tmp_path_factory):
    return train(opt, tmp_path_factory.mktemp("unbroken"))


@pytest.fixture
def copy_wrong(monkeypatch):
    """Return a function that makes all copies of the state of some steps wrong by one bit, before
    files get their SHA-256.
    """
    start_write = _checkpoints.start_write
    pack = _memory.pack
    fault = faults.Fault(1, "shard", "flip", index=3, bit=12, leaf=0)

    def wrong(state):
        return faults.with_faulty_shard(
            state, fault, jax.tree.leaves(state.params)[0].sharding.mesh
        )

    def copy(*steps):
        monkeypatch.setattr(
            _checkpoints,
            "start_write",
            lambda lock, writer, state, meta: start_write(
                lock, writer, wrong(state) if meta.step in steps else state, meta
            ),
        )
        monkeypatch.setattr(
            _memory,
            "pack",
            lambda state, step, *arguments: pack(
                wrong(state) if step in steps else state, step, *arguments
            ),
        )

    return copy


@pytest.mark.parametrize(
    "hash_only",
    [pytest.param((), id="whole"), pytest.param(FROZEN, id="hash_only", marks=pytest.mark.slow)],
)
def test_a_wrong_checkpoint_is_set_aside_and_the_one_before_is_used(
    opt, unbroken, copy_wrong, tmp_path, capsys, hash_only
):
    copy_wrong(6)
    with pytest.raises(InterruptedError):
        train(opt, tmp_path, until=7, hash_only=hash_only)
    copy_wrong()
    # an older one is never used without being asked for
    with pytest.raises(so.errors.DamagedCheckpointError):
        train(opt, tmp_path, hash_only=hash_only, options={"progress": False})
    capsys.readouterr()
    state = train(opt, tmp_path, hash_only=hash_only)
    said = capsys.readouterr().err
    assert re.match(
        rf"Checkpoints: step 6 in {re.escape(str(tmp_path))} does not hold the state that it was"
        r" saved from\.\n"
        rf"  params/{'w' if hash_only else 'base'}: sum [0-9a-f]{{16}}, not [0-9a-f]{{16}}\n"
        r"Fix: go back to an earlier step\.\n"
        r"It is set aside as 6\.damaged, and the next copy is used\.\n"
        rf"Resuming from step 4 in {re.escape(str(tmp_path))}, the data by drawing 4 batches\.\n",
        said,
    ), said
    assert faults.same_bits(state, unbroken)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.name[0].isdecimal())
    assert folders == ["2", "4", "6", "6.damaged", "8"]


def test_a_run_without_a_right_copy_ends(opt, copy_wrong, tmp_path, capsys):
    copy_wrong(2, 4)
    with pytest.raises(InterruptedError):
        train(opt, tmp_path, until=5)
    with pytest.raises(so.errors.DamagedCheckpointError) as error:
        train(opt, tmp_path)
    assert (
        str(error.value)
        == f"fit: no snapshot or checkpoint in {tmp_path} holds the state that it was saved from.\n"
        "Fix: bring one back from a copy, or start again in another folder."
    )
    said = capsys.readouterr().err
    assert [said.count(f"set aside as {step}.damaged") for step in (2, 4)] == [1, 1]


@pytest.mark.parametrize(
    ("steps", "source"),
    [
        pytest.param((6,), "step 4 in the memory of the hosts", marks=pytest.mark.slow),
        ((4, 6), "step 3 in {folder}"),
    ],
)
def test_a_wrong_snapshot_is_left_out_and_the_next_copy_is_used(
    vaults, opt, unbroken, copy_wrong, tmp_path, capsys, steps, source
):
    copy_wrong(*steps)
    with pytest.raises(InterruptedError):
        train(opt, tmp_path, until=7, every=3, memory_every=2)
    copy_wrong()
    capsys.readouterr()
    (tmp_path / "6").rename(tmp_path / "lost")  # a snapshot must be newer than the disk's
    state = train(opt, tmp_path, every=3, memory_every=2)
    said = capsys.readouterr().err
    for step in steps:
        assert (
            said.count(
                f"the snapshot of step {step} does not hold the state that it was saved from."
            )
            == 1
        )
    assert said.count("The next copy is used.") == len(steps)
    assert f"Resuming from {source.format(folder=tmp_path)}, " in said
    assert faults.same_bits(state, unbroken)


def test_sums_do_not_depend_on_the_mesh(opt):
    """They are compared after a restore on another mesh.

    Their total is what devices compare with each other.
    """
    state = first_state(opt)
    alone = jax.device_put(state, jax.devices()[0])
    assert leaf_sums(state) == leaf_sums(alone)
    other = leaf_sums(
        state._replace(params={**state.params, "w": state.params["w"].at[3, 1].add(1e-6)})
    )
    assert [path for path, text in leaf_sums(state).items() if other[path] != text] == [
        ("params", "w")
    ]
    assert total_of(other) != total_of(leaf_sums(state))
