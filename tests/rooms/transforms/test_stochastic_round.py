"""`stochastic_round`: bfloat16 parameters drift as fp32 ones would, and exactly alike on any number
of devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import same_bits
from support.table import STRATEGIES

import shardopt as so


@pytest.mark.slow  # test_each_neighbour_is_as_likely_as_the_other_is_far
def test_what_nearest_rounding_loses_is_kept_on_average():
    params = {"w": jnp.full((256, 16), 1.5, jnp.bfloat16), "b": jnp.full(8, 1.5)}
    step = {"w": jnp.full((256, 16), 1e-4, jnp.bfloat16), "b": jnp.full(8, 1e-4)}

    def train(tx):
        def one(carry, _):
            params, state = carry
            updates, state = tx.update(step, state, params)
            return (optax.apply_updates(params, updates), state), None

        (last, state), _ = jax.jit(
            lambda: jax.lax.scan(one, (params, tx.init(params)), None, 200)
        )()
        return jax.tree.map(lambda x: x.astype(jnp.float32), last), state

    nearest, _ = train(optax.sgd(1.0))
    rounded_params, state = train(so.transforms.stochastic_round(optax.sgd(1.0, momentum=0.0)))
    assert (nearest["w"] == 1.5).all()
    np.testing.assert_allclose(rounded_params["w"].mean(), 1.5 - 200e-4, atol=2e-4)
    np.testing.assert_allclose(rounded_params["b"], 1.5 - 200e-4, rtol=1e-5)
    assert {x.dtype for x in jax.tree.leaves(state.inner)} == {jnp.dtype(jnp.float32)}


def test_each_neighbour_is_as_likely_as_the_other_is_far_and_what_is_not_finite_stays():
    tx = so.transforms.stochastic_round(optax.identity())
    params = jnp.zeros(20_000, jnp.bfloat16)
    wanted = jnp.full(20_000, 1 + 2.0**-7 / 4).at[0].set(jnp.nan).at[1].set(jnp.inf)
    updates, _ = tx.update(wanted, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert jnp.isnan(new[0])
    assert jnp.isinf(new[1])
    values, counts = np.unique(np.asarray(new[2:], np.float32), return_counts=True)
    assert values.tolist() == [1.0, 1 + 2.0**-7]
    np.testing.assert_allclose(counts / counts.sum(), [0.75, 0.25], atol=0.015)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"].astype(jnp.float32)) ** 2)


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_draws_do_not_depend_on_the_devices(strategy, mesh_of):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)), jnp.bfloat16)}
    batches = [np.eye(32, dtype=np.float32)] * 3  # sums of one term: gradients are equal to the bit
    ends = []
    for data in (1, 8):
        tx = so.transforms.stochastic_round(optax.adam(1e-3))
        opt = STRATEGIES[strategy](tx, mesh_of(data=data), loss_fn)
        state = opt.init(params)
        for batch in batches:
            state, metrics = opt.step(state, batch)
            jax.block_until_ready(metrics)
        ends.append(state.params)
    same_bits(*ends)


def test_it_needs_the_parameters_and_a_seed():
    tx = so.transforms.stochastic_round(optax.sgd(1.0))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    assert (
        str(caught.value)
        == "stochastic_round: update needs the parameters.\nFix: call update(grads, state, params)."
    )
    with pytest.raises(ValueError, match=r"^stochastic_round: seed must be at least 0, got -1\.$"):
        so.transforms.stochastic_round(optax.sgd(1.0), seed=-1)
