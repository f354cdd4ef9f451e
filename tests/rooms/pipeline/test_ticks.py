"""Walk `table()` as a program would, with names in place of numbers: nothing may be lost, mixed up
or overwritten.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.pipelines import v_shaped
from support.tiers import tiered

from shardopt.pipeline import schedules
from shardopt.pipeline._ticks import as_table

pytestmark = pytest.mark.fast

GARBAGE = "garbage"


def walk(schedule):
    """Return what every pass of every micro-batch has read, as (kind, virtual stage, micro-batch)
    -> names.

    Ring buffers begin, links idle, and slots are read into, full of garbage: what leaks out of them
    is seen."""
    table = schedule.table()
    stages = range(schedule.num_stages)
    split = "weight_slot" in table

    def buffers(size):
        return [[GARBAGE] * size for _ in stages]

    activations = buffers(schedule.num_slots)
    inputs = buffers(schedule.num_input_slots)
    cotangents = buffers(schedule.num_cotangent_slots)
    deferred = buffers(schedule.num_deferred_slots)
    ahead = buffers(len(schedule.forward_shifts))
    behind = buffers(len(schedule.backward_shifts))
    last = schedule.num_stages * schedule.num_chunks - 1
    read = {}
    made_before = [[GARBAGE] * schedule.num_stages] * 2

    for t in range(schedule.num_ticks):
        sent_ahead = [GARBAGE] * schedule.num_stages
        sent_behind = [GARBAGE] * schedule.num_stages
        for s in stages:
            row = {name: array[t, s] for name, array in table.items()}
            for slots, arrived, arrival_slots in (
                (inputs, ahead, row["forward_arrival"]),
                (cotangents, behind, row["backward_arrival"]),
            ):
                for message, slot in zip(arrived[s], arrival_slots, strict=True):
                    if slot >= 0:
                        slots[s][slot] = message

            def message(kind, arrived, waiting, end, s=s, row=row):
                by = row[f"{kind}_shift"]
                slot = row[f"{kind}_waited"]
                assert by < 0 or slot < 0
                return arrived[s][by] if by >= 0 else waiting[s][slot] if slot >= 0 else end

            def which(kind, s=s, row=row):
                m = int(row[f"{kind}_micro_batch"])
                chunk = int(row[f"{kind}_chunk"])
                assert (m < 0) == (chunk < 0)
                return m, schedule.virtual_stages[s][chunk]

            m, v = which("forward")
            if m >= 0:
                x = message("forward", ahead, inputs, f"batch {m}")
                assert ("forward", v, m) not in read
                read["forward", v, m] = (x,)
                activations[s][row["forward_slot"]] = f"x {v} {m}"
                sent_ahead[s] = f"y {v} {m}"
            m, v = which("backward")
            if m >= 0:
                assert ("backward", v, m) not in read
                dy = message(
                    "backward", behind, cotangents, f"loss {m}" if v == last else "no cotangent"
                )
                read["backward", v, m] = dy, activations[s][row["backward_slot"]]
                sent_behind[s] = f"dx {v} {m}"
                if split:
                    deferred[s][row["backward_deferred"]] = f"dy {v} {m}"
            if split:
                m, v = which("weight")
                if m >= 0:
                    assert ("weight", v, m) not in read
                    read["weight", v, m] = (
                        deferred[s][row["weight_deferred"]],
                        activations[s][row["weight_slot"]],
                    )
        sent_messages = [sent_ahead, sent_behind]
        leaving = made_before
        made_before = sent_messages
        if schedule.ticks.message_ticks == 1:
            leaving = sent_messages
        ahead, behind = (
            [[(leaves if by else stays)[(s - by) % len(stages)] for by in shifts] for s in stages]
            for shifts, leaves, stays in zip(
                (schedule.forward_shifts, schedule.backward_shifts),
                leaving,
                sent_messages,
                strict=True,
            )
        )
    return read


def expected(schedule):
    last = schedule.num_stages * schedule.num_chunks - 1
    read = {}
    for v in range(last + 1):
        for m in range(schedule.num_micro_batches):
            read["forward", v, m] = (f"y {v - 1} {m}" if v else f"batch {m}",)
            read["backward", v, m] = f"dx {v + 1} {m}" if v < last else f"loss {m}", f"x {v} {m}"
            if schedule.ticks.weight is not None:
                read["weight", v, m] = f"dy {v} {m}", f"x {v} {m}"
    return read


SCHEDULES = {
    "gpipe": lambda p, m, v: schedules.gpipe(p, m),
    "eager_one_f_one_b": lambda p, m, v: schedules.eager_one_f_one_b(p, m),
    "one_f_one_b": lambda p, m, v: schedules.one_f_one_b(p, m),
    "interleaved": lambda p, m, v: schedules.interleaved(p, m if v == 1 else p * -(-m // p), v),
    "zero_bubble": lambda p, m, v: schedules.zero_bubble(p, m if v == 1 else p * -(-m // p), v),
    "zero_bubble_2": lambda p, m, v: schedules.zero_bubble_2(p, m),
    "zero_bubble_v": lambda p, m, v: schedules.zero_bubble_v(p, m),
    "dual_pipe_v": lambda p, m, v: schedules.dual_pipe_v(p, m),
    "looped_breadth_first": lambda p, m, v: schedules.looped_breadth_first(p, m, v),
    "zero_bubble_lockstep": lambda p, m, v: schedules.zero_bubble_lockstep(
        p, m if v == 1 else p * -(-m // p), v
    ),
    "v_shaped": lambda p, m, v: v_shaped(p, m),
    "interleaved, sent ahead": lambda p, m, v: schedules.send_ahead(
        SCHEDULES["interleaved"](p, m, v)
    ),
    "zero_bubble_v, sent ahead": lambda p, m, v: schedules.send_ahead(
        schedules.zero_bubble_v(p, m)
    ),
}


@pytest.mark.parametrize(
    ("name", "count"),
    tiered([(name, count) for count in (2, 40) for name in SCHEDULES], lambda row: row[1] == 2),
)
def test_every_schedule_is_valid_and_hands_everything_on(name, count):
    def check(p, m, v):
        schedule = SCHEDULES[name](p, m, v)
        assert schedule.bubble_fraction <= schedule.program_bubble_fraction
        assert schedule.num_slots == max(schedule.peak_activations)
        assert walk(schedule) == expected(schedule)

    fuzz(check, st.integers(1, 16), st.integers(1, 64), st.integers(1, 4), count=count)


@st.composite
def late(draw):
    """A schedule whose passes come late by chance, so that messages wait and overtake one another."""
    stages = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3))
    m = draw(st.integers(1, 6))
    stage_of = draw(st.permutations([*range(stages)] * chunks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    split = draw(st.booleans())
    size = stages * chunks
    message_ticks = draw(st.integers(1, 2))
    used = set()
    tables = {kind: np.zeros((size, m), int) for kind in ("forward", "backward", "weight")}

    def put(kind, v, batch, earliest):
        tick = earliest + int(rng.integers(0, 5))
        while (kind, stage_of[v], tick) in used:
            tick += 1
        used.add((kind, stage_of[v], tick))
        tables[kind][v, batch] = tick
        return tick

    def takes(v, after):
        return 1 if v < 0 or stage_of[v] == stage_of[after] else message_ticks

    for batch in rng.permutation(m):
        tick = -1
        for v in range(size):
            tick = put("forward", v, batch, tick + takes(v - 1, v))
        tick -= 1
        for v in reversed(range(size)):
            tick = put("backward", v, batch, tick + (takes(v, v + 1) if v < size - 1 else 1))
            put("weight", v, batch, tick)
    if not split:
        del tables["weight"]
    return schedules.from_ticks(stages, **tables, stage_of=stage_of, message_ticks=message_ticks)


@pytest.mark.parametrize("count", tiered([50, 400], lambda count: count == 50))
def test_schedules_of_ones_own_hand_everything_on(count):
    def check(schedule):
        assert walk(schedule) == expected(schedule)
        assert schedule.num_slots == max(schedule.peak_activations)
        assert schedule.table_time() <= schedule.program_time()

    fuzz(check, late(), count=count)


def test_the_walk_sees_a_slot_that_is_reused_too_early():
    careless = schedules.gpipe(2, 3)
    zeros = as_table(np.zeros((2, 3), int))
    careless.__dict__["slots"] = careless.slots._replace(activation=zeros)
    assert walk(careless) != expected(careless)


def test_the_table_is_int32_and_says_minus_one_where_nothing_runs():
    table = schedules.one_f_one_b(2, 2).table()
    assert {array.dtype for array in table.values()} == {np.dtype(np.int32)}
    assert {name: array.shape for name, array in table.items() if "arrival" in name} == {
        "forward_arrival": (6, 2, 1),
        "backward_arrival": (6, 2, 1),
    }
    columns = {name: array[:, 1].tolist() for name, array in table.items() if "arrival" not in name}
    assert columns == {  # stage 1 does . F0 B0 F1 B1 . and input 1 comes a tick too early
        "forward_micro_batch": [-1, 0, -1, 1, -1, -1],
        "forward_chunk": [-1, 0, -1, 0, -1, -1],
        "forward_slot": [-1, 0, -1, 0, -1, -1],
        "forward_shift": [-1, 0, -1, -1, -1, -1],
        "forward_waited": [-1, -1, -1, 0, -1, -1],
        "backward_micro_batch": [-1, -1, 0, -1, 1, -1],
        "backward_chunk": [-1, -1, 0, -1, 0, -1],
        "backward_slot": [-1, -1, 0, -1, 0, -1],
        "backward_shift": [-1] * 6,
        "backward_waited": [-1] * 6,
    }
    assert table["forward_arrival"][:, 1, 0].tolist() == [-1, -1, 0, -1, -1, -1]


def test_a_ring_and_a_v_have_their_shifts():
    ring = schedules.interleaved(4, 4, 2)
    bent = v_shaped(4, 4)
    assert (ring.forward_shifts, ring.backward_shifts) == ((1,), (3,))
    assert (bent.forward_shifts, bent.backward_shifts) == ((0, 1, 3), (0, 1, 3))
    assert (schedules.gpipe(1, 2).forward_shifts, schedules.gpipe(1, 2).backward_shifts) == ((), ())
    assert (ring.virtual_stages, bent.virtual_stages) == (
        ((0, 4), (1, 5), (2, 6), (3, 7)),
        ((0, 7), (1, 6), (2, 5), (3, 4)),
    )


def test_weight_columns_only_where_the_backward_is_split():
    assert not [
        name for name in schedules.gpipe(2, 2).table() if "weight" in name or "deferred" in name
    ]
    assert {
        name
        for name in schedules.zero_bubble(2, 2).table()
        if "weight" in name or "deferred" in name
    } == {
        "weight_micro_batch",
        "weight_chunk",
        "weight_slot",
        "weight_deferred",
        "backward_deferred",
    }
