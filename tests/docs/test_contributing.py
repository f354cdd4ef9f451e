"""CONTRIBUTING is followed as it stands: its reducer, its schedule and its strategy do what theirs
do.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT

import shardopt as so
from shardopt.hlo import audit

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture(scope="module")
def space():
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        exec(block, namespace)
    return namespace


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)


def batch_of(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(16, 32)).astype(np.float32), "y": np.ones((16, 8), np.float32)}


def losses_of(opt):
    state = opt.init({"w": np.full((32, 8), 0.05, np.float32)})
    losses = []
    for step in range(6):
        state, metrics = opt.step(state, batch_of(step))
        losses.append(float(metrics["loss"]))
    return losses


def test_the_reducer_sends_the_bytes_it_states_and_forgets_nothing(space, mesh_of):
    reducer = so.reducers.error_feedback(space["float8"]())
    draw = np.random.default_rng(0).normal(size=(4, 6, 10)).astype(np.float32)
    state = jax.vmap(lambda g: reducer.init(g))(draw)
    mean, state = jax.jit(jax.vmap(lambda g, s: reducer.reduce(g, s, "data"), axis_name="data"))(
        draw, state
    )
    memory = np.asarray(jax.tree.leaves(state)[0]).reshape(4, 6, 10)
    np.testing.assert_allclose(4 * mean[0] + memory.sum(0), draw.sum(0), rtol=1e-5, atol=1e-5)
    assert np.abs(memory).max() > 1e-4  # something was lost, so there was something to remember

    opt = so.ddp(optax.sgd(0.3), mesh_of(data=4), loss_fn, reducer=reducer)
    losses = losses_of(opt)
    np.testing.assert_allclose(
        losses, losses_of(so.ddp(optax.sgd(0.3), mesh_of(data=4), loss_fn)), rtol=0.01
    )
    abstract = {"w": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
    report = audit(opt.step, opt.abstract_state(), batch_of(0)).of(axis="data", min_bytes=64)
    sent = sum(collective.wire_bytes * collective.calls for collective in report.collectives)
    # the scales, four bytes a chunk, are too small for the filter
    assert 0 <= reducer.wire_bytes(abstract, 4) - sent <= 2 * 3 * 4


def test_the_schedule_is_valid_and_trains_as_one_device(space, mesh_of):
    make = space["last_first"]
    for stages, micro_batches in ((1, 1), (2, 5), (4, 4), (8, 3)):
        schedule = make(stages, micro_batches)  # it checks itself
        assert schedule.num_ticks == 2 * (micro_batches + stages - 1)
    model = so.BlockModel(
        embed=lambda outer, batch: batch @ outer["in"],
        block=lambda w, x: x + jnp.tanh(x @ w),
        loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch) ** 2),
    )
    params = {"blocks": np.full((2, 8, 8), 0.05, np.float32), "in": np.eye(4, 8, dtype=np.float32)}
    batch = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    opt = so.hybrid(
        optax.sgd(0.1), mesh_of(data=1, pipeline=2), model, schedule=make, micro_batches=4
    )
    state, _ = opt.step(opt.init(params), batch)
    expected = jax.tree.map(
        lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(model.loss_fn))(params, batch)
    )
    for leaf, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)


def test_the_strategy_shards_every_leaf_and_is_fsdp(space, mesh_of):
    mine = space["shard_all"](optax.adam(0.01), mesh_of(data=4), loss_fn)
    known = so.fsdp(optax.adam(0.01), mesh_of(data=4), loss_fn)  # its leaf is too small to be split
    np.testing.assert_allclose(losses_of(mine), losses_of(known), rtol=1e-5)
    assert [opt.config.report().params_bytes for opt in (mine, known)] == [32 * 8, 32 * 8 * 4]
    assert mine.config.strategy == "shard_all"


def test_the_option_it_shows_is_in_three_files_as_shown():
    blocks = re.findall(r"^   ```py\n   # (\S+)\n(.*?)^   ```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for path, shown in blocks:
        lines = (ROOT / path).read_text().splitlines()
        assert [
            line for line in shown.splitlines() if line.removeprefix("   ") not in lines
        ] == [], path


def test_the_files_it_sends_people_to_are_there():
    root = ROOT
    paths = re.findall(r"`((?:shardopt|tests|docs|benchmarks)/[\w./*]*)`", TEXT)
    assert len(paths) > 10
    for path in paths:
        assert list(root.glob(path)), path
