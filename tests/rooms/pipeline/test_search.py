"""`schedules.search`: valid, within its memory, never worse than what is known, and on small sizes
the best there is.
"""

import functools
import itertools

import pytest
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.tiers import tiered

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast

number = st.integers(0, 9) | st.floats(0, 10).map(lambda x: round(x, 2))


@st.composite
def tasks(draw):
    stages, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    each = number | st.lists(number, min_size=stages, max_size=stages)
    times = {
        "forward": draw(each),
        "backward": draw(each),
        "weight": draw(each),
        "communication": draw(number),
    }
    return stages, micro_batches, times, draw(st.none() | st.integers(1, 12))


@pytest.mark.parametrize("count", tiered([10, 200], lambda count: count == 10))
def test_is_valid_within_its_memory_and_never_worse_than_what_is_known(count):
    fuzz(check_searched, tasks(), st.booleans(), count=count)


def check_searched(task, synchronous):
    stages, micro_batches, times, memory = task
    found = schedules.search(stages, micro_batches, **times, memory=memory, synchronous=synchronous)
    found.validate()
    assert (found.num_stages, found.num_micro_batches, found.num_chunks) == (
        stages,
        micro_batches,
        1,
    )
    assert max(found.peak_activations) <= (memory or micro_batches)
    assert (
        schedules.search(stages, micro_batches, **times, memory=memory, synchronous=synchronous)
        == found
    )

    def cost(schedule):
        return schedule.table_time(**times) if synchronous else max(schedule.stage_times(**times))

    for make, needs in ((schedules.zero_bubble, stages), (schedules.zero_bubble_2, 2 * stages - 1)):
        if memory is None or memory >= needs:
            assert cost(found) <= cost(make(stages, micro_batches)) * (1 + 1e-9)


def in_turn(count):
    """Every order of F, B and W of so many micro-batches, each kind in turn and each after what it
    needs.
    """
    found, open_orders = [], [("", 0, 0, 0)]
    while open_orders:
        order, f, b, w = open_orders.pop()
        if w == count:
            found.append(order)
            continue
        open_orders += [(f"{order} F{f}", f + 1, b, w)] if f < count else []
        open_orders += [(f"{order} B{b}", f, b + 1, w)] if b < f else []
        open_orders += [(f"{order} W{w}", f, b, w + 1)] if w < b else []
    return found


def peak(order):
    kept, most = 0, 0
    for word in order.split():
        kept += {"F": 1, "B": 0, "W": -1}[word[0]]
        most = max(most, kept)
    return most


@pytest.mark.parametrize("memory", tiered([1, 2, 3], lambda memory: memory < 3))
@pytest.mark.parametrize(
    "times",
    [
        (1, 1, 1, 0),
        (2, 3, 1, 0.5),
        (1, 2, 2, 1),
        (3, 2, 2, 0),
        (1, 1, 4, 0.25),
        ([2, 1], [1, 4], [1, 1], 0.5),
    ],
    ids=str,
)
def test_two_stages_and_three_micro_batches_are_the_best_of_all_orders(times, memory):
    names = ("forward", "backward", "weight", "communication")
    numbers = dict(zip(names, times, strict=True))
    found = schedules.search(2, 3, **numbers, memory=memory)
    best = min(built.table_time(**numbers) for built in all_schedules(memory))
    assert found.table_time(**numbers) == pytest.approx(best)


@functools.cache
def all_schedules(memory):
    """Every schedule of two stages and three micro-batches, whatever its passes take."""
    orders = [order for order in in_turn(3) if peak(order) <= memory]
    pairs = itertools.product(orders, repeat=2)
    return [built for pair in pairs if (built := built_of(pair)) is not None]


def built_of(pair):
    try:
        return schedules.from_order(pair)
    except ValueError:  # they wait for one another
        return None


def test_more_memory_is_never_slower():
    times = {"forward": 2.0, "backward": 5.0, "weight": 1.0, "communication": 0.5}
    spent = [
        schedules.search(6, 18, **times, memory=m).table_time(**times) for m in (1, 3, 6, 9, 12)
    ]
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > spent[1] > spent[2] > spent[3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": 0}, ValueError, "search: memory must be finite, at least 1; got 0."),
        ({"memory": "4"}, TypeError, "search: memory must be a number, got '4' (str)."),
        (
            {"weight": [1, 2]},
            ValueError,
            (
                "search: weight has 2 times for 3 stages.\nFix: give one number, or one for each,"
                " in the model's order."
            ),
        ),
        ({"forward": -1}, ValueError, "search: forward must not be negative, got -1."),
        ({"communication": None}, TypeError, "search: communication must be numbers, got None."),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error) as caught:
        schedules.search(3, 4, **{"forward": 1, "backward": 1, "weight": 1} | options)
    assert str(caught.value) == message


def test_sizes_are_refused():
    with pytest.raises(ValueError, match=r"^search: sizes must be at least 1, got num_stages=0\.$"):
        schedules.search(0, 4, forward=1, backward=1, weight=1)
