"""Printed schedules, to the letter."""

import pytest

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast


def test_eager_one_f_one_b_prints_its_table():
    assert (
        str(schedules.eager_one_f_one_b(4, 6))
        == "eager_one_f_one_b: 4 stages, 6 micro-batches, 1 chunk\n12 ticks, bubble 33.3%, as a"
        " lockstep program 33.3%, at most 6 activations per stage (6, 5, 3, 1)\n\ntick     0   1"
        "   2   3     4     5     6     7     8     9   10  11\nstage 0  F0  F1  F2  F3    F4   "
        " F5    B0    B1    B2    B3  B4  B5\nstage 1  .   F0  F1  F2    F3    F4B0  F5B1  B2   "
        " B3    B4  B5  .\nstage 2  .   .   F0  F1    F2B0  F3B1  F4B2  F5B3  B4    B5  .  "
        " .\nstage 3  .   .   .   F0B0  F1B1  F2B2  F3B3  F4B4  F5B5  .   .   ."
    )


def test_chunks_and_weights_of_ten_micro_batches_keep_their_columns():
    assert str(schedules.zero_bubble_lockstep(1, 11)).splitlines()[3:] == [
        (
            "tick     0       1       2       3       4       5       6       7       8       9    "
            "   10"
        ),
        (
            "stage 0  F0B0W0  F1B1W1  F2B2W2  F3B3W3  F4B4W4  F5B5W5  F6B6W6  F7B7W7  F8B8W8 "
            " F9B9W9  F10B10W10"
        ),
    ]
    assert str(schedules.zero_bubble_lockstep(2, 2, 2)).splitlines() == [
        "zero_bubble_lockstep: 2 stages, 2 micro-batches, 2 chunks",
        "9 ticks, bubble 7.7%, as a lockstep program 7.7%, at most 4 activations per stage (4, 4)",
        "",
        "tick     0     1     2     3         4         5         6         7     8",
        "stage 0  F0.0  F1.0  F0.1  F1.1      B0.1W0.1  B1.1W1.1  B0.0W0.0  B1.0  W1.0",
        "stage 1  .     F0.0  F1.0  F0.1B0.1  F1.1B1.1  B0.0W0.1  B1.0W1.1  W0.0  W1.0",
    ]


def test_repr_is_one_line():
    assert (
        repr(schedules.interleaved(4, 8, 3))
        == "Schedule(interleaved: 4 stages, 8 micro-batches, 3 chunks)"
    )
    assert repr(schedules.gpipe(1, 1)) == "Schedule(gpipe: 1 stage, 1 micro-batch, 1 chunk)"


def test_a_printed_order_can_be_read_back():
    for schedule in (schedules.zero_bubble(4, 7), schedules.one_f_one_b(3, 5)):
        orders = [line.split(maxsplit=2)[2] for line in str(schedule).splitlines()[4:]]
        parsed_schedule = schedules.from_order(orders, name=schedule.name)
        assert parsed_schedule == schedule
        assert hash(parsed_schedule) == hash(schedule)
