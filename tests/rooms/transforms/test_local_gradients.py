"""Gradients reach their mean as the loss gave them: clips and means before it are refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so

T = so.transforms
R = so.reducers
SIZE = 4


def clipped_by_hand(grads, params=None):
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 1, jnp.sign(g), g), grads)


CHANGED = {
    "global norm": optax.clip_by_global_norm(1.0),
    "elements": optax.clip(1.0),
    "block": optax.clip_by_block_rms(1.0),
    "adaptive": optax.adaptive_grad_clip(0.1),
    "normalized": optax.normalize_by_update_norm(),
    "masked": optax.masked(optax.clip(1.0), {"w": True, "b": False}),
    "injected": optax.inject_hyperparams(optax.clip)(max_delta=1.0),
    "by hand": optax.stateless(clipped_by_hand),
    "adam": optax.scale_by_adam(),
    "signs": optax.scale_by_sign(),
}
LINEAR = {
    "nothing": optax.identity(),
    "scaled": optax.scale(1 / 128),
    "scheduled": optax.scale_by_schedule(lambda count: 1 / (count + 1)),
    "decayed": optax.add_decayed_weights(0.1),
    "centralized": optax.centralize(),
    "cast": optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g)),
    "masked": optax.masked(optax.scale(2.0), {"w": True, "b": False}),
}


def loss_fn(params, rows):
    hidden = jax.nn.relu(rows @ params["w"]) + params["b"]
    return jnp.mean(jnp.linalg.norm(hidden, axis=-1))


def accumulated(params, rows):
    """Return the sum of the gradients of single rows."""
    start = jax.tree.map(lambda p: 0 * p + 0 * rows.sum(), params)

    def add(total, row):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, row[None])), None

    return jax.lax.scan(add, start, rows)[0]


GRADS = {
    "grad": jax.grad(loss_fn),
    "jit": jax.jit(jax.grad(loss_fn)),
    "accumulated": accumulated,
    "recomputed": jax.grad(jax.checkpoint(loss_fn)),
    "by row": lambda params, rows: jax.tree.map(
        lambda g: g.sum(0), jax.vmap(jax.grad(loss_fn), (None, 0))(params, rows[:, None])
    ),
}
PARAMS = {"w": np.ones((4, 3), np.float32), "b": np.ones((1, 3), np.float32)}
ROWS = np.ones((2 * SIZE, 4), np.float32)


def under_shard_map(tx, grads_of, mesh, check_vma=True):
    def local(params, rows):
        own_params = jax.lax.pcast(params, "data", to="varying") if check_vma else params
        return tx.update(grads_of(own_params, rows), tx.init(params), params)[0]

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(step).lower(PARAMS, ROWS)


def under_pmap(tx, grads_of, mesh):
    def local(params, rows):
        return tx.update(grads_of(params, rows), tx.init(params), params)[0]

    step = jax.pmap(local, axis_name="data", devices=list(mesh.devices.flat))
    params = jax.tree.map(lambda leaf: np.stack([leaf] * SIZE), PARAMS)
    return step.lower(params, ROWS.reshape(SIZE, 2, 4))


def under_jit(tx, grads_of, mesh):
    stacked = T.on_mesh(tx, mesh, "data")
    grads_of_devices = T.per_device_grads(
        lambda params, rows: (jnp.zeros(()), grads_of(params, rows)), mesh, "data"
    )

    def step(params, state, rows):
        return stacked.update(grads_of_devices(params, rows)[1], state, params)

    return jax.jit(step).lower(PARAMS, stacked.init(PARAMS), ROWS)


LOOPS = {
    "shard_map": under_shard_map,
    "shard_map without types": lambda *args: under_shard_map(*args, check_vma=False),
    "pmap": under_pmap,
    "jit": under_jit,
}


@pytest.mark.parametrize(
    ("name", "loop", "how"),
    tiered(
        itertools.product(CHANGED, LOOPS, GRADS),
        lambda row: row[2] == "grad" and (row[0] == "global norm" or row[1] == "shard_map"),
        ids="-".join,
    ),
)
def test_gradients_that_are_clipped_before_their_mean_are_refused(name, loop, how, mesh_of):
    tx = optax.chain(CHANGED[name], T.average_gradients("data"), optax.sgd(1.0))
    with pytest.raises(
        ValueError, match=r"average_gradients: .* clipped, averaged,.*\n(.*\n)+Fix: put"
    ):
        LOOPS[loop](tx, GRADS[how], mesh_of(data=SIZE))


@pytest.mark.parametrize(
    ("name", "loop", "how"),
    tiered(
        itertools.product(LINEAR, LOOPS, GRADS),
        lambda row: row[1] == "shard_map" and (row[0] == "decayed" or row[2] == "grad"),
        ids="-".join,
    ),
)
def test_gradients_that_are_scaled_before_their_mean_are_averaged(name, loop, how, mesh_of):
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(LINEAR[name], T.average_gradients("data", R.int8()), clip, optax.adam(1.0))
    assert "all_to_all" in LOOPS[loop](tx, GRADS[how], mesh_of(data=SIZE)).as_text()


@pytest.mark.parametrize("how", ["grad", "jit"])
@pytest.mark.parametrize("loop", ["shard_map without types", "pmap"])
@pytest.mark.parametrize("between", ["nothing", "scaled", "cast"])
def test_gradients_that_are_averaged_before_are_refused_without_types_too(
    between, loop, how, mesh_of
):
    def averaged(params, rows):
        return jax.lax.pmean(GRADS[how](params, rows), "data")

    tx = optax.chain(LINEAR[between], T.average_gradients("data", R.int8()))
    with pytest.raises(
        ValueError, match=r"average_gradients: .* clipped, averaged,.*\n(.*\n)+Fix: put"
    ):
        LOOPS[loop](tx, averaged, mesh_of(data=SIZE))
