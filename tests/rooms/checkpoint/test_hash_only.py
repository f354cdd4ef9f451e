"""Checkpoints with a hash in place of the frozen base: small, exact to resume, and refused on
another base.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.adapters import lora

DRAW = np.random.default_rng(0)
BATCHES = [{"x": DRAW.normal(size=(8, 16)).astype(np.float32)} for _ in range(6)]
WEIGHTS = {"w": jnp.asarray(DRAW.normal(size=(16, 4)), jnp.float32), "bias": jnp.arange(4.0)}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["bias"][None]) ** 2)


ADAPTED = lora(loss_fn, rank=2, targets=["w"])


def strategy(mesh, **options):
    return so.fsdp(
        optax.adam(0.01),
        mesh,
        ADAPTED.model,
        rules=ADAPTED.rules,
        min_shard_elements=1,
        **options,
    )


def first_state(opt, weights=WEIGHTS):
    return opt.init(ADAPTED.init(weights, jax.random.key(0)))


def train(folder, mesh, steps, weights=WEIGHTS):
    opt = strategy(mesh)
    with so.Checkpoints(folder, every=2, keep=None, hash_only=ADAPTED.frozen) as checkpoints:
        state = first_state(opt, weights)
        result = so.fit(
            opt, state, iter(BATCHES), num_steps=steps, checkpoints=checkpoints, progress=False
        )
    return jax.device_get(result.state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, so.make_mesh(data=2, devices=jax.devices()[:2]), 4)
    return folder


def test_a_checkpoint_has_the_adapters_and_a_hash(folder):
    record = json.loads((folder / "4" / "shardopt.json").read_text())
    params = [path for path in record["leaves"] if path.startswith("params/")]
    assert len(params) == 2
    assert {path.rpartition("/")[2] for path in params} == {"lora_a", "lora_b"}
    assert re.fullmatch("[0-9a-f]{32}", record["extra"]["hash_only"]["hash"])


def test_a_run_goes_on_as_an_unbroken_one(folder, tmp_path, mesh_of):
    unbroken = train(tmp_path, mesh_of(data=2), 6)
    resumed = train(folder, mesh_of(data=2), 6)
    for expected, leaf in zip(jax.tree.leaves(unbroken), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(leaf, expected)
    assert np.abs(resumed.params["w"].lora_b).max() > 0
    np.testing.assert_array_equal(resumed.params["w"].base, WEIGHTS["w"])


def test_the_base_is_needed_and_another_is_refused(folder, mesh_of):
    opt = strategy(mesh_of(data=4))
    other = {**WEIGHTS, "bias": WEIGHTS["bias"].at[0].add(1)}
    params = ADAPTED.init(WEIGHTS, jax.random.key(1))
    state = so.restore(folder, opt, step=4, params=params)
    assert state.params["w"].base.sharding == opt.abstract_state(params).params["w"].base.sharding
    np.testing.assert_array_equal(state.params["bias"], WEIGHTS["bias"])
    assert np.abs(state.params["w"].lora_b).max() > 0
    with pytest.raises(so.errors.CheckpointError) as error:
        so.restore(folder, opt, step=4, params=ADAPTED.init(other, jax.random.key(1)))
    assert re.fullmatch(
        rf"restore: step 4 in {folder} was trained on another base: its hash is (\w{{32}}), and"
        r" that of params is (?!\1)"
        r"\w{32}\.\nFix: load the frozen parameters that it was trained on\.",
        str(error.value),
    )
    with pytest.raises(
        so.errors.CheckpointError,
        match=r"step 4 in .* holds no frozen parameters: it has their hash, \w{32}\.",
    ):
        so.restore(folder, opt, step=4)
    with pytest.raises(so.errors.CheckpointError, match="was trained on another base"):
        train(folder, mesh_of(data=2), 8, other)


def test_parameters_that_are_trained_are_stored(tmp_path, mesh_of):
    opt = strategy(mesh_of(data=2))
    with so.Checkpoints(tmp_path, every=2, keep=1, hash_only=["w"]) as checkpoints:
        message = (
            "fit: hash_only of the checkpoints matches 2 leaves that the strategy trains.\n "
            " w/lora_a\n  w/lora_b\nFix: "
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            so.fit(
                opt, first_state(opt), BATCHES, num_steps=2, checkpoints=checkpoints, progress=False
            )
    local = so.local_sgd(strategy(mesh_of(replica=2)), sync_every=2)
    with (
        so.Checkpoints(tmp_path, every=2, keep=1, hash_only=ADAPTED.frozen) as checkpoints,
        pytest.raises(
            ValueError,
            match="fit: checkpoints with hash_only cannot store the parameters of each replica",
        ),
    ):
        so.fit(
            local, first_state(local), BATCHES, num_steps=2, checkpoints=checkpoints, progress=False
        )
    for wrong, error in ((ADAPTED.frozen[0], TypeError), (["("], ValueError)):
        with pytest.raises(error, match="Checkpoints: hash_only"):
            so.Checkpoints(tmp_path, every=2, keep=1, hash_only=wrong)
