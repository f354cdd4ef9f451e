"""Islands: without staleness they equal DiLoCo, otherwise they equal their log. They refuse bad
input.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference, same_bits
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import Log, rules

WORKERS = 2
STEPS = 3


def islands(loss_fn, tx=None, *, make=so.fsdp, size=2, count=WORKERS, **options):
    devices = jax.devices()
    return [
        make(
            tx or optax.adamw(0.01),
            so.make_mesh(devices=devices[size * i : size * (i + 1)]),
            loss_fn,
            **options,
        )
        for i in range(count)
    ]


@pytest.mark.slow  # test_streaming.py has a row of it in each run
@pytest.mark.parametrize(
    "outer", [pytest.param(None, id="nesterov"), pytest.param(optax.sgd(1.0), id="average")]
)
def test_without_staleness_it_is_diloco(outer, odd, x64):
    case, batches_of = odd(weighted=False, steps=6)
    inner = optax.adamw(0.01)
    replicas = so.make_mesh(replica=WORKERS, data=2, devices=jax.devices()[: 2 * WORKERS])
    opt = so.diloco(so.ddp(inner, replicas, case.loss_fn), outer=outer, sync_every=STEPS)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    ours = so.parameter_server.async_local_sgd(
        islands(case.loss_fn, inner, make=so.ddp), outer=outer, local_steps=STEPS, max_staleness=0
    )
    result = ours.run(case.params, batches_of(WORKERS), num_updates=len(case.batches) // STEPS)
    assert relative_difference(result.params, jax.device_get(state.params)) <= 1e-12
    assert result.metrics["pushes"] == 2 * WORKERS


@pytest.mark.parametrize(
    ("rule", "max_staleness", "steps"),
    tiered(
        [(None, None, [3, 1]), (rules.delayed_nesterov(every=2), 1, 2), (None, 0, 2)],
        lambda row: row[0] is not None,
    ),
)
def test_a_run_of_islands_is_replayed(rule, max_staleness, steps, regression, tmp_path):
    """The data of island 1 ends after two rounds, and island 0 goes on to its round 8."""
    first, second = steps if isinstance(steps, list) else (steps, steps)
    counts = {0: 8 * first, 1: 2 * second}

    def data(worker):
        return itertools.islice(regression.batches_of(2)(worker), counts[worker])

    strategies = islands(regression.loss_fn)
    opt = so.parameter_server.async_local_sgd(
        strategies, outer=optax.sgd(0.5), local_steps=steps, max_staleness=max_staleness, rule=rule
    )
    path = tmp_path / "log.jsonl"
    result = opt.run(regression.params, data, num_updates=100, log_path=path)
    updates = 8 if max_staleness == 0 else 10
    assert (result.metrics["updates"], result.metrics["stopped"]) == (updates, "exhausted")
    assert sorted(event.worker for event in result.log if event.kind == "leave") == [0, 1]
    assert (
        result.metrics["history"]["loss"].shape
        == result.metrics["history"]["grad_norm"].shape
        == (updates,)
    )
    same_bits(opt.replay(Log.load(path), regression.params, data), result.params)


def test_a_loss_with_rng_is_replayed_too(regression):
    def loss_fn(params, batch, rng):
        noise = jax.random.normal(rng, batch["x"].shape)
        return jnp.mean(((batch["x"] + noise) @ params["w"] + params["b"] - batch["y"]) ** 2)

    strategies = islands(loss_fn, count=1)
    opt = so.parameter_server.async_local_sgd(strategies, local_steps=2, max_staleness=1)

    def run(seed):
        return opt.run(
            regression.params,
            regression.batches_of(2),
            num_updates=5,
            rng=jax.random.key(seed),
        )

    result = run(1)
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(2)), result.params)
    same_bits(run(1).params, result.params)  # one island alone: nothing depends on time
    assert np.abs(run(2).params["w"] - result.params["w"]).max() > 1e-4


def test_islands_learn_and_keep_their_optimizer_state(regression):
    """The second round of adam goes on with its moments: its first step differs from a fresh
    adam's.
    """
    strategies = islands(regression.loss_fn, optax.adam(0.05), count=1)
    opt = so.parameter_server.async_local_sgd(strategies, outer=optax.sgd(1.0), local_steps=4)
    result = opt.run(regression.params, regression.batches_of(1), num_updates=5)
    alone = islands(regression.loss_fn, optax.adam(0.05), count=1)[0]
    state = alone.init(regression.params)
    for _, batch in zip(range(20), regression.batches_of(1)(0), strict=False):
        state, _ = alone.step(state, batch)
    assert relative_difference(result.params, jax.device_get(state.params)) <= 1e-5


def test_left_over_batches_are_not_used(regression):
    opt = so.parameter_server.async_local_sgd(
        islands(regression.loss_fn), local_steps=3, max_staleness=None
    )
    # eight batches: two pushes of three, and two left over
    few = regression.batches_of(2, rounds=1)
    result = opt.run(regression.params, few, num_updates=100)
    assert (result.metrics["stopped"], result.metrics["updates"]) == ("exhausted", 4)


def test_what_is_not_finite_is_named(regression, message_of):
    def batches_of(worker):
        for index, batch in enumerate(regression.batches_of(2)(worker)):
            yield {
                **batch,
                "y": batch["y"] * np.float32("nan" if (worker, index) == (1, 5) else 1.0),
            }

    opt = so.parameter_server.async_local_sgd(
        islands(regression.loss_fn), local_steps=3, max_staleness=1
    )
    message = message_of(
        so.parameter_server.NonFiniteUpdateError,
        opt.run,
        regression.params,
        batches_of,
        num_updates=100,
    )
    assert message.startswith(
        "parameter_server: the push of worker 1 at its step 1 was refused:\n  loss: not finite"
    )


def test_new_values_of_frozen_leaves_are_refused(message_of):
    def loss_fn(params, batch):
        return jnp.mean(batch * params["w"]), {
            "n": so.losses.Updated({"count": params["count"] + 1})
        }

    opt = so.parameter_server.async_local_sgd(
        islands(loss_fn, rules=[("count", "frozen")], make=so.ddp), local_steps=1
    )
    params = {"w": jnp.ones(()), "count": jnp.zeros(())}
    message = message_of(
        ValueError, opt.run, params, lambda worker: [np.ones(4, np.float32)] * 9, num_updates=2
    )
    assert (
        message
        == "async_local_sgd: loss_fn returns so.losses.Updated, for which islands have no common value.\n"
        "  count\nFix: train such leaves with ddp, zero, fsdp or diloco."
    )


LIST = (
    "Fix: pass a list of so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...), one an island."
)
REFUSED = {
    "one strategy": (
        lambda island_list: {"strategies": island_list[0]},
        TypeError,
        (
            "async_local_sgd: strategies must be a sequence of synchronous strategies, got"
            f" ShardedOptimizer.\n{LIST}"
        ),
    ),
    "none": (
        lambda island_list: {"strategies": []},
        ValueError,
        f"async_local_sgd: strategies must be at least 1, got none.\n{LIST}",
    ),
    "no strategy": (
        lambda island_list: {"strategies": [island_list[0], optax.sgd(0.1)]},
        TypeError,
        (
            "async_local_sgd: strategies[1] must be a synchronous strategy, got"
            f" GradientTransformationExtraArgs.\n{LIST}"
        ),
    ),
    "devices shared": (
        lambda island_list: {"strategies": [island_list[0], island_list[0]]},
        ValueError,
        (
            "async_local_sgd: an island with several devices must have them for itself.\n"
            "  cpu:0: islands 0, 1\n  cpu:1: islands 0, 1\n"
            "Fix: give each its own, or one device to several islands."
        ),
    ),
    "no steps": (
        lambda island_list: {"local_steps": 0},
        ValueError,
        "async_local_sgd: local_steps must be at least 1, got 0.",
    ),
    "half steps": (
        lambda island_list: {"local_steps": 1.5},
        TypeError,
        "async_local_sgd: local_steps must be an integer or one for each island, got 1.5 (float).",
    ),
    "steps of three": (
        lambda island_list: {"local_steps": [1, 2, 3]},
        ValueError,
        (
            "async_local_sgd: local_steps has 3 numbers for 2 islands.\nFix: pass one number, or"
            " one for each island."
        ),
    ),
    "negative staleness": (
        lambda island_list: {"max_staleness": -1},
        ValueError,
        (
            "async_local_sgd: max_staleness must be at least 0, got -1.\n"
            "Fix: 0 waits at every step, s lets the fastest run s steps ahead, None never waits."
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name, regression, message_of):
    change, error, message = REFUSED[name]
    island_list = islands(regression.loss_fn)
    options = {"strategies": island_list, "local_steps": 2} | change(island_list)
    strategies = options.pop("strategies")
    assert message_of(error, so.parameter_server.async_local_sgd, strategies, **options) == message
