"""A step like an earlier one goes straight to its compiled program, and keeps the checks of values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.models import gpt
from shardopt.step import _aliases as aliases
from shardopt.step import _build as build
from shardopt.step._step_counter import LAST_STEP

pytestmark = pytest.mark.fast

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
PARAMS = {"w": np.full((8, 8), 0.5, np.float32), "ref": np.full((8, 8), 0.25, np.float32)}


def loss_fn(params, batch):
    return batch["scale"] * jnp.mean((batch["x"] @ (params["w"] - 2 * params["ref"])) ** 2)


def strategy(mesh_of, name="ddp", **mesh):
    return getattr(so, name)(
        optax.adam(0.1), mesh_of(**(mesh or {"data": 4})), loss_fn, rules=[("ref", "frozen")]
    )


BATCHES = {
    "numpy": lambda opt: {"x": X, "scale": np.full((), 2, np.float32)},
    "a number": lambda opt: {"x": X, "scale": 2.0},
    "the rows of all": lambda opt: so.GlobalRows({"x": X, "scale": 2.0}),
    "placed": lambda opt: {
        "x": jax.device_put(X, NamedSharding(opt.mesh, P("data"))),
        "scale": jax.device_put(np.float32(2), NamedSharding(opt.mesh, P())),
    },
    "on one device": lambda opt: {"x": jnp.asarray(X), "scale": jnp.float32(2)},
    "64 bits": lambda opt: {"x": X.astype(np.float64), "scale": 2},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_repeated_step_is_the_same_step_and_prepares_nothing(mesh_of, monkeypatch, kind):
    opt = strategy(mesh_of)
    checked = strategy(mesh_of)
    state = opt.init(PARAMS)
    expected = checked.init(PARAMS)
    state, _ = opt.step(state, BATCHES[kind](opt))
    for _ in range(3):
        expected, expected_metrics = checked.step(expected, {"x": X, "scale": np.float32(2)})
    monkeypatch.setattr(build, "check_batch", lambda *_: pytest.fail("the form was checked"))
    for _ in range(2):
        state, metrics = opt.step(state, BATCHES[kind](opt))
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    np.testing.assert_array_equal(metrics["loss"], expected_metrics["loss"])
    assert int(state.step) == 3


def test_batches_of_several_forms_alternate(mesh_of):
    opt = strategy(mesh_of, "fsdp")
    state = opt.init(PARAMS)
    for rows in (16, 8, 16, 8, 4):
        values = np.asarray(state.params["w"] - 2 * state.params["ref"])
        state, metrics = opt.step(state, {"x": X[:rows], "scale": 1.0})
        np.testing.assert_allclose(metrics["loss"], np.mean((X[:rows] @ values) ** 2), rtol=1e-5)


@pytest.mark.parametrize("kind", ["numpy", "placed"])
def test_no_addresses_are_read_for_a_batch_with_as_many_bytes_as_a_leaf(mesh_of, monkeypatch, kind):
    """The mesh has one device, which has the whole rows."""
    opt = strategy(mesh_of, data=1)
    batch = BATCHES[kind](opt) | {"x": X[:8]}
    if kind == "placed":
        batch["x"] = jax.device_put(X[:8], NamedSharding(opt.mesh, P("data")))
    state = opt.init(PARAMS)
    for _ in range(2):
        state, _ = opt.step(state, batch)
    monkeypatch.setattr(aliases, "_addresses", lambda _: pytest.fail("addresses were read"))
    for _ in range(2):
        state, _ = opt.step(state, batch)


def same_sharding(leaf):
    return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, P(None, None)))


def by_shards(leaf):
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


SHARING = {
    "the leaf": lambda leaf: leaf,
    "another sharding": same_sharding,
    "its shards": by_shards,
    "a view of its memory": lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding),
}


@pytest.mark.parametrize("sharing", SHARING)
def test_a_batch_that_takes_memory_of_the_state_after_some_steps_is_read_first(mesh_of, sharing):
    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ (params["w"] - 2 * params["ref"])) ** 2)

    opt = so.ddp(optax.adam(0.1), mesh := mesh_of(data=1), loss_fn, rules=[("ref", "frozen")])
    placed = jax.device_put(X[:8], NamedSharding(mesh, P()))
    state = opt.init(PARAMS)
    for _ in range(3):
        state, _ = opt.step(state, {"x": placed})
    values = {name: np.array(leaf) for name, leaf in state.params.items()}
    rows = SHARING[sharing](state.params["w"])
    state, metrics = opt.step(state, {"x": rows})
    expected = np.mean((values["w"] @ (values["w"] - 2 * values["ref"])) ** 2)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(rows, values["w"])


def test_tokens_are_checked_at_every_step(mesh_of):
    model = gpt.model(gpt.config(dim=8, num_layers=1, num_heads=1))
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), model)
    state = opt.init(lambda rng: gpt.init(gpt.config(dim=8, num_layers=1, num_heads=1), rng))
    tokens = np.ones((2, 9), np.int32)
    for _ in range(2):
        state, _ = opt.step(state, {"tokens": tokens})
    for wrong in (300, -1):
        with pytest.raises(ValueError, match=f"{wrong}"):
            opt.step(state, {"tokens": tokens * wrong})
    state, _ = opt.step(state, {"tokens": tokens})


def test_integers_beyond_32_bits_are_refused_at_every_step(mesh_of):
    opt = strategy(mesh_of)
    state = opt.init(PARAMS)
    counts = np.ones((), np.int64)
    for _ in range(2):
        state, _ = opt.step(state, {"x": X, "scale": counts})
    with pytest.raises(ValueError, match="jax stores integers in 32 bits"):
        opt.step(state, {"x": X, "scale": counts << 40})


def test_states_are_checked_after_repeated_steps(mesh_of):
    opt = strategy(mesh_of)
    batch = {"x": X, "scale": 1.0}
    state = opt.init(PARAMS)
    for _ in range(2):
        before = state
        state, _ = opt.step(state, batch)
    with pytest.raises(ValueError, match="given to step already"):
        opt.step(before, batch)
    with pytest.raises(TypeError, match="the state must be the TrainState"):
        opt.step(state.params, batch)
    state, _ = opt.step(state._replace(step=LAST_STEP - 1), batch)
    with pytest.raises(ValueError, match="the last int32"):
        opt.step(state, batch)


def test_options_of_jax_hold_for_repeated_steps(mesh_of):
    opt = strategy(mesh_of)
    batch = {"x": X, "scale": np.ones((), np.float32)}
    state = opt.init(PARAMS)
    for _ in range(2):
        state, _ = opt.step(state, batch)
    with jax.transfer_guard("disallow"):
        state, _ = opt.step(state, batch)
    with jax.disable_jit(), pytest.raises(ValueError, match="jax_disable_jit is set"):
        opt.step(state, batch)
    assert opt.step.repeats.take(opt.init(PARAMS), batch) is None
    with jax.debug_nans(True):
        assert opt.step.repeats.take(state, batch) is None
    assert opt.step.repeats.take(state, batch) is not None


def test_a_state_stays_alive_if_a_repeated_step_is_refused(mesh_of):
    opt = strategy(mesh_of)
    state = opt.init(PARAMS)
    for _ in range(2):
        state, _ = opt.step(state, {"x": X, "scale": 1.0})
    for batch in ({"x": X[:3], "scale": 1.0}, {"x": X}, {"x": X.astype("U"), "scale": 1.0}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            opt.step(state, batch)
    state, _ = opt.step(state, {"x": X, "scale": 1.0})
    assert int(state.step) == 3


def test_the_last_parameters_are_those_of_the_last_step(mesh_of):
    opt = strategy(mesh_of)
    batch = {"x": X, "scale": 1.0}
    state = opt.init(PARAMS)
    for _ in range(2):
        state, _ = opt.step(state, batch)
    opt.specs({"w": np.ones((8, 2), np.float32), "ref": np.ones((8, 2), np.float32)})
    state, _ = opt.step(state, batch)
    assert opt.abstract_state().params["w"].shape == (8, 8)
