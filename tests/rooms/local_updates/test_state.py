"""The meaning of the state of replicas: synchronize, evaluate, frozen leaves, leaves that the loss
updates.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_synchronize_makes_all_equal_to_the_mean_and_a_second_time_changes_nothing(
    strategy_of, new_params, new_batches, steps_on, rows_of, max_difference, x64
):
    opt = so.diloco(strategy_of("fsdp"), sync_every=8, fragments=2)
    state, _ = steps_on(opt, opt.init(new_params()), new_batches(6))
    replica_params = rows_of(state)
    assert max_difference(replica_params[0], replica_params[1]) > 1e-3
    mean = jax.tree.map(lambda *x: sum(x) / 2, *replica_params)
    state = opt.synchronize(state)
    assert max_difference(state.params, mean) < 1e-12
    assert all(equal(row, jax.device_get(state.params)) for row in rows_of(state))
    once = jax.device_get(state)
    state = opt.synchronize(state)
    assert equal(jax.device_get(state), once)
    steps_on(opt, state, new_batches(1))  # and training goes on


REDUCERS = [None, so.reducers.error_feedback(so.reducers.top_k(0.2))]


@pytest.mark.parametrize(
    "reducer",
    tiered(
        REDUCERS, lambda parameter: False, ids=lambda parameter: getattr(parameter, "name", "exact")
    ),
)
def test_synchronize_leaves_nothing_on_its_way_that_would_count_twice(
    reducer, strategy_of, new_params, new_batches, steps_on, max_difference, x64
):
    """With an outer step of plain SGD, the mean already has the values that were sent before, and
    their remainder.
    """
    inner = strategy_of("ddp", optax.inject_hyperparams(optax.sgd)(learning_rate=0.05))
    opt = so.diloco(inner, outer=optax.sgd(1.0), sync_every=4, delay=2, reducer=reducer)
    batches = new_batches(6)
    # sent with step 5, due after step 6
    state, _ = steps_on(opt, opt.init(new_params()), batches[:5])
    state = so.replace(opt.synchronize(state), hyperparams={"learning_rate": 0.0})
    mean = jax.device_get(state.params)
    for _ in range(4):
        state, _ = steps_on(opt, state, batches)
        assert max_difference(state.params, mean) < 1e-12


@pytest.mark.slow  # test_synchronize_makes_all_equal_to_the_mean_and_a_second_time_changes_nothing
@pytest.mark.parametrize("delay", tiered([1, 2], lambda delay: delay == 2))
def test_synchronize_takes_back_no_more_than_what_is_on_its_way(
    delay, strategy_of, new_params, new_batches, steps_on, max_difference, rows_of, x64
):
    """No replica's parameters have the remainder of the first round. The mean moves by just this
    remainder when all else stands still.
    """
    inner = strategy_of("ddp", optax.inject_hyperparams(optax.sgd)(learning_rate=0.005), data=1)
    opt = so.diloco(inner, outer=optax.sgd(1.0), sync_every=4, delay=delay, reducer=REDUCERS[1])
    batches = new_batches(9)
    # the first round is over
    state, _ = steps_on(opt, opt.init(new_params()), batches[: 4 + delay])
    pending_update = jax.device_get(state.opt_state.reducer[0].now)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(pending_update))
    assert equal(jax.device_get(state.opt_state.reducer[0].before), pending_update)
    over = opt.synchronize(state)
    assert equal(jax.device_get(over.opt_state.reducer[0].now), pending_update)
    # the second is on its way, unless it arrives at once
    state, _ = steps_on(opt, state, batches[4 + delay :])
    in_flight = delay == 2
    now, before = map(jax.device_get, state.opt_state.reducer[0])
    assert equal(before, pending_update) == in_flight
    assert not equal(now, pending_update)
    state = opt.synchronize(state)
    reducer_state = jax.device_get(state.opt_state.reducer[0])
    assert equal(reducer_state.now, pending_update if in_flight else now)
    assert equal(reducer_state.before, reducer_state.now)
    mean = jax.device_get(state.params)
    state = so.replace(state, hyperparams={"learning_rate": 0.0})
    for _ in range(10):
        state, _ = steps_on(opt, state, batches[:8])
    assert max_difference(rows_of(state), [jax.device_get(state.params)] * 2) < 1e-12
    moved, owed = (sum(map(np.sum, jax.tree.leaves(tree))) for tree in (mean, reducer_state.now))
    moved -= sum(map(np.sum, jax.tree.leaves(jax.device_get(state.params))))
    assert abs(moved) > 1e-4
    np.testing.assert_allclose(moved, owed / 2, rtol=1e-9)


@pytest.mark.slow
def test_the_state_that_was_synchronized_can_be_trained_on(
    strategy_of, new_params, new_batches, steps_on
):
    """As in a synchronous strategy, a look at the mean in the middle of a round changes nothing
    about the run.
    """
    opt = so.diloco(strategy_of("fsdp"), sync_every=3)
    batches = new_batches(6)
    wanted, _ = steps_on(opt, opt.init(new_params()), batches)
    state, _ = steps_on(opt, opt.init(new_params()), batches[:4])
    before = jax.device_get(state)
    mean = opt.synchronize(state)
    assert not equal(jax.device_get(mean.params), before.params)
    assert equal(jax.device_get(state), before)  # all of it is still there
    assert np.isfinite(opt.evaluate(mean, batches[0])["loss"])
    state, _ = steps_on(opt, state, batches[4:])
    assert equal(jax.device_get(state), jax.device_get(wanted))


def test_evaluate_takes_the_shared_parameters(
    strategy_of, new_params, new_batches, steps_on, model_of, x64
):
    opt = so.local_sgd(strategy_of("fsdp"), sync_every=3)
    batches = new_batches(5)
    state, _ = steps_on(opt, opt.init(new_params()), batches)
    value = opt.evaluate(state, batches[0])["loss"]
    expected = jax.jit(model_of().loss_fn)(jax.device_get(state.params), batches[0])
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert int(state.step) == 5  # nothing was donated
    lowered = opt.evaluate.lower(state, batches[0])
    assert not [
        collective
        for collective in so.hlo.audit(lowered).of(axis="replica").collectives
        if collective.bytes > 64
    ]


@pytest.mark.slow  # the next test has a frozen leaf, which no outer step may move
def test_frozen_leaves_stay_and_are_in_no_fragment(
    strategy_of, new_params, new_batches, steps_on, rows_of
):
    inner = strategy_of("fsdp", options={"rules": [("^in$", "frozen")]})
    opt = so.diloco(inner, sync_every=2)
    state, _ = steps_on(opt, opt.init(new_params()), new_batches(4))
    for tree in (jax.device_get(state.params), *rows_of(state)):
        assert np.array_equal(tree["in"], new_params()["in"])
        assert not np.array_equal(tree["out"], new_params()["out"])
    assert len(state.opt_state.outer[0][0].trace) == len(jax.tree.leaves(new_params())) - 1


def with_statistics(params, batch):
    mean = 0.5 * params["mean"] + 0.5 * batch["x"].mean(0)
    loss = jnp.mean(((batch["x"] - params["mean"][None]) @ params["w"] - batch["y"]) ** 2)
    return loss, {
        "stats": so.losses.Updated(
            {"mean": mean, "seen": params["seen"] + 1 + jnp.int32(batch["x"][0, 0] > 0)}
        )
    }


@pytest.mark.parametrize("delay", tiered([0, 1], bool))
def test_leaves_that_the_loss_updates_are_averaged_when_replicas_agree(
    delay, strategy_of, new_batches, steps_on, x64
):
    """Each replica keeps its own between.

    The shared ones, which evaluation sees, follow at each agreement.
    """
    params = {"w": jnp.ones((3, 2)), "mean": jnp.zeros(3), "seen": jnp.int32(0)}
    inner = strategy_of(
        "ddp",
        optax.sgd(0.01),
        model=with_statistics,
        options={"rules": [("^mean$", "frozen")], "view": "unproved"},
    )
    opt = so.diloco(inner, sync_every=3, delay=delay)
    batches = new_batches(5)
    state = opt.init(params)
    replica_means = np.zeros((2, 3))
    shared = np.zeros(3)
    seen = np.zeros(2, int)
    for step, batch in enumerate(batches, start=1):
        state, _ = opt.step(state, batch)
        halves = np.split(batch["x"], 2)
        replica_means = 0.5 * replica_means + 0.5 * np.stack([half.mean(0) for half in halves])
        # integers take the maximum over the devices of a replica, too
        seen = (
            seen
            + 1
            + [max(int(quarter[0, 0] > 0) for quarter in np.split(half, 2)) for half in halves]
        )
        if step == 3 + delay:
            shared = replica_means.mean(0)
            replica_means = np.stack([shared] * 2)
            seen = np.full(2, seen.max())
        np.testing.assert_allclose(state.opt_state.params.value["mean"], replica_means, rtol=1e-12)
        np.testing.assert_allclose(state.params["mean"], shared, rtol=1e-12, atol=1e-15)
        assert np.array_equal(state.opt_state.params.value["seen"], seen)
    assert np.abs(replica_means[0] - replica_means[1]).max() > 1e-3


@pytest.mark.slow
def test_hyperparameters_are_one_number_for_all_replicas(
    strategy_of, new_params, new_batches, steps_on, rows_of
):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    outer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.25)
    opt = so.diloco(strategy_of("fsdp", tx), outer=outer, sync_every=2)
    state = opt.init(new_params())
    inside = "optimizer/value/learning_rate"
    outside = "outer/0/learning_rate"
    assert so.training.hyperparams(state) == {inside: 0.5, outside: 1.0, "momentum": 0.25}
    state = so.replace(state, hyperparams={inside: 0.0, outside: 0.5})
    assert so.training.hyperparams(state) == {inside: 0.0, outside: 0.5, "momentum": 0.25}
    state, _ = steps_on(opt, state, new_batches(3))
    # a rate of 0 reaches every replica
    assert all(equal(row, new_params()) for row in rows_of(state))
    state = so.replace(state, hyperparams={inside: np.array([0.0, 0.25])})
    assert so.training.hyperparams(state)[inside].tolist() == [0.0, 0.25]
    # the agreement follows, so look at the shared parameters: half a step
    state, _ = steps_on(opt, state, new_batches(1))
    assert not equal(jax.device_get(state.params), new_params())
    message = r"^replace: optimizer/value/learning_rate has shape \(2,\), got \(3,\)\.$"
    with pytest.raises(ValueError, match=message):
        so.replace(state, hyperparams={inside: np.ones(3)})
