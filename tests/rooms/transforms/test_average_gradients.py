"""`average_gradients` against one device, wherever an axis can be bound, inside optax's combinators."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.tiers import tiered
from support.trajectory import trajectory

import shardopt as so

N = 3
STEPS = 5
DRAW = np.random.default_rng(0)
SHAPES = {"w": (4, 3), "b": (5,), "s": ()}
PARAMS = {name: DRAW.normal(size=shape) for name, shape in SHAPES.items()}
GRADS = {name: DRAW.normal(size=(N, STEPS, *shape)) for name, shape in SHAPES.items()}
LABELS = {"w": "one", "b": "two", "s": "two"}
ONLY_W = {"w": True, "b": False, "s": False}
R = so.reducers

average = functools.partial(so.transforms.average_gradients, "data")
EQUAL = {
    "average": (optax.chain(average(), optax.adamw(0.1)), optax.adamw(0.1)),
    "multi_transform": (
        optax.multi_transform(
            {"one": optax.chain(average(), optax.sgd(0.1)), "two": average()}, LABELS
        ),
        optax.multi_transform({"one": optax.sgd(0.1), "two": optax.identity()}, LABELS),
    ),
    "masked": (
        optax.chain(optax.masked(average(), ONLY_W), average(), optax.sgd(0.1)),
        optax.sgd(0.1),
    ),
    "injected": (
        optax.chain(
            average(),
            optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0, 9)),
        ),
        optax.adam(optax.linear_schedule(0.1, 0, 9)),
    ),
}


@pytest.mark.parametrize("name", tiered(EQUAL, lambda name: name in ("injected", "masked")))
def test_equal_to_one_device_wherever_the_axis_is_bound(name, ways, x64):
    tx, reference = EQUAL[name]
    means = jax.tree.map(lambda g: g.mean(0), GRADS)
    expected = jax.tree.map(
        lambda x: jnp.stack([x] * N), jax.jit(trajectory(reference, PARAMS))(means)
    )
    for way in ways if name == "average" else ("vmap", "shard_map"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
            ways[way](trajectory(tx, PARAMS), N)(GRADS),
            expected,
        )


def program(tx, mesh, size=4):
    """Return a jitted step over the stored form of the state, the state, and gradients."""
    params = {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
    stacked = so.transforms.on_mesh(tx, mesh, "data")
    state = stacked.init(params)
    specs = stacked.specs(state)

    def step(state, grads):
        updates, new_state = stacked.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return jax.tree.map(lambda u: u[None], updates), new_state

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P("data"), specs), check_vma=False
    )
    grads = jax.tree.map(lambda p: jnp.stack([p * (d + 1) for d in range(size)]), params)
    return jax.jit(run), state, grads


def test_it_sends_what_its_reducer_states(mesh_of):
    for reducer in (None, R.int8(), R.error_feedback(R.sign())):
        step, state, grads = program(average(reducer), mesh_of(data=4))
        audit = so.hlo.audit(step, state, grads, mesh=mesh_of(data=4))
        params = jax.tree.map(lambda g: g[0], grads)
        # one number says whether each state is its device's: 2 (N - 1) / N of 4 bytes
        check = 6 if jax.tree.leaves(state) else 0
        assert audit.total_wire_bytes == (reducer or R.exact()).wire_bytes(params, 4) + check


def test_a_second_step_does_not_compile(mesh_of):
    step, state, grads = program(average(R.error_feedback(R.int8())), mesh_of(data=4))
    for _ in range(4):
        _, state = jax.block_until_ready(step(state, grads))
    assert step._cache_size() <= 2, "once for the state as it was made, once as it is returned"


REDUCERS = {
    "exact": R.exact(),
    "bfloat16": R.exact(jnp.bfloat16),
    "int8": R.error_feedback(R.int8()),
    "sign": R.error_feedback(R.sign()),
    "top_k": R.error_feedback(R.top_k(density=0.5)),
    "power_sgd": R.error_feedback(R.power_sgd(rank=1)),
    "warm_up": R.error_feedback(R.warm_up(R.int8(), 2)),
}


@pytest.mark.parametrize("shape", tiered([[0], [0, 4], [4, 0]], lambda shape: shape == [0]))
@pytest.mark.parametrize(
    "dtype", tiered(["float32", "bfloat16", "complex64"], lambda dtype: dtype == "float32")
)
@pytest.mark.parametrize("name", REDUCERS)
def test_the_mean_of_an_empty_leaf_is_the_same_on_all_devices_for_types(
    name, dtype, shape, mesh_of
):
    params = {"empty": jnp.zeros(shape, dtype), "w": jnp.ones((4, 4), dtype)}
    chain = optax.chain(so.transforms.average_gradients("data", REDUCERS[name]), optax.adam(0.1))
    tx = so.transforms.on_mesh(chain, mesh_of(data=4), "data")
    state = jax.eval_shape(tx.init, params)
    grads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), params)
    updates, new_state = jax.eval_shape(tx.update, grads, state, params)  # types are checked
    assert updates["empty"].shape == tuple(shape)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


@pytest.mark.parametrize("name", REDUCERS)
def test_parameters_may_have_none_in_the_place_of_leaves(name):
    params = {"bias": None, "w": jnp.ones((8, 8)), "norm": [None, jnp.ones(3)], "head": None}
    reducer = REDUCERS[name]

    def reduce(grads):
        return reducer.reduce(grads, reducer.init(grads), "data")

    grads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params)
    mean, _ = jax.eval_shape(jax.vmap(reduce, axis_name="data"), grads)
    assert jax.tree.structure(mean) == jax.tree.structure(params)
