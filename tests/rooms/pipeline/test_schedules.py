"""Bubble, time and memory of every schedule against its formula, in exact fractions.

Sizes that are refused.
"""

from fractions import Fraction

import numpy as np
import pytest

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast

SIZES = [
    (1, 1),
    (1, 5),
    (2, 1),
    (2, 2),
    (3, 7),
    (4, 1),
    (4, 3),
    (4, 4),
    (4, 8),
    (5, 13),
    (8, 6),
    (8, 32),
    (16, 64),
]
GROUPED = [
    (1, 1, 3),
    (1, 5, 2),
    (2, 2, 2),
    (2, 6, 4),
    (3, 9, 2),
    (4, 4, 2),
    (4, 8, 3),
    (8, 16, 4),
    (16, 64, 4),
]
F = 1
B = 1
W = 1


def bubble(schedule, time):
    """Return the idle share of a time, in exact arithmetic."""
    work = schedule.num_chunks * schedule.num_micro_batches * (F + B + W)
    return Fraction(time - work, time)


def check_bubbles(schedule, table, program):
    assert bubble(schedule, schedule.table_time()) == table
    assert bubble(schedule, schedule.program_time()) == program
    assert (schedule.bubble_fraction, schedule.program_bubble_fraction) == (
        float(table),
        float(program),
    )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_has_the_published_bubble_and_memory(p, m):
    schedule = schedules.gpipe(p, m)
    check_bubbles(schedule, Fraction(p - 1, m + p - 1), Fraction(p - 1, m + p - 1))
    assert schedule.peak_activations == (m,) * p
    assert schedule.num_ticks == 2 * (m + p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_eager_one_f_one_b_has_the_published_bubble_and_memory(p, m):
    schedule = schedules.eager_one_f_one_b(p, m)
    check_bubbles(schedule, Fraction(p - 1, m + p - 1), Fraction(p - 1, m + p - 1))
    assert schedule.peak_activations == tuple(min(m, 2 * (p - i) - 1) for i in range(p))
    assert schedule.num_ticks == m + 2 * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_f_one_b_has_the_published_bubble_and_memory(p, m):
    schedule = schedules.one_f_one_b(p, m)
    assert bubble(schedule, schedule.table_time()) == Fraction(p - 1, m + p - 1)
    assert schedule.peak_activations == tuple(min(m, p - i) for i in range(p))
    assert schedule.num_ticks == 2 * (m + p - 1)


def test_the_textbooks_order_costs_more_in_lockstep():
    assert schedules.one_f_one_b(4, 8).program_bubble_fraction == 0.4
    assert schedules.eager_one_f_one_b(4, 8).program_bubble_fraction == 3 / 11


@pytest.mark.parametrize(("p", "m", "v"), [*GROUPED, *((p, m, 1) for p, m in SIZES)])
def test_interleaved_has_the_published_bubble_and_memory(p, m, v):
    schedule = schedules.interleaved(p, m, v)
    check_bubbles(schedule, Fraction(p - 1, v * m + p - 1), Fraction(p - 1, v * m + p - 1))
    assert schedule.num_ticks == v * m + (v + 1) * p - 2
    assert all(
        peak <= min(v * m, (v + 1) * p - 1 - 2 * i)
        for i, peak in enumerate(schedule.peak_activations)
    )


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaved_needs_a_known_factor_more_memory_than_textbook_1f1b(p, v):
    stages = Fraction(max(schedules.interleaved(p, 8 * p, v).peak_activations), v)
    assert stages / p == 1 + Fraction(p - 1, p * v)


def test_interleaved_with_one_chunk_is_eager_one_f_one_b():
    assert schedules.interleaved(4, 6, 1).ticks == schedules.eager_one_f_one_b(4, 6).ticks


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_has_the_published_bubble_and_memory(p, m):
    schedule = schedules.zero_bubble(p, m)
    time = 3 * m + (p - 1) * (F + B - W) if m >= p else 2 * m + 2 * p - 1
    check_bubbles(schedule, Fraction(time - 3 * m, time), Fraction(time - 3 * m, time))
    assert schedule.num_ticks == time
    assert schedule.peak_activations == (min(m, p),) * p
    until_backward = schedules.from_ticks(p, schedule.ticks.forward, schedule.ticks.backward)
    assert until_backward.peak_activations == tuple(min(m, p - i) for i in range(p))


def test_zero_bubble_tends_to_a_third_of_1f1b():
    def idle(schedule):
        return bubble(schedule, schedule.table_time())

    ratios = [
        idle(schedules.zero_bubble(4, m)) / idle(schedules.eager_one_f_one_b(4, m))
        for m in (16, 256, 1024)
    ]
    assert ratios == [Fraction(m + 3, 3 * m + 3) for m in (16, 256, 1024)]
    assert all(
        0 < ratio - Fraction(1, 3) < Fraction(1, m)
        for ratio, m in zip(ratios, (16, 256, 1024), strict=True)
    )


@pytest.mark.parametrize(("p", "m", "v"), GROUPED)
def test_interleaved_zero_bubble_has_the_published_bubble_and_memory(p, m, v):
    schedule = schedules.zero_bubble(p, m, v)
    time = 3 * v * m + (p - 1)
    check_bubbles(schedule, Fraction(p - 1, time), Fraction(p - 1, time))
    assert schedule.peak_activations == (min(v * m, v * p),) * p  # 1F1B's, whole stages
    f = 3
    b = 5
    w = 2
    spent = schedule.table_time(forward=f, backward=b, weight=w)
    assert spent == v * m * (f + b + w) + (p - 1) * (f + b - w)


TIMES = [
    (1, 1, 1, 0),
    (2, 3, 2, 0),
    (1, 2, 1, 0),
    (3, 2, 2, 0),
    (2, 2, 3, 1),
    (5, 5, 5, 2),
    (4, 8, 2, 1),
]


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
@pytest.mark.parametrize("times", TIMES)
def test_zero_bubble_2_has_the_published_times(p, m, times):
    f, b, w, c = times
    schedule = schedules.zero_bubble_2(p, m)
    numbers = {"forward": f, "backward": b, "weight": w, "communication": c}
    work = m * (f + b + w)
    c = c if p > 1 else 0
    assert max(schedule.stage_times(**numbers)) == work + (p - 1) * max(
        2 * c, f + b + 2 * c - 2 * w
    )
    assert schedule.table_time(**numbers) == work + (p - 1) * max(f + c, f + b + 2 * c - 2 * w)
    assert schedule.peak_activations == (2 * p - 1,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zero_bubble_v_has_no_idle_tick_and_the_memory_of_1f1b(p, m):
    schedule = schedules.zero_bubble_v(p, m)
    assert schedule.stage_times() == (6 * m,) * p  # not an idle tick
    check_bubbles(schedule, Fraction(p - 1, 6 * m + p - 1), Fraction(p - 1, 6 * m + p - 1))
    assert schedule.peak_activations == (2 * p,) * p
    # in whole stages that of 1F1B
    assert Fraction(2 * p, 2) == schedules.one_f_one_b(p, m).num_slots
    assert schedule.virtual_stages == tuple((s, 2 * p - 1 - s) for s in range(p))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_dual_pipe_v_has_the_published_bubble_and_memory(p, m):
    schedule = schedules.dual_pipe_v(p, m)
    check_bubbles(schedule, Fraction(p - 1, 6 * m + p - 1), Fraction(p - 1, 6 * m + p - 1))
    assert max(schedule.stage_times()) == 6 * m + p - 1
    assert schedule.peak_activations == (2 * p + 1,) * p  # PP + 1 of its authors, PP = 2 p
    for f, b, w, _ in TIMES:  # its authors' (PP / 2 - 1)(F&B + B - 3 W), B whole
        stated = (p - 1) * ((f + b + w) + (b + w) - 3 * w)
        spent = max(schedule.stage_times(forward=f, backward=b, weight=w))
        assert spent - 2 * m * (f + b + w) <= max(stated, (p - 1) * f)


@pytest.mark.parametrize(("p", "m", "v"), [*GROUPED, (4, 3, 2), (4, 1, 3), (3, 7, 2), (5, 13, 1)])
def test_looped_breadth_first_has_the_published_bubble_and_memory(p, m, v):
    schedule = schedules.looped_breadth_first(p, m, v)
    idle = p - 1 + (v - 1) * max(0, p - m)
    check_bubbles(schedule, Fraction(idle, v * m + idle), Fraction(idle, v * m + idle))
    assert schedule.peak_activations == (v * m,) * p
    assert p == 1 or schedule.num_input_slots == (m - p + 1 if v > 1 and m > p else 0)
    forward = np.asarray(schedule.ticks.forward)
    assert all(forward[v + p].min() > forward[v].max() for v in range(len(forward) - p))


def test_looped_breadth_first_with_one_chunk_is_gpipe():
    assert schedules.looped_breadth_first(4, 6, 1).ticks == schedules.gpipe(4, 6).ticks


@pytest.mark.parametrize(("p", "m", "v"), [*GROUPED, *((p, m, 1) for p, m in SIZES)])
def test_zero_bubble_lockstep_has_its_bubble_and_the_memory_of_interleaved(p, m, v):
    schedule = schedules.zero_bubble_lockstep(p, m, v)
    late = min(p - 1, max(0, 2 * (p - 1) - m))
    time = 3 * v * m + (p - 1) + late
    check_bubbles(schedule, Fraction(p - 1 + late, time), Fraction(p - 1 + late, time))
    assert max(schedule.peak_activations) == max(schedules.interleaved(p, m, v).peak_activations)


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1.5, 3, 1), (1, 3, 0.5)])
@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 1, 1), (2, 2, 1), (4, 6, 1), (4, 16, 1), (4, 8, 3), (8, 16, 2)]
)
def test_zero_bubble_lockstep_keeps_the_formula_when_passes_differ(p, m, v, costs):
    f, b, w = costs
    time = schedules.zero_bubble_lockstep(p, m, v).program_time(forward=f, backward=b, weight=w)
    assert time == v * m * (f + b + w) + (p - 1) * (f + b - w)


def test_the_docstring_of_zero_bubble_lockstep_has_the_right_times():
    candidates = (
        schedules.zero_bubble_lockstep(4, 8),
        schedules.zero_bubble(4, 8),
        schedules.eager_one_f_one_b(4, 8),
    )
    assert [schedule.program_time(forward=1, backward=2, weight=1) for schedule in candidates] == [
        38,
        49,
        44,
    ]


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gpipe(4, 8),
        schedules.eager_one_f_one_b(4, 8),
        schedules.interleaved(4, 8, 3),
        schedules.zero_bubble_lockstep(4, 8, 3),
    ],
    ids=lambda schedule: schedule.name,
)
def test_lockstep_timings_let_no_message_wait(schedule):
    assert (schedule.num_input_slots, schedule.num_cotangent_slots) == (0, 0)


def test_timings_of_one_pass_a_tick_do():
    for schedule in (schedules.one_f_one_b(4, 8), schedules.zero_bubble(4, 8)):
        assert schedule.num_input_slots > 0, schedule.name
    assert schedules.zero_bubble(4, 8).num_deferred_slots > 0
    assert schedules.one_f_one_b(4, 8).num_deferred_slots == 0


def test_slots_are_as_many_as_the_busiest_stage_needs():
    for schedule in (
        schedules.gpipe(3, 5),
        schedules.interleaved(4, 8, 2),
        schedules.zero_bubble(4, 9),
        schedules.zero_bubble_lockstep(4, 9),
    ):
        assert schedule.num_slots == max(schedule.peak_activations), schedule.name


CHUNKED = {
    name: getattr(schedules, name)
    for name in ("interleaved", "zero_bubble", "zero_bubble_lockstep")
}
PLAIN = {
    name: getattr(schedules, name)
    for name in (
        "gpipe",
        "one_f_one_b",
        "eager_one_f_one_b",
        "zero_bubble_2",
        "zero_bubble_v",
        "dual_pipe_v",
    )
}
PLAIN["looped_breadth_first"] = schedules.looped_breadth_first


@pytest.mark.parametrize("name", [*PLAIN, *CHUNKED])
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 4), ValueError, "sizes must be at least 1, got num_stages=0."),
        (
            (-2, -4),
            ValueError,
            "sizes must be at least 1, got num_stages=-2, num_micro_batches=-4.",
        ),
        ((4, 2.0), TypeError, "sizes must be integers, got num_micro_batches=2.0 (float)."),
        (
            (True, "8"),
            TypeError,
            "sizes must be integers, got num_stages=True (bool), num_micro_batches='8' (str).",
        ),
        ((None, 0), TypeError, "sizes must be integers, got num_stages=None (NoneType)."),
    ],
)
def test_sizes_that_no_schedule_takes_are_refused(name, sizes, error, message):
    with pytest.raises(error) as caught:
        (PLAIN | CHUNKED)[name](*sizes)
    assert str(caught.value) == f"{name}: {message}"


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((2, 4, 0), ValueError, "sizes must be at least 1, got num_chunks=0."),
        ((2, 4, 1.5), TypeError, "sizes must be integers, got num_chunks=1.5 (float)."),
        (
            (4, 6, 2),
            ValueError,
            (
                "with 2 chunks per stage, micro-batches must be a multiple of the 4 stages, got"
                " 6.\nFix: use 4 or 8 micro-batches, or num_chunks=1."
            ),
        ),
        (
            (4, 3, 3),
            ValueError,
            (
                "with 3 chunks per stage, micro-batches must be a multiple of the 4 stages, got"
                " 3.\nFix: use 4 micro-batches, or num_chunks=1."
            ),
        ),
    ],
)
def test_chunks_that_no_schedule_takes_are_refused(name, sizes, error, message):
    with pytest.raises(error) as caught:
        CHUNKED[name](*sizes)
    assert str(caught.value) == f"{name}: {message}"


def test_one_chunk_takes_any_number_of_micro_batches():
    assert schedules.interleaved(4, 6, 1).num_micro_batches == 6


def test_numpy_sizes_are_sizes():
    assert schedules.interleaved(np.int64(2), np.int32(4), np.int8(2)) == schedules.interleaved(
        2, 4, 2
    )
    assert schedules.zero_bubble(np.int64(3), np.uint8(4)) == schedules.zero_bubble(3, 4)
