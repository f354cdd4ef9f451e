"""The tests can fail: each way of breaking the server on purpose is noticed by one of the checks
below.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import durations
from support.seams import break_function

import shardopt as so
from shardopt.core._types import Weighted
from shardopt.parameter_server import SimulatedWorker, simulate
from shardopt.parameter_server import _apply as apply
from shardopt.parameter_server import _clock as clocks
from shardopt.parameter_server import _server as server
from shardopt.parameter_server import _worker as gradients
from shardopt.parameter_server._log import Event

pytestmark = pytest.mark.slow  # the contract is broken on purpose


def let_workers_one_step_too_far(patch):
    within = clocks.may_start
    break_function(
        patch,
        clocks.may_start,
        lambda clock, worker: within(clock._replace(max_staleness=clock.max_staleness + 1), worker),
    )


def stop_workers_one_step_too_soon(patch):
    break_function(
        patch,
        clocks.may_start,
        lambda clock, worker: clocks.staleness(clock, worker) <= clock.max_staleness // 2,
    )


def let_newcomers_start_at_zero(patch):
    join = clocks.join

    def from_zero(clock, worker):
        return join(clock._replace(slowest=0), worker)._replace(slowest=clock.slowest)

    break_function(patch, clocks.join, from_zero)


def sum_for_mean(patch):
    average = apply._average

    def summed(pushed, rows):
        grads, metrics = average(pushed, rows)
        return jax.tree.map(lambda g: g * len(pushed), grads), metrics

    break_function(patch, apply._average, summed)


def mean_of_means(patch):
    average = apply._average

    def unweighted(pushed, rows):
        mean_pushes = [
            (
                jax.tree.map(lambda g, weight=loss.weight: g / weight, grads),
                Weighted(loss.total / loss.weight, 1.0 + 0 * loss.weight),
                aux,
            )
            for grads, loss, aux in pushed
        ]
        return average(mean_pushes, 0 * rows + 1)

    break_function(patch, apply._average, unweighted)


def forget_a_worker(patch):
    average = apply._average
    break_function(
        patch, apply._average, lambda pushed, rows: average(pushed[: max(1, len(pushed) - 1)], rows)
    )


def average_in_the_order_of_arrival(patch):
    patch.setattr(server, "sorted", lambda waiting, key: list(waiting), raising=False)


def push_what_was_computed_from_newer_parameters(patch):
    merge = gradients.replace_trained
    break_function(
        patch,
        gradients.replace_trained,
        lambda params, part: merge(params, jax.tree.map(lambda w: w * 1.01, part)),
    )


def difference_from_ddp(odd):
    with jax.enable_x64(True):
        case, batches_of = odd(weighted=True, steps=3)
        tx = optax.sgd(0.05, momentum=0.9)
        speeds = [SimulatedWorker(seconds) for seconds in (3.0, 2.0, 1.0, 4.0)]
        simulation = simulate(
            speeds,
            num_updates=3,
            tx=tx,
            loss_fn=case.loss_fn,
            params=case.params,
            batches_of=batches_of(4),
        )
        opt = so.ddp(tx, so.make_mesh(data=4, devices=jax.devices()[:4]), case.loss_fn)
        state = opt.init(case.params)
        for batch in case.batches:
            state, _ = opt.step(state, batch)
        pairs = zip(
            jax.tree.leaves(simulation.params),
            jax.tree.leaves(jax.device_get(state.params)),
            strict=True,
        )
        return max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)


def bound_kept_and_reached():
    workers = [SimulatedWorker(durations.exponential(1.0))] * 4 + [
        SimulatedWorker(durations.exponential(1.0), availability=((20.0, float("inf")),))
    ]
    return max(simulate(workers, max_staleness=4, num_updates=400).metrics["staleness"]) == 4


def same_bits_in_any_order():
    draw = np.random.default_rng(0)
    batches = [draw.normal(size=(2, 64)).astype(np.float32) * np.float32(10.0**k) for k in range(3)]

    def final(speeds):
        result = simulate(
            [SimulatedWorker(speed) for speed in speeds],
            num_updates=3,
            tx=optax.sgd(0.1),
            loss_fn=lambda params, batch: jnp.mean(batch @ params["w"]),
            params={"w": jnp.zeros(64)},
            batches_of=lambda worker: [batches[worker]] * 3,
        )
        return np.asarray(result.params["w"]).tobytes()

    return final((1.0, 2.0, 3.0)) == final((3.0, 1.0, 2.0))


@pytest.mark.parametrize(
    "mutate",
    [sum_for_mean, mean_of_means, forget_a_worker, push_what_was_computed_from_newer_parameters],
    ids=lambda x: x.__name__,
)
def test_the_comparison_with_ddp_notices(mutate, odd):
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        assert difference_from_ddp(odd) > 1e-6


@pytest.mark.parametrize(
    "mutate",
    [let_workers_one_step_too_far, stop_workers_one_step_too_soon],
    ids=lambda x: x.__name__,
)
def test_the_bound_notices(mutate):
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        assert not bound_kept_and_reached()


def test_a_newcomer_at_zero_is_noticed():
    state = server.make_server(None, max_staleness=1)
    with pytest.MonkeyPatch.context() as patch:
        let_newcomers_start_at_zero(patch)
        server_state, _ = state.join(state.init(None), 0)
        for _ in range(3):
            server_state, pulled = state.pull(server_state, 0)
            server_state, _ = state.push(server_state, 0, None, pulled.version)
        _, event = state.join(server_state, 1)
    assert event != Event("join", 1, 3, 3, 3)


def test_the_order_of_arrival_is_noticed():
    with pytest.MonkeyPatch.context() as patch:
        average_in_the_order_of_arrival(patch)
        assert not same_bits_in_any_order()


def test_unbroken_all_is_well(odd):
    assert difference_from_ddp(odd) <= 1e-12
    assert bound_kept_and_reached()
    assert same_bits_in_any_order()
