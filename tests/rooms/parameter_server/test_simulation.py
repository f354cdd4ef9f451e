"""The simulator against closed forms, and against itself."""

import itertools
import math

import numpy as np
import optax
import pytest
from support import durations
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import (
    Log,
    SimulatedWorker,
    simulate,
)
from shardopt.parameter_server._log import Event

pytestmark = pytest.mark.fast

INF = math.inf


@pytest.mark.parametrize(
    ("factor", "count"),
    tiered(
        itertools.product([1.0, 2.0, 4.0, 10.0], [2, 4, 9]),
        lambda row: row[1] == 2 or row in [(10.0, 4), (4.0, 9)],
    ),
)
def test_one_slow_worker_slows_only_bounded_runs(factor, count):
    """(k(n-1)+1)/n times the synchronous throughput without a bound, and the slow one's pace with
    any.
    """
    workers = [SimulatedWorker()] * (count - 1) + [SimulatedWorker(factor)]
    horizon = 100 * factor
    rates = {s: simulate(workers, max_staleness=s, until=horizon).metrics for s in (0, 3, None)}
    assert rates[0]["pushes"] == 100 * count
    assert rates[None]["pushes"] / rates[0]["pushes"] == pytest.approx(
        (factor * (count - 1) + 1) / count
    )
    # A worker is at most s + 1 steps ahead at any time. This gives as many pushes more in all.
    assert 100 * count <= rates[3]["pushes"] <= 100 * count + 4 * (count - 1)


@pytest.mark.parametrize("count", tiered([2, 8, 30], lambda count: count == 2))
def test_synchronous_steps_wait_for_the_slowest_of_the_draw(count):
    """The expected maximum of n exponential durations is the n-th harmonic number."""
    workers = [SimulatedWorker(durations.exponential(2.0))] * count
    seconds = simulate(workers, num_updates=1500, seed=1).metrics["seconds"] / 1500
    assert seconds == pytest.approx(2.0 * sum(1 / k for k in range(1, count + 1)), rel=0.05)


@pytest.mark.slow  # test_one_slow_worker_slows_only_bounded_runs and test_synchronous_steps guard the rates
@pytest.mark.parametrize(
    ("bounds", "until"),
    tiered([((0, 2, None), 1_500.0), ((0, 1, 2, 8, None), 4_000.0)], lambda row: len(row[0]) == 3),
)
def test_transient_stalls_are_what_a_bound_is_for(bounds, until):
    """Expected step times of 1.45 s; synchronous, a step stalls if any of 8 workers does."""
    stalling = durations.with_stalls(1.0, probability=0.05, seconds=9.0)
    rates = [
        simulate([SimulatedWorker(stalling)] * 8, max_staleness=s, until=until).metrics[
            "pushes_per_second"
        ]
        for s in bounds
    ]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(8 / (1 + 9 * (1 - 0.95**8)), rel=0.05)
    assert rates[-1] == pytest.approx(8 / 1.45, rel=0.03)


def test_messages_take_their_time():
    worker = SimulatedWorker(1.0, latency=0.25, bandwidth=100.0)
    metrics = simulate([worker], num_updates=10, message_bytes=50.0).metrics
    assert metrics["seconds"] == pytest.approx(10 * (1.0 + 2 * (0.25 + 0.5)))
    assert metrics["step_seconds"] == {0: pytest.approx(25.0)}


def test_a_busy_server_is_the_limit():
    metrics = simulate(
        [SimulatedWorker()] * 20, max_staleness=None, until=200.0, server_seconds=0.1
    ).metrics
    assert metrics["pushes_per_second"] == pytest.approx(10.0, rel=0.02)


def test_waiting_is_accounted():
    result = simulate([SimulatedWorker(1.0), SimulatedWorker(4.0)], num_updates=5)
    assert result.metrics["wait_seconds"] == {0: 15.0, 1: 0.0}
    assert result.metrics["step_seconds"] == {0: 5.0, 1: 20.0}
    stretches = [
        (stretch.doing, stretch.start, stretch.end)
        for stretch in result.log.timeline()
        if stretch.worker == 0
    ]
    assert stretches[:4] == [
        ("step", 0.0, 1.0),
        ("wait", 1.0, 4.0),
        ("step", 4.0, 5.0),
        ("wait", 5.0, 8.0),
    ]


def test_the_time_of_every_worker_adds_up():
    workers = [
        SimulatedWorker(
            durations.exponential(1.0), availability=((0.5 * worker, 60.0 + worker), (70.0, INF))
        )
        for worker in range(5)
    ]
    result = simulate(workers, max_staleness=1, until=100.0, seed=4)
    seconds = dict.fromkeys(range(5), 0.0)
    for stretch in result.log.timeline():
        assert stretch.start < stretch.end
        seconds[stretch.worker] += stretch.end - stretch.start
    for worker in range(5):
        expected = 60.0 + worker / 2 + result.metrics["seconds"] - 70.0
        assert seconds[worker] == pytest.approx(expected)


def test_the_same_arguments_give_the_same_log_and_others_another():
    workers = [SimulatedWorker(durations.lognormal(1.0, 0.5))] * 6
    logs = [
        simulate(workers, max_staleness=2, num_updates=200, seed=seed).log for seed in (0, 0, 1)
    ]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_the_dead_are_forgotten_and_late_joiners_catch_up():
    workers = [
        SimulatedWorker(),
        SimulatedWorker(availability=((0.0, 2.5),)),
        SimulatedWorker(availability=((5.25, INF),)),
    ]
    result = simulate(workers, num_updates=10)
    events = list(result.log)
    pushes = {
        worker: [event.clock for event in events if (event.kind, event.worker) == ("push", worker)]
        for worker in range(3)
    }
    assert pushes[0] == list(range(10))
    assert pushes[1] == [0, 1]
    assert pushes[2] == list(range(5, 10))
    # 2 s of two, 0.5 s lost with the half step of worker 1, which holds up nobody beyond its death
    assert [event.time for event in events if event.kind == "leave"] == [2.5]
    assert result.metrics["seconds"] == pytest.approx(10.25)


def test_time_for_data_is_no_waiting():
    log = Log({})
    for event in (
        Event("join", 0, 0, 0, 0, 0, 0.0),
        Event("pull", 0, 0, 0, 0, 0, 2.0, waited=0.5),
        Event("push", 0, 0, 1, 0, 0, 3.0),
        Event("pull", 0, 1, 1, 1, 0, 4.0, waited=1.0),
        Event("leave", 0, 1, 1, 1, 0, 4.5),
    ):
        log.append(event)
    assert log.timeline() == [
        (0, "data", 0.0, 1.5),
        (0, "wait", 1.5, 2.0),
        (0, "step", 2.0, 3.0),
        (0, "wait", 3.0, 4.0),
        (0, "lost", 4.0, 4.5),
    ]
    figures = log.summary()
    assert (figures["data_seconds"], figures["wait_seconds"], figures["step_seconds"]) == (
        {0: 1.5},
        {0: 1.5},
        {0: 1.0},
    )


def test_without_workers_it_ends():
    workers = [SimulatedWorker(availability=((0.0, 3.5),))] * 2
    metrics = simulate(workers, num_updates=10).metrics
    assert (metrics["stopped"], metrics["updates"]) == ("exhausted", 3)
    assert simulate(1, num_updates=0).metrics["stopped"] == "completed"
    assert simulate(1, until=2.5).metrics["stopped"] == "until"


def test_all_die_and_come_back():
    workers = [SimulatedWorker(availability=((0.0, 2.5), (4.0, INF)))] * 3
    result = simulate(workers, num_updates=5)
    assert result.metrics["seconds"] == 7.0
    assert [event.clock for event in result.log if event.kind == "join"] == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize("max_staleness", tiered([0, 2, None], lambda bound: bound == 2))
def test_the_mathematics_is_real(max_staleness, simulate_really, regression):
    result = simulate_really(optax.adam(0.05), max_staleness=max_staleness, num_updates=60)
    losses = result.metrics["history"]["loss"]
    assert losses.shape == (60,)
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    opt = so.async_sgd(optax.adam(0.05), regression.loss_fn, workers=3, max_staleness=max_staleness)
    replayed_params = opt.replay(result.log, regression.params, regression.batches_of(3))
    for name, leaf in result.params.items():
        np.testing.assert_array_equal(replayed_params[name], leaf)


def test_time_with_and_without_mathematics_is_the_same(simulate_really):
    really = simulate_really(optax.sgd(0.05), max_staleness=2, message_bytes=0.0)
    workers = [SimulatedWorker(durations.exponential(1.0 + worker)) for worker in range(3)]
    assert list(really.log) == list(simulate(workers, max_staleness=2, num_updates=30).log)


def test_workers_whose_data_ends_leave(simulate_really, regression):
    short = regression.batches_of(3, rounds=1)
    result = simulate_really(optax.sgd(0.05), max_staleness=1, num_updates=100)
    assert result.metrics["stopped"] == "completed"
    ended = simulate(
        3,
        num_updates=100,
        tx=optax.sgd(0.05),
        loss_fn=regression.loss_fn,
        params=regression.params,
        batches_of=short,
    )
    assert (ended.metrics["stopped"], ended.metrics["updates"], ended.metrics["pushes"]) == (
        "exhausted",
        8,
        24,
    )


@pytest.mark.slow  # size alone; test_one_slow_worker_slows_only_bounded_runs runs the same simulator
def test_two_thousand_workers_can_be_simulated():
    workers = [SimulatedWorker(durations.exponential(1.0))] * 2000
    metrics = simulate(workers, max_staleness=2, num_updates=10_000).metrics
    assert metrics["pushes"] == 10_000
    assert max(metrics["staleness"]) == 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: simulate(0, num_updates=1),
            ValueError,
            "simulate: workers must be at least 1, got 0.",
        ),
        (
            lambda: simulate([], num_updates=1),
            ValueError,
            "simulate: workers must be at least 1, got none.",
        ),
        (
            lambda: simulate(2.5, num_updates=1),
            TypeError,
            "simulate: workers must be an integer or a sequence of SimulatedWorker, got float.",
        ),
        (
            lambda: simulate([1.0], num_updates=1),
            TypeError,
            "simulate: workers[0] must be a SimulatedWorker, got float.",
        ),
        (
            lambda: simulate([SimulatedWorker(-1.0)], num_updates=1),
            ValueError,
            "simulate: workers[0].step_seconds must be finite, at least 0; got -1.0.",
        ),
        (
            lambda: simulate([SimulatedWorker(latency=float("nan"))], num_updates=1),
            ValueError,
            "simulate: workers[0].latency must be finite, at least 0; got nan.",
        ),
        (
            lambda: simulate([SimulatedWorker(bandwidth=0)], num_updates=1),
            ValueError,
            "simulate: workers[0].bandwidth must be finite, above 0; got 0.",
        ),
        (
            lambda: simulate([SimulatedWorker(availability=((2.0, 1.0),))], num_updates=1),
            ValueError,
            "simulate: workers[0].availability must rise from at least 0, got ((2.0, 1.0),).",
        ),
        (
            lambda: simulate([SimulatedWorker(availability=(0.0, 1.0))], num_updates=1),
            TypeError,
            (
                "simulate: workers[0].availability must be a sequence of periods (from, to), got"
                " (0.0, 1.0)."
            ),
        ),
        (
            lambda: simulate(2),
            ValueError,
            "simulate: nothing says when to stop.\nFix: pass num_updates, or until in seconds.",
        ),
        (
            lambda: simulate(2, until=-1.0),
            ValueError,
            "simulate: until must be finite, at least 0; got -1.0.",
        ),
        (
            lambda: simulate(2, num_updates=-1),
            ValueError,
            "simulate: num_updates must be at least 0, got -1.",
        ),
        (
            lambda: simulate(2, num_updates=1, server_seconds="fast"),
            TypeError,
            "simulate: server_seconds must be a number, got 'fast' (str).",
        ),
        (
            lambda: simulate(2, num_updates=1, tx=optax.sgd(0.1), params={}),
            ValueError,
            (
                "simulate: loss_fn and batches_of are missing for real mathematics.\n"
                "Fix: pass tx, loss_fn, params and batches_of, or none of them."
            ),
        ),
    ],
)
def test_bad_input_is_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.slow  # test_async_local_sgd.py has deaths and late joiners
@pytest.mark.parametrize("count", tiered([100, 300], lambda count: count == 100))
def test_islands_that_come_and_go_finish_the_expected_rounds(count):
    """Rounds of R s in sessions of mean mu: 1 / (exp(R / mu) - 1) each.

    A push is as late as there are rounds on the way.
    """
    draw = np.random.default_rng(0)
    mean_stay = 60.0
    away = 20.0
    horizon = 1500.0
    skipped = 100.0
    rounds = draw.uniform(5.0, 25.0, count)
    workers = []
    for seconds in rounds:
        now = draw.exponential(away) * (draw.random() < away / (mean_stay + away))
        periods = []
        while now < horizon:
            periods.append((now, now + draw.exponential(mean_stay)))
            now = periods[-1][1] + draw.exponential(away)
        latency = 0.5 - 5e3 / 1e4 / 2  # half of the second that both messages take
        workers.append(SimulatedWorker(seconds - 1.0, latency, 2e4, periods))
    log = simulate(workers, max_staleness=None, until=horizon, message_bytes=5e3).log
    pushes = [event for event in log if event.kind == "push" and event.time > skipped]
    rates = 1 / ((mean_stay + away) * np.expm1(rounds / mean_stay))
    assert len(pushes) / (horizon - skipped) == pytest.approx(rates.sum(), rel=0.03)
    assert np.mean([event.delay for event in pushes]) == pytest.approx(
        (rates * rounds).sum(), rel=0.03
    )
    lost = sum(event.kind == "pull" for event in log) / sum(event.kind == "push" for event in log)
    assert lost > 1.05  # the deaths cost something
