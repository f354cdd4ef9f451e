"""The same array in two places of a step's arguments: XLA would be given one buffer twice, and end
the process.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.step import _aliases as aliases

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
PARAMS = {"policy": np.full((8, 8), 0.5, np.float32), "ref": np.full((8, 8), 0.25, np.float32)}


def from_reference(params, batch):
    rows = batch["x"] if isinstance(batch, dict) else batch
    return jnp.mean((rows @ (params["policy"] - 2 * params["ref"])) ** 2)


def stepped(opt, params):
    """A state that a step returned, whose leaves share nothing; the frozen reference as given."""
    state, _ = opt.step(opt.init(params), X)
    return state


@pytest.mark.parametrize(
    "strategy", tiered(STRATEGIES, lambda name: name in ("ddp", "zero2", "fsdp"))
)
def test_a_leaf_that_is_the_same_array_as_another_is_trained_apart(strategy, mesh_of):
    opt = STRATEGIES[strategy](
        optax.adam(0.1), mesh_of(data=4), from_reference, rules=[("ref", "frozen")]
    )
    state = stepped(opt, PARAMS)
    policy = np.asarray(state.params["policy"])
    state = state._replace(params={"policy": state.params["policy"], "ref": state.params["policy"]})
    state, metrics = opt.step(state, X)
    np.testing.assert_allclose(metrics["loss"], np.mean((X @ policy) ** 2), rtol=1e-6)
    np.testing.assert_array_equal(state.params["ref"], policy)
    assert np.abs(state.params["policy"] - policy).min() > 0.05


def test_arrays_that_share_a_buffer_under_two_shardings_are_trained_apart(mesh_of):
    opt = so.ddp(
        optax.adam(0.1), mesh := mesh_of(data=4), from_reference, rules=[("ref", "frozen")]
    )
    state = stepped(opt, PARAMS)
    policy = state.params["policy"]
    other = jax.device_put(policy, NamedSharding(mesh, P()))
    other = jax.device_put(other, NamedSharding(mesh, P(None, None)))
    twice = {"policy": policy, "ref": other}
    assert (
        other.addressable_data(0).unsafe_buffer_pointer()
        == policy.addressable_data(0).unsafe_buffer_pointer()
    )
    values = np.array(policy)
    state, _ = opt.step(state._replace(params=twice), X)
    np.testing.assert_array_equal(state.params["ref"], values)


def test_parameters_that_are_moments_of_the_optimizer_too(mesh_of):
    opt = so.ddp(optax.adam(0.1), mesh_of(data=4), from_reference, rules=[("ref", "frozen")])
    state = stepped(opt, PARAMS)
    mean = state.opt_state[0].mu["policy"]
    values = np.array(mean)
    state, _ = opt.step(state._replace(params={"policy": state.params["policy"], "ref": mean}), X)
    np.testing.assert_array_equal(state.params["ref"], values)


def test_a_batch_may_hold_an_array_of_the_state(mesh_of):
    """The batch keeps its memory, and can be used again."""
    rules = [("ref", "frozen"), ("rows", "frozen")]
    opt = so.fsdp(
        optax.sgd(0.1), mesh := mesh_of(data=2), from_reference, rules=rules, min_shard_elements=8
    )
    state = opt.init({**PARAMS, "rows": X})
    for sharding in (
        state.params["rows"].sharding,
        NamedSharding(mesh, P("data")),
        NamedSharding(mesh, P()),
    ):
        rows = jax.device_put(state.params["rows"], sharding)
        state, _ = opt.step(state, {"x": rows})
        np.testing.assert_array_equal(rows, X)
        np.testing.assert_array_equal(state.params["rows"], X)


def test_leaves_may_be_numpy_arrays(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=4), from_reference, rules=[("ref", "frozen")])
    state = opt.init(PARAMS)._replace(step=np.int32(3))
    state, _ = opt.step(state, X)
    assert int(state.step) == 4


def test_replicas_that_train_apart_take_parameters_that_share_a_buffer(mesh_of):
    opt = so.local_sgd(
        so.ddp(optax.sgd(0.1), mesh_of(replica=2), from_reference, rules=[("ref", "frozen")]),
        sync_every=2,
    )
    state = stepped(opt, PARAMS)
    for _ in range(2):
        before = np.array(state.params["policy"])
        state, _ = opt.step(
            state._replace(
                params={"policy": state.params["policy"], "ref": state.params["policy"]}
            ),
            X,
        )
        np.testing.assert_array_equal(state.params["ref"], before)


def test_a_state_that_is_handed_back_as_it_came_is_not_looked_at(mesh_of, monkeypatch):
    opt = so.ddp(optax.adam(0.1), mesh_of(data=4), from_reference, rules=[("ref", "frozen")])
    state = stepped(opt, PARAMS)
    monkeypatch.setattr(aliases, "_addresses", lambda _: pytest.fail("addresses were read"))
    for _ in range(2):
        state, _ = opt.step(state, X)


@pytest.mark.slow  # the other tests of this file
def test_a_state_that_is_dropped_is_not_kept_alive(mesh_of):
    opt = so.ddp(optax.adam(0.1), mesh_of(data=4), from_reference, rules=[("ref", "frozen")])
    state = stepped(opt, PARAMS)
    alive = weakref.ref(state.params["policy"])
    del state
    gc.collect()
    assert alive() is None
