"""A valid schedule, spoilt in every way: the refusal says what, where and since when."""

from dataclasses import replace

import numpy as np
import pytest

from shardopt.pipeline import schedules
from shardopt.pipeline._ticks import as_table

pytestmark = pytest.mark.fast

TICKS = (
    "Fix: run each pass once, when its inputs are there; what is sent on a tick arrives on the"
    " next."
)
SLOTS = "Fix: keep apart what is live at the same tick, or leave the slots to from_ticks."
SHAPE = "Fix: give every table one row per virtual stage and one column per micro-batch."


def spoil(schedule, **cells):
    """Return the schedule with single cells changed: forward={(v, m): tick}."""
    ticks, slots = schedule.ticks, schedule.slots
    for name, changes in cells.items():
        owner = ticks if name in ticks._fields else slots
        table = np.array(getattr(owner, name))
        for cell, value in changes.items():
            table[cell] = value
        if owner is ticks:
            ticks = ticks._replace(**{name: as_table(table)})
        else:
            slots = slots._replace(**{name: as_table(table)})
    return replace(schedule, ticks=ticks, slots=slots)


@pytest.mark.parametrize(
    ("schedule", "cells", "faults", "fix"),
    [
        (
            schedules.gpipe(2, 2),
            {"forward": {(1, 0): -1}, "backward": {(0, 1): -5}},
            [
                "forward of micro-batch 0 at virtual stage 1 never runs (tick -1)",
                "backward of micro-batch 1 at virtual stage 0 never runs (tick -5)",
            ],
            TICKS,
        ),
        (
            schedules.gpipe(2, 2),
            {"forward": {(1, 0): 0}},
            [
                "forward of micro-batch 0 at virtual stage 1 is at tick 0, but its input arrives at"
                " tick 1"
            ],
            TICKS,
        ),
        (
            schedules.eager_one_f_one_b(2, 2),
            {"backward": {(1, 1): 0}},
            [
                "backward of micro-batch 1 at virtual stage 1 is at tick 0, but its forward runs at"
                " tick 2"
            ],
            TICKS,
        ),
        (
            schedules.gpipe(2, 2),
            {"backward": {(0, 0): 3}},
            [
                "backward of micro-batch 0 at virtual stage 0 is at tick 3, but its cotangent"
                " arrives at tick 4"
            ],
            TICKS,
        ),
        (
            schedules.zero_bubble(2, 2),
            {"weight": {(0, 1): 4}},
            [
                (
                    "weight gradient of micro-batch 1 at virtual stage 0 is at tick 4, but its"
                    " backward runs at tick 5"
                ),
                (
                    "stage 0 has 2 weight gradients at tick 4: micro-batch 0 at virtual stage 0, "
                    "micro-batch 1 at virtual stage 0"
                ),
            ],
            TICKS,
        ),
        (
            schedules.interleaved(2, 2),
            {"backward": {(2, 1): 4}},
            [
                (
                    "backward of micro-batch 1 at virtual stage 2 is at tick 4, but its cotangent"
                    " arrives at tick 5"
                ),
                (
                    "stage 0 has 2 backwards at tick 4: micro-batch 0 at virtual stage 2,"
                    " micro-batch 1 at virtual stage 2"
                ),
            ],
            TICKS,
        ),
        (
            schedules.gpipe(1, 3),
            {"activation": {(0, 2): 0}},
            [
                "stage 0 keeps two things in activation slot 0: micro-batch 0 at virtual stage 0"
                " (ticks 0 to 3) and micro-batch 2 at virtual stage 0 (ticks 2 to 5)"
            ],
            SLOTS,
        ),
        (
            schedules.eager_one_f_one_b(2, 4),
            # written on the very tick on which micro-batch 0 is still read
            {"activation": {(0, 2): 0}},
            [
                (
                    "stage 0 keeps two things in activation slot 0: micro-batch 0 at virtual stage"
                    " 0 (ticks 0 to 2) and micro-batch 2 at virtual stage 0 (ticks 2 to 4)"
                ),
                (
                    "stage 0 keeps two things in activation slot 0: micro-batch 2 at virtual stage"
                    " 0 (ticks 2 to 4) and micro-batch 3 at virtual stage 0 (ticks 3 to 5)"
                ),
            ],
            SLOTS,
        ),
        (
            schedules.gpipe(2, 2),
            {"activation": {(1, 0): -1}, "input": {(1, 1): 0}, "deferred": {(0, 0): 2}},
            [
                "activation of micro-batch 0 at virtual stage 1 needs a slot at ticks 1 to 3",
                "input of micro-batch 1 at virtual stage 1 has slot 0, but nothing to keep",
                "deferred of micro-batch 0 at virtual stage 0 has slot 2, but nothing to keep",
            ],
            SLOTS,
        ),
        (
            schedules.one_f_one_b(2, 3),
            {"input": {(1, 1): -1}},
            ["input of micro-batch 1 at virtual stage 1 needs a slot at ticks 2 to 3"],
            SLOTS,
        ),
    ],
)
def test_spoilt_cells(schedule, cells, faults, fix):
    schedule.validate()
    spoilt = spoil(schedule, **cells)
    with pytest.raises(ValueError, match="the schedule has") as caught:
        spoilt.validate()
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    listed = "\n".join(f"  {fault}" for fault in faults)
    assert str(caught.value) == f"{schedule.name}: the schedule has {count}.\n{listed}\n{fix}"


def test_a_slot_may_be_used_again_on_the_next_tick():
    schedule = schedules.eager_one_f_one_b(2, 4)
    assert (
        schedule.ticks.backward[0][0],
        schedule.ticks.forward[0][3],
        schedule.slots.activation[0][3],
    ) == (2, 3, 0)
    spoil(schedule, activation={(0, 3): 7}).validate()


def test_two_activations_in_one_slot_are_found_behind_one_that_outlives_both():
    forward, backward = [[0, 1, 3]], [[9, 2, 4]]
    schedule = schedules.from_ticks(1, forward, backward)
    assert schedule.slots.activation == ((0, 1, 1),)
    with pytest.raises(ValueError, match="the schedule has 2 faults"):
        spoil(schedule, activation={(0, 1): 0, (0, 2): 0}).validate()


def test_at_most_eight_faults_are_listed_and_all_counted():
    schedule = schedules.gpipe(4, 4)
    nothing = as_table(np.full((4, 4), -1))
    with pytest.raises(ValueError, match="the schedule has") as caught:
        replace(schedule, ticks=schedule.ticks._replace(forward=nothing)).validate()
    lines = str(caught.value).splitlines()
    assert lines[0] == "gpipe: the schedule has 16 faults."
    assert lines[-2:] == ["  ... and 8 more", TICKS]
    assert len(lines) == 11


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"backward": ((2, 3),)}, ["backward has 1 row of 2, not 2 rows of 2"]),
        ({"weight": ((2, 3, 4), (2, 3))}, ["weight has 2 rows of 2 or 3, not 2 rows of 2"]),
        ({"stage_of": (0, 0)}, ["stage_of must name each of 2 stages equally often, got (0, 0)"]),
        (
            {"stage_of": (0, 1, 0)},
            [
                "stage_of must name each of 2 stages equally often, got (0, 1, 0)",
                "forward has 2 rows of 2, not 3 rows of 2",
                "backward has 2 rows of 2, not 3 rows of 2",
                "activation has 2 rows of 2, not 3 rows of 2",
                "input has 2 rows of 2, not 3 rows of 2",
                "cotangent has 2 rows of 2, not 3 rows of 2",
                "deferred has 2 rows of 2, not 3 rows of 2",
            ],
        ),
        (
            {"forward": ((), ()), "backward": ((), ())},
            [
                "there is no micro-batch",
                *(
                    f"{ring} has 2 rows of 2, not 2 rows of 0"
                    for ring in ("activation", "input", "cotangent", "deferred")
                ),
            ],
        ),
        ({"stage_of": (0, 2)}, ["stage_of must name each of 2 stages equally often, got (0, 2)"]),
    ],
)
def test_shapes(changes, faults):
    schedule = schedules.gpipe(2, 2)
    with pytest.raises(ValueError, match="the schedule has") as caught:
        replace(schedule, ticks=schedule.ticks._replace(**changes)).validate()
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    listed = "\n".join(f"  {fault}" for fault in faults)
    assert str(caught.value) == f"gpipe: the schedule has {count}.\n{listed}\n{SHAPE}"
