"""`shardopt diff`: equal runs end with 0; others with 1, and the first step and leaf are named."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.cli import main

PARAMS = {"head": np.ones((4, 2), np.float32), "norm": np.ones(4, jnp.bfloat16)}


def loss_fn(params, batch):
    return jnp.mean(((batch * params["norm"][None]) @ params["head"]) ** 2)


def write_run(folder, mesh_of, sizes, *, changed=None, subfolder="checkpoints"):
    """Train three steps with the same bits on any mesh, save each, and log the loss.

    Args:
      folder: the run.
      mesh_of: the fixture.
      sizes: axes of the mesh.
      changed: the step whose batch is another one.
      subfolder: the folder of checkpoints in the run.
    """
    reducer = so.reducers.exact(tile_rows=2)
    opt = so.fsdp(optax.adam(0.1), mesh_of(**sizes), loss_fn, min_shard_elements=1, reducer=reducer)
    state = opt.init(PARAMS)
    log = so.training.jsonl(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        batch = np.random.default_rng(10 if step == changed else step).normal(size=(8, 4))
        state, metrics = opt.step(state, batch.astype(np.float32))
        so.save(folder / subfolder, state)
        values = {name: float(value) for name, value in metrics.items()}
        log(step, {**values, "steps_per_second": float(len(sizes))})
    log.close()
    return folder


@pytest.fixture
def runs(tmp_path, mesh_of):
    """Return two runs on other meshes, the second with another batch in its second step if asked."""

    def write(changed=None, **options):
        first = write_run(tmp_path / "first", mesh_of, {"data": 1}, **options)
        sizes = {"replica": 2, "data": 2}
        second = write_run(tmp_path / "second", mesh_of, sizes, changed=changed, **options)
        return str(first), str(second)

    return write


def test_runs_on_two_meshes_are_equal(runs, capsys, tmp_path, monkeypatch):
    runs()
    monkeypatch.chdir(tmp_path)  # people name folders from where they are
    assert main(["diff", "first", "second"]) == 0
    assert capsys.readouterr().out == "equal in 3 logged steps and 3 checkpoints\n"


def test_the_first_step_and_the_leaves_that_differ_are_named(runs, capsys):
    assert main(["diff", *runs(changed=2)]) == 1
    logged, saved, *leaves = capsys.readouterr().out.splitlines()
    assert logged.startswith("the first logged step that differs: 2, {'loss': ")
    assert saved == "the first checkpoint that differs: 2, in 6 leaves"
    named = [leaf.split(":")[0].strip() for leaf in leaves]
    assert named[:2] == ["params/head", "params/norm"]
    assert leaves[0].split(", by ")[0] == "  params/head: float32[4, 2]"


def test_one_bit_in_a_folder_of_checkpoints_is_found(tmp_path, mesh_of, capsys):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=1), loss_fn)
    for name, bump in (("first", 0.0), ("second", 2.0**-23)):
        head = PARAMS["head"].copy()
        head[3, 1] += bump
        so.save(tmp_path / name, opt.init({**PARAMS, "head": head}))
    assert main(["diff", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "the first checkpoint that differs: 0, in 1 leaf",
        "  params/head: float32[4, 2], by 1.2e-07 of the largest entry",
    ]


def test_other_leaves_are_named(tmp_path, mesh_of, capsys):
    for name, tx in (("first", optax.sgd(0.1)), ("second", optax.sgd(0.1, momentum=0.9))):
        so.save(tmp_path / name, so.ddp(tx, mesh_of(data=1), loss_fn).init(PARAMS))
    assert main(["diff", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    assert "  opt_state/0/trace/head: none and float32[4, 2]" in capsys.readouterr().out


def test_folders_without_a_step_of_both_are_refused(tmp_path, capsys):
    assert main(["diff", str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "no step was logged or saved by both runs." in capsys.readouterr().err
