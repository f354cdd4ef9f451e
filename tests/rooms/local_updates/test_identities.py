"""The identities of algorithms.md, in float64: what DiLoCo is with H = 1, and with a plain outer
step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so

PLAIN = {"outer": optax.sgd(1.0), "sync_every": 1}


@pytest.mark.parametrize("name", tiered(["ddp", "fsdp", "hybrid"], lambda name: False))
def test_one_inner_step_of_sgd_and_a_plain_outer_step_is_the_strategy_alone(
    name, strategy_of, new_params, new_batches, steps_on, max_difference, x64
):
    sizes = {"pipeline": 2} if name == "hybrid" else {}
    inner = strategy_of(name, optax.sgd(0.05), **sizes)
    batches = new_batches(4)
    alone, metrics = steps_on(inner, inner.init(new_params()), batches)
    opt = so.diloco(inner, **PLAIN)
    state, _ = steps_on(opt, opt.init(new_params()), batches)
    assert max_difference(state.params, jax.device_get(alone.params)) < 1e-10
    assert float(metrics["loss"]) > 0


@pytest.mark.slow
def test_a_plain_outer_step_is_local_sgd(
    strategy_of, new_params, new_batches, steps_on, rows_of, max_difference, x64
):
    inner = strategy_of("fsdp")
    batches = new_batches(7)
    opts = [so.diloco(inner, outer=optax.sgd(1.0), sync_every=3), so.local_sgd(inner, sync_every=3)]
    runs = [steps_on(opt, opt.init(new_params()), batches) for opt in opts]
    assert max_difference(runs[0][0].params, jax.device_get(runs[1][0].params)) < 1e-10
    assert max_difference(rows_of(runs[0][0]), rows_of(runs[1][0])) < 1e-10
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs[0][1][name], runs[1][1][name], rtol=1e-12)


@pytest.mark.fast
def test_warm_up_is_the_strategy_alone_for_any_optimizer_and_any_weights(
    strategy_of, new_params, new_batches, steps_on, rows_of, max_difference, x64
):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
    inner = strategy_of("zero1", tx, weighted=True)
    batches = new_batches(3)
    alone, wanted = steps_on(inner, inner.init(new_params()), batches)
    opt = so.local_sgd(inner, sync_every=5, warmup_steps=3)
    state, metrics = steps_on(opt, opt.init(new_params()), batches)
    expected = jax.device_get(alone.params)
    assert max_difference(state.params, expected) < 1e-10
    assert max_difference(rows_of(state), [expected, expected]) < 1e-10
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-10)


def test_weights_count_within_a_replica_and_replicas_alike(
    strategy_of, new_params, new_batches, steps_on, rows_of, max_difference, model_of, x64
):
    """Each replica's gradient is that of sum(total) / sum(weight) over its own rows.

    The mean over replicas is plain.
    """
    opt = so.local_sgd(strategy_of("fsdp", optax.sgd(0.1), weighted=True), sync_every=9)
    (batch,) = new_batches(1)
    state, metrics = steps_on(opt, opt.init(new_params()), [batch])

    def loss(params, rows):
        weighted_loss = model_of(True).loss_fn(params, rows)
        return weighted_loss.total / weighted_loss.weight

    halves = [jax.tree.map(lambda x, i=i: np.split(x, 2)[i], batch) for i in range(2)]
    of_half = jax.jit(jax.value_and_grad(loss))
    results = [of_half(new_params(), half) for half in halves]
    replica_params = [
        jax.tree.map(lambda p, g: p - 0.1 * g, new_params(), grads) for _, grads in results
    ]
    assert max_difference(rows_of(state), replica_params) < 1e-10
    np.testing.assert_allclose(
        metrics["loss"], np.mean([float(value) for value, _ in results]), rtol=1e-10
    )


def noisy(params, batch, *, rng):
    keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return jnp.mean((jnp.where(keep, batch["x"], 0) @ params["w"]) ** 2)


@pytest.mark.slow  # contract/test_features.py
def test_each_replica_draws_its_own_numbers(
    strategy_of, new_batches, steps_on, max_difference, x64
):
    """The same ones as without the combinator, where replicas are a part of the data axis."""
    params = {"w": jnp.ones((3, 2))}
    inner = strategy_of("ddp", optax.sgd(0.05), model=noisy)
    (batch,) = new_batches(1)
    batch = {"x": np.ones_like(batch["x"])}  # only the numbers drawn tell replicas apart
    opt = so.diloco(inner, **PLAIN)
    alone, _ = steps_on(inner, inner.init(params, jax.random.key(7)), [batch] * 3)
    state, _ = steps_on(opt, opt.init(params, jax.random.key(7)), [batch] * 3)
    assert max_difference(state.params, jax.device_get(alone.params)) < 1e-10
    longer = so.local_sgd(inner, sync_every=5)
    state, _ = steps_on(longer, longer.init(params, jax.random.key(7)), [batch])
    first, second = np.asarray(state.opt_state.params.value["w"])
    assert np.abs(first - second).max() > 1e-3
