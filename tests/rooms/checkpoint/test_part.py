"""A part of a checkpoint: an abstract tree names it, nothing else is read, and the leaves left out
are printed.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

MEGABYTES = 2**20
"""Bytes of each large leaf."""


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["backbone"]["up"]) @ params["backbone"]["down"]
    return jnp.mean((hidden @ params["head"]) ** 2)


def make_params(head_size=4):
    draw = np.random.default_rng(0)
    backbone = {
        "up": draw.normal(size=(256, 1024)).astype(np.float32),
        "down": draw.normal(size=(1024, 256)).astype(np.float32),
    }
    return {"backbone": backbone, "head": draw.normal(size=(256, head_size)).astype(np.float32)}


def make_opt(tx=None, strategy=so.fsdp, **sizes):
    return strategy(tx or optax.adam(0.1), so.make_mesh(**sizes), loss_fn)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder, and the state after a step, so that the moments are not zero."""
    folder = tmp_path_factory.mktemp("part")
    opt = make_opt(data=8)
    batch = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    state, _ = opt.step(opt.init(make_params()), batch)
    so.save(folder, state, step=1)
    return folder, jax.tree.map(np.asarray, state)


def abstract(values, mesh):
    sharding = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), values
    )


def bytes_read():
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


PARTS = {
    "parameters": (
        lambda s: {"params": s.params},
        2 * MEGABYTES,
        "opt_state/0/mu/backbone: 2 leaves left in",
    ),
    "backbone": (
        lambda s: {"params": {"backbone": s.params["backbone"]}},
        2 * MEGABYTES,
        "params/head: float32[256, 4], left in",
    ),
    "a leaf": (
        lambda s: {"params": {"backbone": {"up": s.params["backbone"]["up"]}}},
        MEGABYTES,
        "params/backbone/down: float32[1024, 256], left in",
    ),
    "step": (lambda s: {"step": s.step}, 0, "opt_state/0/mu: 3 leaves left in"),
    "a moment": (
        lambda s: {"opt_state": {"0": {"nu": s.opt_state[0].nu}}},
        2 * MEGABYTES,
        "params/backbone: 2 leaves left in",
    ),
    "no moments": (
        lambda s: s._replace(opt_state=()),
        2 * MEGABYTES,
        "opt_state/0/nu/head: float32[256, 4], left",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_read_and_nothing_else(part, saved, capsys):
    folder, state = saved
    choose, num_bytes, unread_note = PARTS[part]
    wanted = choose(state)
    mesh = so.make_mesh(data=4, tensor=2)
    so.restore(folder, {"step": abstract(state.step, mesh)})  # imports and caches
    capsys.readouterr()
    before = bytes_read()
    restored = so.restore(folder, abstract(wanted, mesh))
    num_read = bytes_read() - before
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    assert num_read < num_bytes + 0.15 * MEGABYTES
    text = capsys.readouterr().err
    count = len(jax.tree.leaves(wanted))
    assert text.startswith(f"restore: step 1 in {folder}: {count} of 12 leaves were read.\n")
    assert unread_note in text


def test_a_backbone_gets_a_new_head_on_another_mesh(saved):
    folder, state = saved
    opt = make_opt(strategy=so.zero, data=4, devices=jax.devices()[:4])
    params = make_params(head_size=7)
    wanted = opt.abstract_state(jax.eval_shape(lambda: params)).params
    restored = so.restore(folder, {"params": {"backbone": wanted["backbone"]}})["params"]
    new_state = opt.init(restored | {"head": params["head"]})
    np.testing.assert_array_equal(
        new_state.params["backbone"]["up"], state.params["backbone"]["up"]
    )
    assert restored["backbone"]["up"].sharding == wanted["backbone"]["up"].sharding


def test_a_whole_checkpoint_prints_nothing_and_compares_all_bytes(saved, capsys):
    folder, state = saved
    mesh = so.make_mesh(data=8)
    before = bytes_read()
    so.restore(folder, abstract(state, mesh))
    assert bytes_read() - before > 1.8 * 6 * MEGABYTES  # compared, then read
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda s: {"params": {"neck": s.params["head"]}}, "params/neck: float32[256, 4], missing"),
        (
            lambda s: {"params": {"head": s.params["head"][:, :3]}},
            "params/head: the checkpoint holds float32[256, 4], the abstract state wants"
            " float32[256, 3]",
        ),
        (
            lambda s: {"params": {"head": s.params["head"].astype(np.float16)}},
            "params/head: the checkpoint holds float32[256, 4], the abstract state wants"
            " float16[256, 4]",
        ),
        (lambda s: {"backbone": s.params["backbone"]}, "backbone/up: float32[256, 1024], missing"),
    ],
)
def test_what_the_checkpoint_does_not_hold_is_refused(wrong, line, saved):
    folder, state = saved
    fix = (
        "Fix: pass key paths, shapes and dtypes that were saved; of a part in a dict, such as"
        ' {"params": ...}.'
    )
    with pytest.raises(so.errors.CheckpointError, match=re.escape(line)) as error:
        so.restore(folder, abstract(wrong(state), so.make_mesh()))
    assert str(error.value).endswith(fix)


def test_a_checkpoint_with_hashes_gives_the_part_that_it_holds(tmp_path):
    opt = make_opt()
    state = opt.init(make_params())
    with so.Checkpoints(tmp_path, 1, keep=1, hash_only=["backbone"]) as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()
        wanted = abstract({"params": {"head": state.params["head"]}}, opt.mesh)
        restored, _ = checkpoints.restore(wanted)
        np.testing.assert_array_equal(restored["params"]["head"], state.params["head"])
        backbone = abstract({"params": {"backbone": state.params["backbone"]}}, opt.mesh)
        with pytest.raises(so.errors.CheckpointError, match="params/backbone/up"):
            checkpoints.restore(backbone)


@pytest.mark.parametrize("file", ["shardopt.json", "state/_METADATA", "values"])
def test_a_damaged_file_is_named_for_a_part_too(file, saved, tmp_path):
    _, state = saved
    so.save(tmp_path, state, step=1)
    names = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    if file == "values":
        path = max(names, key=lambda path: path.stat().st_size)
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path = tmp_path / "1" / file
        path.write_bytes(path.read_bytes().replace(b"params", b"marams"))
    with pytest.raises(so.errors.DamagedCheckpointError, match=path.name):
        so.restore(tmp_path, {"step": abstract(state.step, so.make_mesh())})


def test_the_sums_of_a_part_are_compared(tmp_path):
    from shardopt.checkpoint._sums import leaf_sums

    opt = make_opt()
    state = opt.init(make_params())
    sums = leaf_sums(state)
    wrong = {path: "0" * 16 if path[-1] == "head" else text for path, text in sums.items()}
    with so.Checkpoints(tmp_path, 1, keep=1) as checkpoints:
        checkpoints.save(state, step=1, sums=wrong)
    up = {"params": {"backbone": {"up": state.params["backbone"]["up"]}}}
    so.restore(tmp_path, abstract(up, opt.mesh))
    with pytest.raises(so.errors.DamagedCheckpointError, match="head"):
        so.restore(tmp_path, abstract({"params": {"head": state.params["head"]}}, opt.mesh))


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.lion(0.1), optax.rmsprop(0.1)])
def test_the_train_state_of_another_chain_is_no_part(tx, saved):
    """Moments that it does not ask for are refused, as for an optimizer."""
    folder, _ = saved
    target = make_opt(tx).abstract_state(make_params())
    with pytest.raises(
        so.errors.CheckpointError, match=r"opt_state/0.* left over in the checkpoint"
    ):
        so.restore(folder, target)
