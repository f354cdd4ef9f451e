"""Times of a schedule: messages that take a while, stages that differ, each at its own pace or all
in lockstep.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import v_shaped

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast

BUILT = [
    schedules.gpipe(3, 4),
    schedules.one_f_one_b(4, 6),
    schedules.eager_one_f_one_b(3, 5),
    schedules.interleaved(2, 4, 3),
    schedules.zero_bubble(4, 5),
    schedules.zero_bubble_lockstep(2, 4, 2),
    v_shaped(3, 4),
    schedules.gpipe(1, 3),
]


def ends_by_relaxation(schedule, times, communication):
    """Return when each pass ends: the least times that satisfy every wait. A time that is too early
    for a wait is raised until all waits are satisfied.
    """
    ticks = schedule.ticks
    last = len(schedule.ticks.stage_of) - 1
    length = {
        (kind, v, m): times[kind][v]
        for kind, when in ticks.passes.items()
        for v in range(last + 1)
        for m in range(when.shape[1])
    }
    order = {}
    for kind, when in ticks.passes.items():
        for (v, m), tick in np.ndenumerate(when):
            order.setdefault(ticks.stage_of[v], []).append(
                (tick, ["forward", "backward", "weight"].index(kind), kind, v, m)
            )
    waits = []
    for passes in order.values():
        names = [tuple(pass_key[2:]) for pass_key in sorted(passes)]
        waits += [(a, b, 0) for a, b in pairwise(names)]
    for kind, v, m in length:
        if kind == "forward" and v:
            needed = ("forward", v - 1, m)
        elif kind == "backward":
            needed = ("forward", v, m) if v == last else ("backward", v + 1, m)
        elif kind == "weight":
            needed = ("backward", v, m)
        else:
            continue
        waits.append(
            (needed, (kind, v, m), communication * (ticks.stage_of[needed[1]] != ticks.stage_of[v]))
        )
    ends = dict(length)
    while late := [
        (b, ends[a] + gap + length[b]) for a, b, gap in waits if ends[a] + gap + length[b] > ends[b]
    ]:
        for pass_key, end in late:
            ends[pass_key] = max(ends[pass_key], end)
    return ends


@st.composite
def timed(draw):
    schedule = draw(st.sampled_from(BUILT))
    each = st.lists(
        st.integers(0, 5),
        min_size=len(schedule.ticks.stage_of),
        max_size=len(schedule.ticks.stage_of),
    )
    return schedule, draw(each), draw(each), draw(each), draw(st.integers(0, 4))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(timed())
def test_own_pace_is_the_earliest_that_satisfies_every_wait(drawn):
    schedule, forward, backward, weight, communication = drawn
    times = {"forward": forward, "backward": backward, "weight": weight}
    if schedule.ticks.weight is None:
        times["backward"] = [b + w for b, w in zip(backward, times.pop("weight"), strict=True)]
    ends = ends_by_relaxation(schedule, times, communication)
    numbers = {
        "forward": forward,
        "backward": backward,
        "weight": weight,
        "communication": communication,
    }
    assert schedule.table_time(**numbers) == max(ends.values())
    begins = [[], [], [], []][: schedule.num_stages]
    last = [0] * schedule.num_stages
    for (kind, v, _), end in ends.items():
        stage = schedule.ticks.stage_of[v]
        begins[stage].append(end - times[kind][v])
        last[stage] = max(last[stage], end)
    assert schedule.stage_times(**numbers) == tuple(
        b - min(a) for a, b in zip(begins, last, strict=True)
    )
    assert schedule.table_time(**numbers) <= schedule.program_time(**numbers)
    assert (
        0
        <= schedule.bubble_rate(**numbers)
        <= schedule.bubble_rate(**numbers, pace="lockstep")
        <= 1
    )


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_messages_lengthen_warm_up_and_drain_of_gpipe_twice_over(p, m):
    f = 2
    b = 5
    c = Fraction(1, 3)
    numbers = {"forward": f, "backward": b - 1, "weight": 1, "communication": c}
    schedule = schedules.gpipe(p, m)
    assert schedule.table_time(**numbers) == m * (f + b) + (p - 1) * (f + b + 2 * c)
    assert schedule.program_time(**numbers) == (m + p - 1) * (f + b) + schedule.num_ticks * c


def test_the_slowest_stage_is_what_a_pipeline_waits_for():
    p = 4
    m = 16
    f = [1, 2, 1, 5]
    b = [3, 2, 7, 4]
    time = schedules.gpipe(p, m).table_time(forward=f, backward=b, weight=0)
    # the last stage is the slowest forwards, and begins to go back at once
    forward = sum(f) + (m - 1) * max(f)
    assert time == forward + b[3] + b[2] * m + b[1] + b[0]
    # in lockstep the slowest stage of every tick: warm-up and drain too
    ticks = m + p - 1
    lockstep = [max(f[s] for s in range(p) if 0 <= t - s < m) for t in range(ticks)]
    lockstep += [max(b[s] for s in range(p) if 0 <= t - (p - 1 - s) < m) for t in range(ticks)]
    assert schedules.gpipe(p, m).program_time(forward=f, backward=b, weight=0) == sum(lockstep)


def test_the_idle_share_counts_the_work_of_every_stage():
    schedule = schedules.gpipe(2, 1)  # F on one, on the other, back on the other, on the first
    assert schedule.bubble_rate(forward=[1, 3], backward=[2, 2], weight=0) == 1 - 8 / (2 * 8)
    assert schedule.bubble_rate(
        forward=[1, 3], backward=[2, 2], weight=0, communication=1
    ) == 1 - 8 / (2 * 10)


def test_a_message_within_a_stage_takes_no_time():
    # 4 virtual stages, three hops; the middle hop stays on stage 1
    down_and_up = v_shaped(2, 1)
    assert down_and_up.table_time(communication=10) - down_and_up.table_time() == 2 * 2 * 10


def test_one_stage_sends_nothing():
    schedule = schedules.gpipe(1, 5)
    assert schedule.table_time(communication=9) == schedule.program_time(communication=9) == 15


def test_stages_begin_and_end_at_different_times():
    assert schedules.gpipe(3, 4).stage_times() == (18, 15, 12)
    assert schedules.gpipe(3, 4).table_time() == 18


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        (
            {"forward": [1, 2, 3]},
            ValueError,
            (
                "gpipe: forward has 3 times for 2 virtual stages.\n"
                "Fix: give one number, or one for each, in the model's order."
            ),
        ),
        ({"backward": -1}, ValueError, "gpipe: backward must not be negative, got -1."),
        ({"weight": [1, "2"]}, TypeError, "gpipe: weight must be numbers, got '2'."),
        ({"communication": -2}, ValueError, "gpipe: communication must not be negative, got -2."),
        ({"communication": None}, TypeError, "gpipe: communication must be numbers, got None."),
    ],
)
@pytest.mark.parametrize("method", ["table_time", "stage_times", "program_time", "bubble_rate"])
def test_values_that_are_no_times_are_refused(method, times, error, message):
    with pytest.raises(error) as caught:
        getattr(schedules.gpipe(2, 3), method)(**times)
    assert str(caught.value) == message


def test_numpy_times_are_times():
    assert schedules.gpipe(2, 2).table_time(forward=np.float64(1.5), backward=np.ones(2)) == 10.5
