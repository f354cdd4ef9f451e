"""Schedules of any sizes, tables and orders: one that can be run, printed and laid out, or an error
with every fault.
"""

import resource

import numpy as np
import pytest
from hypothesis import strategies as st
from support.fuzz import COUNTS, fuzz, outcome

from shardopt.pipeline import schedules
from shardopt.pipeline._kinds import KINDS

CHUNKED = {name for name, kind in KINDS.items() if kind.takes_chunks}
BUILDERS = [
    *sorted(CHUNKED),
    "gpipe",
    "one_f_one_b",
    "eager_one_f_one_b",
    "zero_bubble_2",
    "zero_bubble_v",
    "dual_pipe_v",
]

sizes = (
    st.integers(1, 4)
    | st.integers(-2, 6)
    | st.integers(-2, 9)
    | st.integers(-2, 20)
    | st.integers(min_value=2**20)  # in between a table takes its time, and no harm is done
    | st.integers(max_value=-3)
    | st.sampled_from(
        [
            2**31,
            2**63,
            10**30,
            2049,
            1.0,
            2.5,
            float("nan"),
            None,
            True,
            "4",
            [4],
            np.int32(4),
            np.float32(4),
        ]
    )
)
numbers = st.integers(-2, 40) | st.sampled_from(
    [2**22, 2**31, 2**62, 2**63, 2**64, 10**30, -(2**63), 1.5, None, "1", True]
)


def runnable(schedule):
    """Check that a schedule can be printed and laid out, and that its passes and memory are as it
    says.
    """
    if schedule.num_stages * schedule.num_ticks > 600:  # it takes its time
        return
    assert str(schedule).startswith(schedule.name)
    assert all(
        rows.shape[:2] == (schedule.num_ticks, schedule.num_stages)
        for rows in schedule.table().values()
    )
    assert 0 <= schedule.bubble_fraction <= schedule.program_bubble_fraction < 1
    for name in ("forward", "backward"):
        micro_batches = schedule.table()[f"{name}_micro_batch"]
        assert (
            micro_batches >= 0
        ).sum() == schedule.num_micro_batches * schedule.num_stages * schedule.num_chunks


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(prop, *strategies, count):
    before = memory()
    fuzz(prop, *strategies, count=count)
    assert memory() - before < 500_000  # kB


@pytest.mark.parametrize("count", COUNTS)
def test_schedules_take_any_sizes(count):
    built_names = []

    def prop(name, stages, micro_batches, chunks):
        options = {"num_chunks": chunks} if name in CHUNKED else {}
        schedule, message = outcome(
            lambda: getattr(schedules, name)(stages, micro_batches, **options), name
        )
        if message is None:
            built_names.append(name)
            runnable(schedule)
            assert (schedule.num_stages, schedule.num_micro_batches) == (stages, micro_batches)

    check(
        prop,
        st.sampled_from(BUILDERS),
        sizes,
        sizes,
        st.integers(-1, 4) | st.integers(1, 3) | sizes,
        count=count,
    )
    # hypothesis takes constants of every module that is loaded into its draws, so they need not
    # reach all builders
    assert len(set(built_names)) > len(BUILDERS) // 2
    for name in BUILDERS:
        prop(name, 2, 4, 2)
    assert set(built_names) == set(BUILDERS)


@st.composite
def tables(draw):
    """The tables of a whole schedule with some numbers, rows or columns changed; or anything."""
    if draw(st.integers(0, 4)) == 0:
        table = st.lists(st.lists(numbers, max_size=4), max_size=4)
        anything = table | numbers | st.lists(numbers, max_size=4) | st.text(max_size=3)
        return (
            draw(sizes),
            [draw(anything), draw(anything), draw(st.none() | anything)],
            draw(st.none() | anything),
        )
    name = draw(st.sampled_from(BUILDERS))
    ticks = getattr(schedules, name)(2, draw(st.sampled_from([2, 4]))).ticks
    tables = [
        [list(row) for row in table] if table else None
        for table in (ticks.forward, ticks.backward, ticks.weight)
    ]
    homes = list(ticks.stage_of)
    for _ in range(draw(st.integers(0, 3))):
        table = draw(st.sampled_from([table for table in tables if table]))
        row = draw(st.sampled_from(table))
        match draw(st.sampled_from(["number", "number", "number", "row", "column", "home"])):
            case "number" if row:
                row[draw(st.integers(0, len(row) - 1))] = draw(numbers)
            case "row":
                table.append(list(row))
            case "column" if row:
                row.pop()
            case "home":
                homes[draw(st.integers(0, len(homes) - 1))] = draw(numbers)
    return 2, tables, draw(st.sampled_from([None, homes]))


@pytest.mark.parametrize("count", COUNTS)
def test_from_ticks_takes_any_tables(count):
    built_schedules = []

    def prop(drawn_args):
        stages, tick_tables, homes = drawn_args
        schedule, message = outcome(
            lambda: schedules.from_ticks(stages, *tick_tables, stage_of=homes, name="mine"), "mine"
        )
        if message is None:
            built_schedules.append(schedule)
            runnable(schedule)

    check(prop, tables(), count=count)
    assert built_schedules


@st.composite
def orders(draw):
    """The lines of a whole schedule with some words changed, moved or repeated; or anything."""
    word = st.builds(
        "{}{}{}".format,
        st.sampled_from("FBWX"),
        st.sampled_from(["0", "1", "2", "07", "99999999999999", "-1", "", "٣", "9" * 5000]),
        st.sampled_from(["", "", ".0", ".1", ".99999999999", "."]),
    )
    if draw(st.integers(0, 4)) == 0:
        anything = st.text(max_size=12) | st.lists(word, max_size=6).map(" ".join)
        return draw(st.lists(anything, max_size=4) | anything | st.lists(numbers, max_size=2))
    lines = [line.split()[2:] for line in str(schedules.zero_bubble(2, 2)).splitlines()[4:]]
    for _ in range(draw(st.integers(0, 3))):
        line = draw(st.sampled_from(lines))
        at = draw(st.integers(0, len(line) - 1)) if line else 0
        match draw(st.sampled_from(["new", "gone", "twice", "swap"])):
            case "new":
                line.insert(at, draw(word))
            case "gone" if line:
                line.pop(at)
            case "twice" if line:
                line.append(line[at])
            case "swap" if line:
                line[at], line[0] = line[0], line[at]
    return [" ".join(line) for line in lines]


@pytest.mark.parametrize("count", COUNTS)
def test_from_order_takes_any_lines(count):
    built_schedules = []
    homes = st.none() | st.lists(numbers, max_size=4) | numbers | st.permutations([0, 1])

    def prop(lines, stage_of):
        schedule, message = outcome(
            lambda: schedules.from_order(lines, stage_of=stage_of), "from_order"
        )
        if message is None:
            built_schedules.append(schedule)
            runnable(schedule)

    check(prop, orders(), homes, count=count)
    assert built_schedules
