"""`fit` with replicas evaluates, saves and returns between two agreements. It refuses a run whose
replicas never agree.
"""

import jax
import numpy as np
import optax
import pytest

import shardopt as so


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="module")
def opt(strategy_of):
    return so.diloco(strategy_of("fsdp"), sync_every=4)


def test_it_returns_the_mean_and_saves_what_goes_on(
    opt, new_params, new_batches, steps_on, tmp_path
):
    """Six steps with H = 4: evaluated at 4 as agreed on.

    At the end, only because it ends, as returned.
    """
    batches = new_batches(6)
    held_out = new_batches(2, seed=1)
    evaluate = so.training.evaluation(opt, held_out)
    with so.Checkpoints(tmp_path, every=100, keep=None, best="val_loss") as checkpoints:
        result = so.fit(
            opt,
            opt.init(new_params()),
            batches,
            num_steps=6,
            evaluate=(evaluate, 4),
            checkpoints=checkpoints,
            progress=False,
        )
        saved, _ = checkpoints.restore(opt, step=6)
        assert checkpoints.best_step() is None  # its own parameters were not evaluated
    agreed, _ = steps_on(opt, opt.init(new_params()), batches[:4])
    at_4 = evaluate(agreed)
    state, _ = steps_on(opt, agreed, batches[4:])
    mean = opt.synchronize(state)
    assert not equal(jax.device_get(mean.params), jax.device_get(state.params))
    assert equal(jax.device_get(result.state), jax.device_get(mean))
    assert equal(jax.device_get(saved), jax.device_get(state))
    values = {
        record["step"]: record["val_loss"] for record in result.history if "val_loss" in record
    }
    assert values == {4: at_4["val_loss"], 6: evaluate(mean)["val_loss"]}
    assert abs(values[6] - evaluate(state)["val_loss"]) > 1e-4


def test_a_scheduled_evaluation_is_of_what_they_share_at_the_last_step_too(
    opt, new_params, new_batches, steps_on
):
    batches = new_batches(6)
    evaluate = so.training.evaluation(opt, new_batches(2, seed=1))
    result = so.fit(
        opt,
        opt.init(new_params()),
        batches,
        num_steps=6,
        evaluate=(evaluate, 3),
        progress=False,
    )
    state, _ = steps_on(opt, opt.init(new_params()), batches)
    wanted = {3: evaluate(opt.init(new_params())), 6: evaluate(state)}
    assert [(record["step"], record["val_loss"]) for record in result.history] == [
        (s, v["val_loss"]) for s, v in wanted.items()
    ]
    assert equal(jax.device_get(result.state), jax.device_get(opt.synchronize(state)))


def test_no_step_left_returns_the_mean_too(opt, new_params, new_batches, steps_on):
    state, _ = steps_on(opt, opt.init(new_params()), new_batches(6))
    mean = jax.device_get(opt.synchronize(state))
    assert equal(jax.device_get(so.fit(opt, state, [], num_steps=6, progress=False).state), mean)


NEVER = (
    "fit: num_steps={} ends before the replicas of {} first synchronize, at step {} ({}).\n"
    "Fix: train for as many steps at least, or make sync_every smaller."
)


@pytest.mark.parametrize(
    ("how", "first", "said"),
    [
        ({"sync_every": 500}, 500, "sync_every=500"),
        ({"sync_every": 12, "fragments": 3, "delay": 2}, 6, "sync_every=12, fragments=3, delay=2"),
    ],
)
def test_a_run_in_which_they_never_agree_is_refused(
    how, first, said, strategy_of, new_params, new_batches
):
    opt = so.diloco(strategy_of("ddp"), **how)
    state = opt.init(new_params())
    drawn = []
    batches = (drawn.append(True) or batch for batch in new_batches(6))
    with pytest.raises(ValueError, match="first synchronize") as caught:
        so.fit(opt, state, batches, num_steps=first - 1, progress=False)
    assert str(caught.value) == NEVER.format(first - 1, "diloco", first, said)
    assert drawn == []
    assert not state.step.is_deleted()
    assert so.fit(opt, state, [], num_steps=first, progress=False).stopped == "exhausted"


@pytest.mark.slow
def test_in_the_warm_up_they_agree_in_every_step(strategy_of, new_params, new_batches):
    opt = so.local_sgd(strategy_of("ddp"), sync_every=50, warmup_steps=2)
    rule = so.training.EarlyStopping("val_loss", patience=30)
    evaluate = so.training.evaluation(opt, new_batches(1))
    how = {"evaluate": (evaluate, 2), "early_stopping": rule, "progress": False}
    assert so.fit(opt, opt.init(new_params()), new_batches(3), num_steps=3, **how).step == 3


@pytest.mark.slow
def test_early_stopping_waits_for_parameters_that_an_agreement_changes(
    strategy_of, new_params, new_batches
):
    """H = 4, evaluated every 2 steps, patience 2: at 2, 4 (another value), 6, 8 (another)."""
    opt = so.local_sgd(strategy_of("ddp", optax.sgd(0.01)), sync_every=4)
    (held_out,) = new_batches(1)
    result = so.fit(
        opt,
        opt.init(new_params()),
        [held_out] * 8,
        num_steps=8,
        evaluate=(so.training.evaluation(opt, [held_out]), 2),
        early_stopping=so.training.EarlyStopping("val_loss", patience=2),
        progress=False,
    )
    values = [record["val_loss"] for record in result.history]
    assert result.stopped == "completed"
    assert values[0] > values[1] == values[2] > values[3]
