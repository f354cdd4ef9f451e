"""max_staleness=0 is ddp on the union batch, on threads and in the simulator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import OPTIMIZERS, relative_difference
from support.tiers import tiered

import shardopt as so

WORKERS = 4


def ddp(tx, loss_fn, params, batches, data, rng=None):
    opt = so.ddp(tx, so.make_mesh(data=data, devices=jax.devices()[:data]), loss_fn)
    state = opt.init(params, rng)
    losses = []
    for batch in batches:
        state, metrics = opt.step(state, batch)
        losses.append(jax.device_get(metrics))
    return jax.device_get(state.params), losses


@pytest.mark.parametrize(
    ("optimizer", "weighted"), tiered([("momentum", False), ("adamw", True)], lambda row: row[1])
)
def test_threads_without_staleness_equal_ddp(optimizer, weighted, odd, x64):
    case, batches_of = odd(weighted)
    tx = OPTIMIZERS[optimizer]()
    devices = jax.devices()[:1] * WORKERS  # one program for all
    opt = so.async_sgd(tx, case.loss_fn, workers=devices)
    result = opt.run(case.params, batches_of(WORKERS), num_updates=len(case.batches))
    expected, losses = ddp(tx, case.loss_fn, case.params, case.batches, WORKERS)
    assert relative_difference(result.params, expected) <= 1e-12
    np.testing.assert_allclose(
        result.metrics["history"]["loss"],
        [step_metrics["loss"] for step_metrics in losses],
        rtol=1e-12,
    )
    assert result.metrics["stopped"] == "completed"
    assert (
        result.metrics["staleness"] == result.metrics["delay"] == {0: WORKERS * len(case.batches)}
    )


# test_threads_without_staleness_equal_ddp; test_the_mathematics_is_real checks the simulator's gradients
@pytest.mark.slow
def test_the_simulator_without_staleness_equals_ddp(odd, x64):
    case, batches_of = odd(weighted=True)
    tx = OPTIMIZERS["clip_adamw"]()
    speeds = [so.parameter_server.SimulatedWorker(seconds) for seconds in (5.0, 1.0, 3.0, 1.0)]
    result = so.parameter_server.simulate(
        speeds,
        num_updates=6,
        tx=tx,
        loss_fn=case.loss_fn,
        params=case.params,
        batches_of=batches_of(WORKERS),
    )
    expected, _ = ddp(tx, case.loss_fn, case.params, case.batches, WORKERS)
    assert relative_difference(result.params, expected) <= 1e-12
    assert result.metrics["seconds"] == 30.0


@pytest.mark.slow  # test_threads_without_staleness_equal_ddp, and test_replay.py with several devices
def test_threads_that_drive_several_devices_equal_ddp(odd, x64):
    case, batches_of = odd(weighted=True)
    tx = OPTIMIZERS["adamw"]()
    devices = jax.devices()
    opt = so.async_sgd(tx, case.loss_fn, workers=[devices[0:2], so.make_mesh(devices=devices[2:4])])
    result = opt.run(case.params, batches_of(2), num_updates=len(case.batches))
    expected, _ = ddp(tx, case.loss_fn, case.params, case.batches, 4)
    assert relative_difference(result.params, expected) <= 1e-12
    assert result.log.header["devices"] == [2, 2]


@pytest.mark.slow  # test_async_local_sgd.py replays a loss with a key
def test_a_loss_with_rng_draws_what_ddp_draws(x64):
    def loss_fn(params, batch, rng):
        noise = jax.random.normal(rng, batch["x"].shape, batch["x"].dtype)
        return jnp.mean(((batch["x"] + noise) @ params["w"] - 1.0) ** 2), {"noise": jnp.mean(noise)}

    draw = np.random.default_rng(0)
    batches = [{"x": draw.normal(size=(8, 3))} for _ in range(4)]
    params = {"w": jnp.ones(3)}
    key = jax.random.key(7)
    expected, metrics = ddp(optax.sgd(0.1), loss_fn, params, batches, 2, key)
    opt = so.async_sgd(optax.sgd(0.1), loss_fn, workers=jax.devices()[:1] * 2)

    def cut(worker):
        return ({"x": batch["x"][4 * worker : 4 * worker + 4]} for batch in batches)

    result = opt.run(params, cut, num_updates=4, rng=key)
    assert relative_difference(result.params, expected) <= 1e-12
    np.testing.assert_allclose(
        result.metrics["history"]["noise"], [row["noise"] for row in metrics], rtol=1e-12
    )
    replayed_params = opt.replay(result.log, params, cut)
    np.testing.assert_array_equal(replayed_params["w"], result.params["w"])


def test_unequal_batches_are_one_union_batch(x64):
    """A mean over 6 rows counts three times as much as a mean over 2."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(8, 3))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1.0) ** 2)

    params = {"w": jnp.zeros(3)}
    tx = optax.sgd(0.1, momentum=0.9)
    shares = [rows[:2], rows[2:]]
    result = so.async_sgd(tx, loss_fn, workers=2).run(
        params, lambda worker: [shares[worker]] * 5, num_updates=5
    )
    expected, _ = ddp(tx, loss_fn, params, [rows] * 5, 1)
    assert relative_difference(result.params, expected) <= 1e-12


def test_a_block_model_trains_too(x64):
    model = so.BlockModel(
        embed=lambda outer, batch: batch * outer["scale"],
        block=lambda w, x: jnp.tanh(x @ w),
        loss=lambda outer, x, batch: so.losses.Weighted(((x - 1.0) ** 2).sum(), 3.0 * x.shape[0]),
    )
    draw = np.random.default_rng(0)
    params = {"blocks": draw.normal(size=(2, 3, 3)), "scale": np.ones(())}
    batches = list(draw.normal(size=(3, 8, 3)))

    def cut(worker):
        return (batch[4 * worker : 4 * worker + 4] for batch in batches)

    result = so.async_sgd(optax.sgd(0.1), model, workers=jax.devices()[:1] * 2).run(
        params, cut, num_updates=3
    )
    expected, _ = ddp(optax.sgd(0.1), model, params, batches, 2)
    assert relative_difference(result.params, expected) <= 1e-12


def test_random_keys_among_the_parameters_are_refused(message_of):
    params = {
        "w": jnp.zeros(3),
        "dropout": jax.random.key(0),
        "streams": jax.random.split(jax.random.key(1), 2),
    }

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    message = (
        "{}: 2 parameter leaves would be the same random key at every step, with the same"
        " dropout.\n  dropout\n  streams\nFix: let the loss take a keyword rng, a new key each"
        " step, and leave keys out of the parameters (so.interop.nnx does both for an nnx module)."
    )
    opt = so.async_sgd(optax.sgd(0.1), loss_fn, workers=2)
    error_text = message_of(
        ValueError, opt.run, params, lambda worker: [np.ones((2, 3))], num_updates=1
    )
    assert error_text == message.format("async_sgd")
    real = {
        "tx": optax.sgd(0.1),
        "loss_fn": loss_fn,
        "params": params,
        "batches_of": lambda worker: [np.ones((2, 3))],
    }
    error_text = message_of(ValueError, so.parameter_server.simulate, 2, num_updates=1, **real)
    assert error_text == message.format("simulate")


RULES = {
    "plain": so.parameter_server.rules.plain(),
    "nesterov": so.parameter_server.rules.delayed_nesterov(2),
}


@pytest.mark.parametrize("rule", tiered(RULES, lambda rule: rule == "nesterov"))
def test_the_server_refuses_a_push_with_an_anomaly(rule, odd, x64):
    """Parameters, and the states of the optimizer and of the rule, equal a run without the batch."""
    case, _ = odd(weighted=True)
    bad = {**case.batches[2], "y": case.batches[2]["y"] * 1e4}

    def params_after(batches):
        tx = so.transforms.skip_anomalies(optax.sgd(0.05, momentum=0.9), 1e4, 1e4, window=2)
        opt = so.async_sgd(tx, case.loss_fn, workers=1, rule=RULES[rule])
        return opt.run(case.params, lambda worker: iter(batches), num_updates=len(batches)).params

    refused = params_after([*case.batches[:2], bad, *case.batches[2:5]])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(refused))
    assert relative_difference(refused, params_after(case.batches[:5])) == 0
