"""The bound on staleness: never exceeded, reached, and nobody waits for ever."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import durations
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import _clock as clocks
from shardopt.parameter_server import make_server

pytestmark = pytest.mark.fast

BOUNDS = [0, 1, 2, 8]


def timing_server(max_staleness):
    return make_server(None, max_staleness=max_staleness)


def check(clock):
    """Everything that is true of a clock at all times."""
    steps = dict(clock.steps)
    if steps:
        assert clock.slowest == min(steps.values())
        assert any(clocks.may_start(clock, worker) for worker in steps), (
            "nobody may start: a deadlock"
        )
    if clock.max_staleness is not None and steps:
        # Whoever is beyond the bound has just finished the last step that it could begin.
        assert max(steps.values()) - min(steps.values()) <= clock.max_staleness + 1


@settings(max_examples=60, deadline=None)
@given(
    max_staleness=st.sampled_from([*BOUNDS, None]),
    choices=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), min_size=20, max_size=150),
)
def test_the_bound_holds_whatever_workers_do(max_staleness, choices):
    server = timing_server(max_staleness)
    state = server.init(None)
    computing = {}
    for worker, action in choices:
        before = state
        if worker not in state.clock.steps:
            state, event = server.join(state, worker)
            assert event.clock == before.clock.slowest
        elif action == 11:
            state, event = server.leave(state, worker)
            computing.pop(worker, None)
        elif worker in computing:
            state, event = server.push(state, worker, None, computing.pop(worker))
            assert (event.pulled, event.clock) == (
                before.working[worker].version,
                before.clock.steps[worker],
            )
        elif server.may_pull(state, worker):
            state, event = server.pull(state, worker)
            computing[worker] = event.version
            assert event.staleness == event.clock - min(dict(before.clock.steps).values())
        else:
            with pytest.raises(ValueError, match="cannot start step"):
                server.pull(state, worker)
            continue
        assert event.staleness >= 0
        assert max_staleness is None or event.staleness <= max_staleness
        assert event.delay >= 0
        assert state.clock.slowest >= before.clock.slowest
        assert state.version >= before.version
        assert set(state.working) == set(computing)
        check(state.clock)


@pytest.mark.parametrize("max_staleness", BOUNDS)
def test_the_fastest_gets_just_as_far_ahead_as_the_bound(max_staleness):
    server = timing_server(max_staleness)
    state = server.init(None)
    for worker in (0, 1):
        state, _ = server.join(state, worker)
    seen = []
    while server.may_pull(state, 0):
        state, pulled = server.pull(state, 0)
        state, pushed = server.push(state, 0, None, pulled.version)
        seen.append(pushed.staleness)
    assert seen == list(range(max_staleness + 1))


@pytest.mark.slow  # test_the_bound_holds_whatever_workers_do
@pytest.mark.parametrize("max_staleness", tiered(BOUNDS, lambda bound: bound == 2))
def test_the_bound_holds_for_10_000_pushes_with_random_stalls(max_staleness):
    step = durations.with_stalls(durations.exponential(1.0), probability=0.05, seconds=10.0)
    workers = [so.parameter_server.SimulatedWorker(step)] * 8
    updates = 10_000 if max_staleness else 10_000 // 8
    result = so.parameter_server.simulate(
        workers, max_staleness=max_staleness, num_updates=updates, seed=3
    )
    assert result.metrics["pushes"] == 10_000
    assert max(result.metrics["staleness"]) == max_staleness
    assert max(result.metrics["delay"]) <= 7 * (2 * max_staleness + 1) * (max_staleness > 0)


@settings(max_examples=60, deadline=None)
@given(
    max_staleness=st.sampled_from([*BOUNDS, None]),
    incarnations=st.lists(
        st.tuples(
            st.floats(0.1, 5.0),
            st.lists(st.floats(0.0, 30.0), min_size=2, max_size=6, unique=True),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
def test_deaths_at_any_time_leave_nobody_waiting_for_ever(max_staleness, incarnations, seed):
    """A simulation whose queue runs dry while somebody is there would be a deadlock."""
    workers = []
    for mean, times, for_good in incarnations:
        times = sorted(times)[: len(times) // 2 * 2]
        if for_good:
            times[-1] = float("inf")
        availability = tuple(zip(times[::2], times[1::2], strict=True))
        workers.append(
            so.parameter_server.SimulatedWorker(
                durations.exponential(mean), availability=availability
            )
        )
    result = so.parameter_server.simulate(
        workers, max_staleness=max_staleness, num_updates=60, seed=seed
    )
    presence = Counter()
    for event in result.log:
        presence[event.worker] += {"join": 1, "leave": -1}.get(event.kind, 0)
        assert max_staleness is None or event.staleness <= max_staleness
    if any(for_good for *_, for_good in incarnations):
        assert result.metrics["stopped"] == "completed"
    if result.metrics["stopped"] == "exhausted":
        assert not any(presence.values())
    else:
        assert result.metrics["updates"] == 60


@pytest.mark.parametrize("max_staleness", [1, 2, 8])
@pytest.mark.parametrize("num_others", [1, 3])
def test_the_bound_on_versions_is_reached(max_staleness, num_others):
    """Others are as far behind as can be at the pull, and as far ahead as can be at the push."""
    server = timing_server(max_staleness)
    state = server.init(None)

    def go(state, worker):
        state, pulled = server.pull(state, worker)
        return server.push(state, worker, None, pulled.version)[0]

    for worker in range(num_others + 1):
        state, _ = server.join(state, worker)
    for _ in range(max_staleness):
        state = go(state, 0)
    state, pulled = server.pull(state, 0)
    for _ in range(2 * max_staleness + 1):
        for worker in range(1, num_others + 1):
            state = go(state, worker)
    assert not any(server.may_pull(state, worker) for worker in range(1, num_others + 1))
    state, pushed = server.push(state, 0, None, pulled.version)
    assert pushed.delay == num_others * (2 * max_staleness + 1)


def test_a_newcomer_gets_the_slowest_clock_and_nobody_gets_a_step_twice():
    clock = clocks.make_clock(3)
    for worker in (0, 1):
        clock = clocks.join(clock, worker)
    for _ in range(3):
        clock = clocks.tick(clock, 0)
    clock = clocks.tick(clock, 1)
    assert clocks.join(clock, 2).steps[2] == 1
    clock = clocks.leave(clock, 1)
    assert clock.slowest == 3
    empty = clocks.leave(clock, 0)
    assert clocks.join(empty, 1).steps[1] == 3


def test_leaving_lets_others_go_on():
    clock = clocks.join(clocks.join(clocks.make_clock(0), 0), 1)
    clock = clocks.tick(clock, 0)
    assert not clocks.may_start(clock, 0)
    assert clocks.may_start(clocks.leave(clock, 1), 0)


def test_a_clock_is_a_value():
    clock = clocks.join(clocks.make_clock(1), 0)
    snapshot = (dict(clock.steps), clock.slowest)
    clocks.tick(clock, 0), clocks.join(clock, 1), clocks.leave(clock, 0)
    assert (dict(clock.steps), clock.slowest) == snapshot
