"""What stands for several replicas where their number changes: one rule, for every dtype and every
way to restore.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from shardopt.core._types import merge_replicas
from shardopt.local_updates._state import PerReplica
from shardopt.transforms._eight_bit import EightBitState

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
KEYS = jax.random.split(jax.random.key(3), 2)
RULE = {
    "floating: the mean": (jnp.array([[1.0, 2.0], [3.0, 6.0]]), [2.0, 4.0]),
    "bfloat16: the mean, summed wider": (jnp.ones((512, 1), jnp.bfloat16), [1.0]),
    "complex: the mean": (jnp.array([[1j], [3.0]]), [1.5 + 0.5j]),
    "signed: the maximum": (jnp.array([[-4, 5], [-1, 2]]), [-1, 5]),
    "unsigned: the maximum": (jnp.array([[4, 5], [1, 7]], jnp.uint8), [4, 7]),
    "booleans: the maximum": (jnp.array([[False, True], [False, False]]), [False, True]),
}


@pytest.mark.parametrize("rule", RULE)
def test_one_rule_for_every_dtype(rule):
    stacked, merged = RULE[rule]
    merged_leaf = merge_replicas(stacked)
    assert merged_leaf.dtype == stacked.dtype
    assert merged_leaf.tolist() == merged
    assert merge_replicas(stacked.T, axis=1).tolist() == merged


def test_the_first_of_several_random_keys_is_taken():
    assert jnp.array_equal(jax.random.key_data(merge_replicas(KEYS)), jax.random.key_data(KEYS[0]))


@pytest.mark.parametrize("new", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_restored_replicas_follow_it(new, tmp_path):
    per_replica = PerReplica(
        {rule: stacked for rule, (stacked, _) in RULE.items()} | {"keys": KEYS}
    )
    state = so.TrainState(jnp.int32(1), {"w": jnp.ones(2)}, per_replica, jnp.zeros(2, jnp.uint32))
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=HERE), state
    )

    def stack(leaf):
        return jax.ShapeDtypeStruct((new, *leaf.shape[1:]), leaf.dtype, sharding=HERE)

    wanted = placed._replace(opt_state=jax.tree.map(stack, per_replica))
    so.save(tmp_path, state)
    restored = so.restore(tmp_path, wanted)
    for name, leaf in restored.opt_state.value.items():
        merged = merge_replicas(per_replica.value[name])
        assert leaf.shape == (new, *merged.shape)
        for replica in leaf:
            assert jnp.array_equal(*map(as_numbers, (replica, merged)))


def test_there_is_no_mean_of_codes(tmp_path):
    codes = EightBitState(
        {"mu": jnp.ones((2, 4), jnp.uint8), "count": jnp.ones(2, int)}, {"mu": jnp.ones((2, 1))}
    )
    state = so.TrainState(
        jnp.int32(1), {"w": jnp.ones(2)}, PerReplica(codes), jnp.zeros(2, jnp.uint32)
    )
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=HERE), state
    )
    wanted = placed._replace(
        opt_state=jax.tree.map(lambda x: x.update(shape=(3, *x.shape[1:])), placed.opt_state)
    )

    so.save(tmp_path, state)
    with pytest.raises(
        so.errors.CheckpointError,
        match="moments in 8 bits of each replica, and there is no mean of codes",
    ) as error:
        so.restore(tmp_path, wanted)
    assert "opt_state/value/state/mu: the checkpoint holds uint8[2, 4], " in str(error.value)
    assert str(error.value).count("the checkpoint holds") == 1, "counts and scales are numbers"
    assert jnp.array_equal(
        so.restore(tmp_path, placed).opt_state.value.state["mu"], codes.state["mu"]
    )


def as_numbers(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_error_feedback_memory_follows_it(mesh_of):
    memory = {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}
    stacked = so.transforms.on_mesh(optax.identity(), mesh_of(data=3), "data")
    resized_state = stacked.resized(so.reducers.ErrorFeedback(memory))
    assert resized_state.value["w"].tolist() == [[2.0, 4.0]] * 3
