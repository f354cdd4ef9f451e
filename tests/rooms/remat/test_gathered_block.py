"""Blocks whose weights are gathered only while they run: what their backward pass keeps, and that
it is right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.core._block_model import BlockModel
from shardopt.hlo._hlo_text import parse
from shardopt.hlo._source_lines import read_frames, source_of
from shardopt.models import gpt

DIM = 32
HIDDEN = 512
ROWS = 16


def params_of(num_blocks, *, hidden=HIDDEN):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.asarray(0.1 * rng.normal(size=shape), np.float32)

    return {
        "blocks": {"up": draw(num_blocks, DIM, hidden), "down": draw(num_blocks, hidden, DIM)},
        "out": draw(DIM, 4),
    }


def model_of(block):
    return BlockModel(
        embed=lambda outer, batch: {"x": batch, "count": jnp.int32(0)},
        block=block,
        loss=lambda outer, x, batch: jnp.mean((x["x"] @ outer["out"]) ** 2) + 0.0 * x["count"],
    )


def advanced(x, change):
    return {"x": x["x"] + change, "count": x["count"] + 1}


def temporary(model, mesh, num_blocks, batch, params=None):
    opt = so.fsdp(optax.sgd(0.1), mesh, model)
    shapes = jax.eval_shape(lambda: params_of(num_blocks)) if params is None else params
    return (
        opt.step.lower(opt.abstract_state(shapes), batch)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.slow
def test_weights_that_a_block_casts_are_not_kept_whole(mesh_of):
    """A policy by primitives keeps the whole of a cast weight: half as much again as the whole
    model for every step.
    """
    held = {}
    for dtype in (None, jnp.bfloat16):
        config = gpt.config(dim=128, num_layers=6, num_heads=4, dtype=dtype)
        shapes = jax.eval_shape(lambda config=config: gpt.init(config, jax.random.key(0)))
        batch = {"tokens": jax.ShapeDtypeStruct((2, 9), jnp.int32)}
        held[dtype] = temporary(gpt.model(config), mesh_of(data=2), 6, batch, shapes)
    assert held[jnp.bfloat16] < 1.05 * held[None]


def test_the_lines_of_a_block_are_those_of_the_user(mesh_of):
    """Backwards too: profiles and NaN checks name them."""
    model = model_of(lambda w, x: advanced(x, jnp.tanh(x["x"] @ w["up"]) @ w["down"]))
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), model)
    state = opt.abstract_state(jax.eval_shape(lambda: params_of(2)))
    text = opt.step.lower(state, jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)).compile().as_text()
    frames = read_frames(text)
    places = [
        source_of(line, frames)
        for lines in parse(text).computations.values()
        for line in lines
        if line.opcode == "dot"
    ]
    assert len(places) >= 6  # two products of a block, and the gradients of each
    assert {place.rpartition(":")[0] for place in places} == {__file__}


@pytest.mark.slow  # test_remat_of_the_model_is_heeded
def test_a_checkpoint_within_a_block_is_heeded(mesh_of):
    def wide(w, x):
        return jnp.tanh(x["x"] @ w["up"]) @ w["down"]

    batch = jax.ShapeDtypeStruct((512, DIM), jnp.float32)
    per_block = 512 // 2 * HIDDEN * 4
    growth = []
    for change in (wide, jax.checkpoint(wide)):
        model = model_of(lambda w, x, change=change: advanced(x, change(w, x)))
        growth.append(
            temporary(model, mesh_of(data=2), 8, batch)
            - temporary(model, mesh_of(data=2), 4, batch)
        )
    assert growth[0] > 4 * per_block  # the product that tanh is of, in every block
    assert growth[1] < per_block


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_are_those_of_one_device_with_keys_and_integers_on_the_way(
    micro_batches, mesh_of, x64
):
    def block(w, x, *, rng):
        # by column, so that it does not depend on how rows are split
        keep = jax.random.bernoulli(rng, 0.5, (1, DIM))
        hidden = jax.checkpoint(jnp.sin)(x["x"].astype(jnp.float64) @ w["up"])
        return advanced(x, keep * (hidden @ w["down"]) * (1 + x["count"]))

    model = model_of(block)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params_of(3, hidden=64))
    batch = np.random.default_rng(1).normal(size=(ROWS, DIM))
    got = {}
    for name, wrap in (("ddp", so.ddp), ("fsdp", so.fsdp)):
        opt = wrap(optax.sgd(0.1, 0.9), mesh_of(data=2), model, micro_batches=micro_batches)
        state = opt.init(params)
        for _ in range(3):
            state, _ = opt.step(state, batch)
        got[name] = jax.device_get(state.params)
    for a, b in zip(*map(jax.tree.leaves, got.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "remat", ["full", pytest.param(jax.checkpoint_policies.dots_saveable, marks=pytest.mark.slow)]
)
def test_remat_of_the_model_is_heeded(remat, mesh_of):
    plain = model_of(lambda w, x: advanced(x, jnp.tanh(x["x"] @ w["up"]) @ w["down"]))
    batch = jax.ShapeDtypeStruct((512, DIM), jnp.float32)
    per_block = 512 // 2 * HIDDEN * 4
    growth = []
    for model in (plain, plain._replace(remat=remat)):
        growth.append(
            temporary(model, mesh_of(data=2), 8, batch)
            - temporary(model, mesh_of(data=2), 4, batch)
        )
    saves_products = remat != "full"
    assert (growth[1] > 4 * per_block) == saves_products
    assert growth[0] > 4 * per_block


def test_a_block_that_returns_another_shape_is_refused(mesh_of):
    opt = so.fsdp(
        optax.sgd(0.1),
        mesh_of(data=2),
        model_of(lambda w, x: {"x": x["x"].astype(jnp.bfloat16), "count": 0}),
    )
    state = opt.init(params_of(2))
    with pytest.raises(ValueError, match="a block must return") as error:
        opt.step(state, np.ones((ROWS, DIM), np.float32))
    assert (
        str(error.value)
        == "fsdp: a block must return what it is given, int32[], float32[16, 32]; it returned"
        " int32[], bfloat16[16, 32].\nFix: let embed bring its result to the shape and dtype"
        " that blocks return, or cast at the end of the block."
    )
