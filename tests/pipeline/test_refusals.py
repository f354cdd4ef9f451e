"""What is refused before there is a schedule."""

import numpy as np
import pytest

from shardopt.pipeline import schedules

CHUNKED = {"interleaved": schedules.interleaved, "zero_bubble_lockstep": schedules.zero_bubble_lockstep}
PLAIN = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "eager_one_f_one_b": schedules.eager_one_f_one_b,
    "zero_bubble": schedules.zero_bubble,
}


@pytest.mark.parametrize("name", [*PLAIN, *CHUNKED])
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 4), ValueError, "sizes must be at least 1, got num_stages=0."),
        ((-2, -4), ValueError, "sizes must be at least 1, got num_stages=-2, num_micro_batches=-4."),
        ((4, 2.0), TypeError, "sizes must be integers, got num_micro_batches=2.0 (float)."),
        ((True, "8"), TypeError, "sizes must be integers, got num_stages=True (bool), num_micro_batches='8' (str)."),
        ((None, 0), TypeError, "sizes must be integers, got num_stages=None (NoneType)."),
    ],
)
def test_sizes(name, sizes, error, message):
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
            "with 2 chunks a stage, micro-batches must be a multiple of the 4 stages, got 6.\n"
            "Fix: use 4 or 8 micro-batches, or num_chunks=1.",
        ),
        (
            (4, 3, 3),
            ValueError,
            "with 3 chunks a stage, micro-batches must be a multiple of the 4 stages, got 3.\n"
            "Fix: use 4 micro-batches, or num_chunks=1.",
        ),
    ],
)
def test_chunks(name, sizes, error, message):
    with pytest.raises(error) as caught:
        CHUNKED[name](*sizes)
    assert str(caught.value) == f"{name}: {message}"


def test_one_chunk_takes_any_number_of_micro_batches():
    assert schedules.interleaved(4, 6, 1).num_micro_batches == 6


def test_numpy_sizes_are_sizes():
    assert schedules.interleaved(np.int64(2), np.int32(4), np.int8(2)) == schedules.interleaved(2, 4, 2)
    assert schedules.zero_bubble(np.int64(3), np.uint8(4)) == schedules.zero_bubble(3, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, [[0]], [[1]]), ValueError, "from_ticks: sizes must be at least 1, got num_stages=0."),
        (
            (1, [[0.0]], [[1]]),
            TypeError,
            "from_ticks: forward must be integers [V, M]: one a virtual stage and micro-batch; "
            "got shape (1, 1) and dtype float64.",
        ),
        (
            (1, [[0, 1]], [2, 3]),
            TypeError,
            "from_ticks: backward must be integers [V, M]: one a virtual stage and micro-batch; "
            "got shape (2,) and dtype int64.",
        ),
        (
            (1, [[0, 1], [2]], [[2, 3]]),
            TypeError,
            "from_ticks: forward must be integers [V, M]: one a virtual stage and micro-batch; "
            "got rows of unequal length, or nothing.",
        ),
        (
            (2, [[0], [1], [2]], [[5], [4], [3]]),
            ValueError,
            "from_ticks: the schedule has 1 fault.\n"
            "  stage_of must name each of 2 stages equally often, got (0, 1, 0)\n"
            "Fix: give every table one row a virtual stage and one column a micro-batch.",
        ),
        (
            (1, [[0]], [[1]], [[2, 3]]),
            ValueError,
            "from_ticks: the schedule has 1 fault.\n"
            "  weight has 1 row of 2, not 1 row of 1\n"
            "Fix: give every table one row a virtual stage and one column a micro-batch.",
        ),
        (
            (1, [[0, 0]], [[1, 2]]),
            ValueError,
            "from_ticks: the schedule has 1 fault.\n"
            "  stage 0 has 2 forwards at tick 0: micro-batch 0 at virtual stage 0, micro-batch 1 at virtual stage 0\n"
            "Fix: run each pass once, when its inputs are there; what is sent on a tick arrives on the next.",
        ),
    ],
)
def test_from_ticks(arguments, error, message):
    with pytest.raises(error) as caught:
        schedules.from_ticks(*arguments)
    assert str(caught.value) == message


def test_from_ticks_calls_itself_what_it_is_told_and_checks_stage_of():
    with pytest.raises(TypeError) as caught:
        schedules.from_ticks(2, [[0], [1]], [[3], [2]], stage_of=[0.0, 1.0], name="mine")
    assert str(caught.value) == (
        "mine: stage_of must be integers [V]: one a virtual stage; got shape (2,) and dtype float64."
    )


@pytest.mark.parametrize(
    ("orders", "options", "error", "message"),
    [
        ("F0 B0", {}, TypeError, "from_order: orders must be one string a stage, got 'F0 B0'."),
        ([3], {}, TypeError, "from_order: orders must be one string a stage, got [3]."),
        ([], {}, ValueError, "from_order: orders must list something to do, got 0 stages."),
        (
            ["F0 G0 B0", "F0 F B0x"],
            {"name": "mine"},
            ValueError,
            "mine: 3 words cannot be read.\n  stage 0: 'G0'\n  stage 1: 'F'\n  stage 1: 'B0x'\n"
            "Fix: write F, B or W and the number of a micro-batch, then a dot and the chunk where there are several.",
        ),
        (
            ["F0 F1 B0 W0 B1 W1", "F0 F1 F1 B0 B1 W0"],
            {},
            ValueError,
            "from_order: every stage must list forward, backward, weight of 2 micro-batches in 1 chunk once.\n"
            "  stage 1 lists F1.0 2 times\n  stage 1 lists W1.0 0 times",
        ),
        (
            ["F0 B0", "B0 F0"],
            {},
            ValueError,
            "from_order: the stages wait for one another from tick 1 on.\n"
            "  stage 0: backward of micro-batch 0 at virtual stage 0 needs backward of micro-batch 0 at virtual "
            "stage 1\n"
            "  stage 1: backward of micro-batch 0 at virtual stage 1 needs forward of micro-batch 0 at virtual stage 1",
        ),
        (
            ["F0 B0", "F0 B0"],
            {"stage_of": [0, 0]},
            ValueError,
            "from_order: stage_of must name each of 2 stages once a chunk (1), got [0, 0].",
        ),
    ],
)
def test_from_order(orders, options, error, message):
    with pytest.raises(error) as caught:
        schedules.from_order(orders, **options)
    assert str(caught.value) == message


def test_from_order_takes_chunks_and_a_v():
    orders = ["F0.0 F0.1 B0.1 B0.0", "F0.0 F0.1 B0.1 B0.0"]
    v = schedules.from_order(orders, stage_of=[0, 1, 1, 0])
    assert v.ticks.forward == ((0,), (1,), (2,), (3,))
    assert v.virtual_stages == ((0, 3), (1, 2))
    ring = schedules.from_order(orders)
    assert ring.virtual_stages == ((0, 2), (1, 3))
