"""A step like an earlier one goes straight to its compiled program, and keeps the checks of values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.host import host_params

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


@pytest.fixture(scope="module")
def after_three_steps(mesh_of):
    opt = strategy(mesh_of)
    state = opt.init(PARAMS)
    for _ in range(3):
        state, metrics = opt.step(state, {"x": X, "scale": np.float32(2)})
    return jax.device_get((state.params, metrics["loss"]))


@pytest.mark.parametrize("kind", BATCHES)
def test_a_repeated_step_is_the_same_step_and_prepares_nothing(
    mesh_of, monkeypatch, after_three_steps, kind
):
    opt = strategy(mesh_of)
    state, _ = opt.step(opt.init(PARAMS), BATCHES[kind](opt))
    monkeypatch.setattr(build, "check_batch", lambda *_: pytest.fail("the form was checked"))
    for _ in range(2):
        state, metrics = opt.step(state, BATCHES[kind](opt))
    jax.tree.map(np.testing.assert_array_equal, (state.params, metrics["loss"]), after_three_steps)
    assert int(state.step) == 3


def test_batches_of_several_forms_alternate(mesh_of):
    opt = strategy(mesh_of, "fsdp")
    state = opt.init(PARAMS)
    for rows in (16, 8, 16, 8, 4):
        values = np.asarray(state.params["w"] - 2 * state.params["ref"])
        state, metrics = opt.step(state, {"x": X[:rows], "scale": 1.0})
        np.testing.assert_allclose(metrics["loss"], np.mean((X[:rows] @ values) ** 2), rtol=1e-5)


@pytest.mark.parametrize("kind", ["numpy", "placed once", "placed anew", "not committed"])
def test_no_addresses_are_read_for_a_batch_with_as_many_bytes_as_a_leaf(mesh_of, monkeypatch, kind):
    """The mesh has one device, which has the whole rows."""
    opt = strategy(mesh_of, data=1)
    placed = jax.device_put(X[:8], NamedSharding(opt.mesh, P("data")))

    rows = {
        "numpy": lambda: X[:8],
        "placed once": lambda: placed,
        "placed anew": lambda: jax.device_put(X[:8], placed.sharding),
        "not committed": lambda: jnp.asarray(X[:8]),
    }[kind]

    def batch():
        return {"x": rows(), "scale": 1}

    state = opt.init(PARAMS)
    for _ in range(2):
        state, _ = opt.step(state, batch())
    monkeypatch.setattr(aliases, "_addresses", lambda _: pytest.fail("addresses were read"))
    for _ in range(2):
        last = batch()
        state, _ = opt.step(state, last)
        np.testing.assert_array_equal(last["x"], X[:8])
        assert getattr(last["x"], "committed", None) == getattr(rows(), "committed", None)


def test_only_arrays_that_may_be_memory_of_the_state_are_copied(mesh_of, monkeypatch):
    """An integer of as many bytes is not, nor is an array that an earlier step had."""
    opt = strategy(mesh_of, data=1)
    rows = NamedSharding(opt.mesh, P("data"))
    known = jax.device_put(X[:8], rows)
    state = opt.init(PARAMS)
    for array in (known, known, jax.device_put(X[:8].astype(np.int32), rows)):
        state, _ = opt.step(state, {"x": array, "scale": 1.0})
    integers = jax.device_put(X[:8].astype(np.int32), rows)
    monkeypatch.setattr(aliases, "_copy_to", lambda _: pytest.fail("an array was copied"))
    for array in (known, integers):
        state, _ = opt.step(state, {"x": array, "scale": 1.0})


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
    config = gpt.config(dim=8, num_layers=1, num_heads=1)
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), gpt.model(config))
    state = opt.init(host_params(gpt.init, config))
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


def some_shards(leaf):
    """An array that is the leaf on the last device alone."""
    shards = [np.array(shard.data) for shard in leaf.addressable_shards]
    devices = [shard.device for shard in leaf.addressable_shards]
    arrays = list(map(jax.device_put, shards, devices))
    arrays[-1] = leaf.addressable_shards[-1].data
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


@pytest.mark.parametrize("sharing", SHARING | {"one shard": some_shards})
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_fresh_array_of_each_step_may_be_memory_of_the_state(mesh_of, strategy, sharing):
    """No call had the array before, and its values stay as they are."""
    options = {"min_shard_elements": 1} if strategy == "fsdp" else {}
    opt = getattr(so, strategy)(
        optax.adam(0.1), mesh_of(data=2), loss_fn, rules=[("ref", "frozen")], **options
    )
    share = (SHARING | {"one shard": some_shards})[sharing]
    state = opt.init(PARAMS)
    alone = jax.device_put(PARAMS["w"], state.params["w"].sharding)
    state, _ = opt.step(state, {"x": alone, "scale": 1.0})
    rows = []
    for _ in range(4):
        values = np.array(state.params["w"])
        reference = np.array(state.params["ref"])
        rows.append((share(state.params["w"]), values))
        state, metrics = opt.step(state, {"x": rows[-1][0], "scale": 1.0})
        expected = np.mean((values @ (values - 2 * reference)) ** 2)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    for array, values in rows:
        np.testing.assert_array_equal(array, values)


def test_a_leaf_that_changes_after_good_steps_is_taken_as_it_is(mesh_of):
    """Shape, dtype, weak type and placement: each is another form, with its own checks."""

    def loss_fn(params, batch):
        scaled = params["w"] * batch["scale"]
        return jnp.mean((batch["x"] @ scaled) ** 2), {"bytes": jnp.float32(scaled.dtype.itemsize)}

    opt = so.ddp(optax.sgd(0.01), mesh := mesh_of(data=4), loss_fn)
    state = opt.init({"w": np.full((8, 8), 0.5, jnp.bfloat16)})
    batch = {"x": X, "scale": 1.0}
    for _ in range(5):
        state, metrics = opt.step(state, batch)
        assert metrics["bytes"] == 2
    changes = {
        "weak type": {"scale": np.float32(1)},
        "shape": {"x": X[:8]},
        "dtype": {"x": X.astype(np.int32)},
        "sharding": {"x": jax.device_put(X, NamedSharding(mesh, P()))},
        "another mesh": {"x": jax.device_put(X, NamedSharding(mesh_of(data=2), P("data")))},
    }
    for name, change in changes.items():
        values = np.asarray(state.params["w"], np.float32)
        state, metrics = opt.step(state, batch | change)
        expected = np.mean((np.float32((batch | change)["x"]) @ values) ** 2)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=0.03)
        assert metrics["bytes"] == (4 if name == "weak type" else 2)
    with pytest.raises(ValueError, match="not divisible by 4 devices"):
        opt.step(state, batch | {"x": X[:6]})
    state, metrics = opt.step(state, batch)
    assert int(state.step) == 11


def test_a_batch_that_was_deleted_is_refused_and_the_state_stays(mesh_of):
    """XLA would end the process."""
    opt = strategy(mesh_of)
    state = opt.init(PARAMS)
    placed = jax.device_put(X, NamedSharding(opt.mesh, P("data")))
    for _ in range(5):
        state, _ = opt.step(state, {"x": placed, "scale": 1.0})
    jax.jit(lambda x: x + 1, donate_argnums=0)(placed)
    message = (
        "ddp: the batch has arrays that were deleted.\n  x\nFix: a function that donates them took"
        " their memory: pass it a copy, by jnp.copy."
    )
    for run in (opt.step, opt.evaluate):
        with pytest.raises(ValueError, match=f"^{message}$"):
            run(state, {"x": placed, "scale": 1.0})
    state, _ = opt.step(state, {"x": X, "scale": 1.0})
    assert int(state.step) == 6
