"""Schedules of one's own are made from tables of ticks and from orders. Wrong ones are refused."""

import pytest

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, [[0]], [[1]]), ValueError, "from_ticks: sizes must be at least 1, got num_stages=0."),
        (
            (1, [[0.0]], [[1]]),
            TypeError,
            (
                "from_ticks: forward must be integers [V, M]: one per virtual stage and"
                " micro-batch; got shape (1, 1) and dtype float64."
            ),
        ),
        (
            (1, [[0, 1]], [2, 3]),
            TypeError,
            (
                "from_ticks: backward must be integers [V, M]: one per virtual stage and"
                " micro-batch; got shape (2,) and dtype int64."
            ),
        ),
        (
            (1, [[0, 1], [2]], [[2, 3]]),
            TypeError,
            (
                "from_ticks: forward must be integers [V, M]: one per virtual stage and"
                " micro-batch; got rows of unequal length, or nothing."
            ),
        ),
        (
            (2, [[0], [1], [2]], [[5], [4], [3]]),
            ValueError,
            (
                "from_ticks: the schedule has 1 fault.\n"
                "  stage_of must name each of 2 stages equally often, got (0, 1, 0)\n"
                "Fix: give every table one row per virtual stage and one column per micro-batch."
            ),
        ),
        (
            (1, [[0]], [[1]], [[2, 3]]),
            ValueError,
            (
                "from_ticks: the schedule has 1 fault.\n"
                "  weight has 1 row of 2, not 1 row of 1\n"
                "Fix: give every table one row per virtual stage and one column per micro-batch."
            ),
        ),
        (
            (1, [[0, 0]], [[1, 2]]),
            ValueError,
            (
                "from_ticks: the schedule has 1 fault.\n  stage 0 has 2 forwards at tick 0:"
                " micro-batch 0 at virtual stage 0, micro-batch 1 at virtual stage 0\nFix: run each"
                " pass once, when its inputs are there; what is sent on a tick arrives on the next."
            ),
        ),
    ],
)
def test_from_ticks_refuses_bad_tables(arguments, error, message):
    with pytest.raises(error) as caught:
        schedules.from_ticks(*arguments)
    assert str(caught.value) == message


def test_from_ticks_calls_itself_what_it_is_told_and_checks_stage_of():
    with pytest.raises(TypeError) as caught:
        schedules.from_ticks(2, [[0], [1]], [[3], [2]], stage_of=[0.0, 1.0], name="mine")
    assert (
        str(caught.value)
        == "mine: stage_of must be integers [V]: one per virtual stage; got shape (2,) and dtype"
        " float64."
    )


@pytest.mark.parametrize(
    ("orders", "options", "error", "message"),
    [
        ("F0 B0", {}, TypeError, "from_order: orders must be one string per stage, got 'F0 B0'."),
        ([3], {}, TypeError, "from_order: orders must be one string per stage, got [3]."),
        ([], {}, ValueError, "from_order: orders must list something to do, got 0 stages."),
        (
            ["F0 G0 B0", "F0 F B0x"],
            {"name": "mine"},
            ValueError,
            (
                "mine: 3 words cannot be read.\n  stage 0: 'G0'\n  stage 1: 'F'\n  stage 1:"
                " 'B0x'\nFix: write F, B or W and the number of a micro-batch, then a dot and the"
                " chunk where there are several."
            ),
        ),
        (
            ["F0 F1 B0 W0 B1 W1", "F0 F1 F1 B0 B1 W0"],
            {},
            ValueError,
            (
                "from_order: every stage must list forward, backward, weight of 2 micro-batches in"
                " 1 chunk once.\n  stage 1 lists F1.0 2 times\n  stage 1 lists W1.0 0 times"
            ),
        ),
        (
            ["F0 B0", "B0 F0"],
            {},
            ValueError,
            (
                "from_order: the stages wait for one another from tick 1 on.\n  stage 0: backward"
                " of micro-batch 0 at virtual stage 0 needs backward of micro-batch 0 at virtual"
                " stage 1\n  stage 1: backward of micro-batch 0 at virtual stage 1 needs forward of"
                " micro-batch 0 at virtual stage 1"
            ),
        ),
        (
            ["F0 B0", "F0 B0"],
            {"stage_of": [0, 0]},
            ValueError,
            "from_order: stage_of must name each of 2 stages once per chunk (1), got [0, 0].",
        ),
    ],
)
def test_from_order_refuses_bad_orders(orders, options, error, message):
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
