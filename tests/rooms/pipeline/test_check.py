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
SHAPE = "Fix: give every table one row per virtual stage and one column per micro-batch."


def spoil(schedule, **cells):
    """Return the schedule with single cells changed: forward={(v, m): tick}."""
    tables = {}
    for name, changes in cells.items():
        table = np.array(getattr(schedule.ticks, name))
        for cell, value in changes.items():
            table[cell] = value
        tables[name] = as_table(table)
    return replace(schedule, ticks=schedule.ticks._replace(**tables))


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
    ],
)
def test_each_spoilt_cell_is_listed(schedule, cells, faults, fix):
    with pytest.raises(ValueError, match="the schedule has") as caught:
        spoil(schedule, **cells)
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    listed = "\n".join(f"  {fault}" for fault in faults)
    assert str(caught.value) == f"{schedule.name}: the schedule has {count}.\n{listed}\n{fix}"


def test_at_most_eight_faults_are_listed_and_all_counted():
    schedule = schedules.gpipe(4, 4)
    nothing = as_table(np.full((4, 4), -1))
    with pytest.raises(ValueError, match="the schedule has") as caught:
        replace(schedule, ticks=schedule.ticks._replace(forward=nothing))
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
            ],
        ),
        (
            {"forward": ((), ()), "backward": ((), ())},
            ["there is no micro-batch"],
        ),
        ({"stage_of": (0, 2)}, ["stage_of must name each of 2 stages equally often, got (0, 2)"]),
    ],
)
def test_wrong_shapes_are_listed(changes, faults):
    schedule = schedules.gpipe(2, 2)
    with pytest.raises(ValueError, match="the schedule has") as caught:
        replace(schedule, ticks=schedule.ticks._replace(**changes))
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    listed = "\n".join(f"  {fault}" for fault in faults)
    assert str(caught.value) == f"gpipe: the schedule has {count}.\n{listed}\n{SHAPE}"
