"""Messages that travel while the next tick runs: the same passes in the same order, at nearly the
stages' own pace.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import SCHEDULES, micro_batches

import shardopt as so
from shardopt.pipeline import schedules
from shardopt.pipeline._timing import in_order

pytestmark = pytest.mark.fast


def orders(schedule):
    """Return the passes of each stage in their order."""
    stage_orders = [[] for _ in range(schedule.num_stages)]
    for event in in_order(schedule.ticks):
        stage_orders[schedule.ticks.stage_of[event[1]]].append(event)
    return stage_orders


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_do_the_same_in_the_same_order(name):
    known = SCHEDULES[name](4, micro_batches(name, "odd", 4))
    ahead = schedules.send_ahead(known)
    assert orders(ahead) == orders(known)
    assert (ahead.ticks.stage_of, ahead.ticks.message_ticks) == (known.ticks.stage_of, 2)
    # of passes in one tick an activation of the first is let go before the last begins
    assert max(ahead.peak_activations) <= max(known.peak_activations)
    times = {"forward": 2, "backward": 3, "weight": 2, "communication": 1}
    assert ahead.table_time(**times) == known.table_time(**times) <= ahead.program_time(**times)


def by_hand(ticks, length, c):
    """Return the clock of the docstring, written out by tick and stage."""
    begins = [[0] * ticks.num_stages]
    along = list(zip(ticks.stage_of[:-1], ticks.stage_of[1:], strict=True))
    for tick in range(ticks.num_ticks):
        work = [0] * ticks.num_stages
        for kind, when in ticks.passes.items():
            for v, stage in enumerate(ticks.stage_of):
                work[stage] += length[kind] * (when[v] == tick).sum()
        ready = [begins[-1][s] + work[s] for s in range(ticks.num_stages)]
        waits = [
            max(
                [
                    begins[-1][n] + c
                    for a, b in along
                    if a != b
                    for n, me in ((a, b), (b, a))
                    if me == s
                ],
                default=0,
            )
            for s in range(ticks.num_stages)
        ]
        begins.append([max(pair) for pair in zip(ready, waits, strict=True)])
    return max(begins[-1])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 8), st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 3))
def test_the_program_waits_for_what_neighbours_began_and_not_for_what_they_do(p, m, lengths, c):
    length = dict(zip(("forward", "backward", "weight"), lengths, strict=True))
    ahead = schedules.send_ahead(schedules.zero_bubble_v(p, m))
    assert ahead.program_time(**length, communication=c) == by_hand(ahead.ticks, length, c)


@pytest.mark.parametrize(
    ("make", "before", "after", "own_pace"),
    [
        (schedules.zero_bubble_2, 131, 120, 118),
        (schedules.zero_bubble_v, 285, 238, 233),
        (schedules.dual_pipe_v, 287, 239, 234),
        # in lockstep stages do the same things anyway
        (schedules.eager_one_f_one_b, 133, 133, 133),
        # S activations do not last for the way there and back
        (schedules.one_f_one_b, 178, 166, 133),
    ],
)
def test_the_program_comes_near_the_stages_own_pace(make, before, after, own_pace):
    times = {"forward": 2, "backward": 3, "weight": 2}
    known = make(4, 16)
    ahead_schedule = schedules.send_ahead(make)(4, 16)
    assert [schedule.program_time(**times) for schedule in (known, ahead_schedule)] == [
        before,
        after,
    ]
    assert known.table_time(**times) == own_pace


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedules.from_ticks(2, [[0], [1]], [[3], [2]], message_ticks=2, name="mine"),
            (
                "mine: the schedule has 2 faults.\n  forward of micro-batch 0 at virtual stage 1 is"
                " at tick 1, but its input arrives at tick 2\n  backward of micro-batch 0 at"
                " virtual stage 0 is at tick 3, but its cotangent arrives at tick 4\nFix: run each"
                " pass once, when its inputs are there; what is sent on a tick arrives on the next"
                " but one."
            ),
        ),
        (
            lambda: schedules.from_ticks(1, [[0]], [[1]], message_ticks=3),
            "from_ticks: message_ticks must be 1 or 2, got 3.",
        ),
        (
            lambda: so.schedules.from_order(["F0 B0 F1 B1", "F1 B1 F0 B0"], message_ticks=2),
            (
                "from_order: the stages wait for one another from tick 1 on.\n  stage 0: backward"
                " of micro-batch 0 at virtual stage 0 needs backward of micro-batch 0 at virtual"
                " stage 1\n  stage 1: forward of micro-batch 1 at virtual stage 1 needs forward of"
                " micro-batch 1 at virtual stage 0"
            ),
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match="tick") as caught:
        make()
    assert str(caught.value) == message
