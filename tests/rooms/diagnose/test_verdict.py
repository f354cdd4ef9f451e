"""The verdict on sums: which phase differs first, and which device was wrong."""

import numpy as np
import pytest

from shardopt.diagnose._verdict import (
    NAMED,
    NOT_DETERMINISTIC,
    ONE_OF,
    UNKNOWN,
    Verdict,
    judge,
    total,
    written,
)
from shardopt.diagnose._verified import (
    GRADIENT,
    METRICS,
    REDUCTION,
    STATE,
    UPDATE,
    WRITTEN,
    Column,
    Evidence,
)

pytestmark = pytest.mark.fast

COLUMNS = (
    Column(STATE, ("data",)),
    Column(STATE),
    Column(GRADIENT),
    Column(REDUCTION),
    Column(METRICS, ("data",)),
    Column(UPDATE),
    Column(WRITTEN, ("data",)),
    Column(WRITTEN),
)
COPIED = [i for i, column in enumerate(COLUMNS) if column.copies]


def clean(count):
    """Return the sums of a run on `count` devices: copies are equal, everything else is not."""
    sums = np.arange(count * len(COLUMNS), dtype=np.uint64).reshape(count, -1) + np.uint64(2**40)
    sums[:, COPIED] = sums[0, COPIED]
    return sums


def run(count, shift=0, changed=()):
    """Return a run whose sums at (position, column) have another value."""
    sums = clean(count)
    for position, column, *value in changed:
        sums[position, column] = np.uint64(value[0] if value else 7)
    return Evidence(shift, COLUMNS, sums)


def runs(count, by_device=(), first=()):
    """Return five runs: a wrong device is wrong at whatever position it takes.

    `first` is wrong in the first run alone.
    """
    shifts = [0, 1, 0, 1, 2]
    return [
        run(
            count,
            shift % count,
            [((device + shift) % count, c) for device, c in by_device] + list(first) * (i == 0),
        )
        for i, shift in enumerate(shifts)
    ]


def test_equal_sums_have_no_verdict():
    assert judge(runs(4), {"data": 4}) is None
    assert judge(runs(4), {"data": 4}, clean(4)[:, :2]) is None


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("column", "phase"), [(2, GRADIENT), (3, REDUCTION), (5, UPDATE), (7, WRITTEN)]
)
def test_one_wrong_result_names_its_device(count, column, phase):
    """Whatever it spreads to later: here all devices write another state."""
    spread = [(position, 7) for position in range(count)] if phase != WRITTEN else []
    verdict = judge(runs(count, first=[(1, column), *spread]), {"data": count})
    assert verdict == Verdict(phase, NAMED, (1,))


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_device_that_is_always_wrong_is_named(count):
    assert judge(runs(count, by_device=[(2, 2)]), {"data": count}) == Verdict(GRADIENT, NAMED, (2,))


def test_two_devices_alone_cannot_tell_which_is_always_wrong():
    """Its copies of the metrics are no third opinion either."""
    for column, phase in ((2, GRADIENT), (6, WRITTEN)):
        assert judge(runs(2, by_device=[(1, column)]), {"data": 2}) == Verdict(
            phase, ONE_OF, (0, 1)
        )


def test_two_wrong_devices_are_both_named():
    assert judge(runs(8, by_device=[(1, 2), (6, 2)]), {"data": 8}) == Verdict(
        GRADIENT, NAMED, (1, 6)
    )


def test_a_stored_copy_is_outvoted_and_a_stored_shard_is_compared_with_its_record():
    at_rest = [run(4, shift, [(3, 0)]) for shift in (0, 1)]  # the copy moves with the run
    assert judge(at_rest, {"data": 4}) == Verdict(STATE, NAMED, (3,))
    shard = [run(4, shift, [(3, 1)]) for shift in (0, 1)]
    assert judge(shard, {"data": 4}) is None  # nothing else knows it
    assert judge(shard, {"data": 4}, clean(4)[:, :2]) == Verdict(STATE, NAMED, (3,))
    pair = [Evidence(0, COLUMNS[:1], np.array([[1], [2]], np.uint64))]
    assert judge(pair, {"replica": 1, "data": 2}) == Verdict(STATE, ONE_OF, (0, 1))


def test_a_wrong_move_is_seen_at_the_device_that_received():
    received = [run(4, 0), run(4, 1, [(3, 1)]), run(4, 0), run(4, 1), run(4, 2)]
    assert judge(received, {"data": 4}) == Verdict(STATE, NAMED, (2,))


def test_only_copies_along_the_axes_of_their_column_are_compared():
    """There are two replicas of two shards: position 3 holds the copy of position 1."""
    columns = (Column(STATE, ("replica",)),)
    evidence = Evidence(0, columns, np.array([[1], [2], [1], [9]], np.uint64))
    assert judge([evidence], {"replica": 2, "data": 2}) == Verdict(STATE, ONE_OF, (1, 3))
    right = evidence._replace(sums=np.array([[1], [2], [1], [2]], np.uint64))
    assert judge([right], {"replica": 2, "data": 2}) is None
    assert total(right.sums, columns, {"replica": 2, "data": 2}) == (0, 3)


def test_a_difference_everywhere_names_no_device():
    """An error hit one run of five, and the reduction spread it.

    Other sums each time: nothing is deterministic.
    """
    everywhere = [(position, 3) for position in range(4)]
    assert judge(runs(4, first=everywhere), {"data": 4}) == Verdict(REDUCTION, UNKNOWN, ())
    shifts = [0, 1, 0, 1, 2]
    always = [
        run(4, shift, [(p, 3, 100 * i + p) for p in range(4)]) for i, shift in enumerate(shifts)
    ]
    assert judge(always, {"data": 4}) == Verdict(REDUCTION, NOT_DETERMINISTIC, ())
    hidden = [run(4, shift, [(p, 3, 100 * shift + p) for p in range(4)]) for shift in shifts]
    assert judge(hidden, {"data": 4}) == Verdict(REDUCTION, UNKNOWN, ())


PAIRS = (Column(GRADIENT, together=("tensor",)),)


@pytest.mark.parametrize("device", range(4))
def test_devices_that_exchange_values_are_named_without_their_partners(device):
    """Two pairs of devices: a wrong result has two suspects.

    Another shift gives the wrong device another partner.
    """

    def pair_runs(is_wrong):
        evidence = []
        for number, shift in enumerate([0, 1, 0, 1, 2]):
            sums = np.array([[1], [1], [2], [2]], np.uint64)
            position = (device + shift) % 4
            if is_wrong(number):
                sums[position // 2 * 2 : position // 2 * 2 + 2] = 10 + position
            evidence.append(Evidence(shift, PAIRS, sums))
        return evidence

    sizes = {"data": 2, "tensor": 2}
    partner = device ^ 1
    assert judge(pair_runs(lambda number: True), sizes) == Verdict(GRADIENT, NAMED, (device,))
    once = judge(pair_runs(lambda number: number == 0), sizes)
    assert once == Verdict(GRADIENT, ONE_OF, tuple(sorted((device, partner))))
    assert judge(pair_runs(lambda number: False), sizes) is None


def test_all_devices_that_exchange_values_are_suspects():
    column = Column(REDUCTION, together=("data",))
    sizes = {"data": 4}

    def results(*values):
        return [
            Evidence(shift, (column,), np.full((4, 1), value, np.uint64))
            for shift, value in zip([0, 1, 0, 1, 2], values, strict=True)
        ]

    assert judge(results(7, 1, 1, 1, 1), sizes) == Verdict(REDUCTION, UNKNOWN, ())
    assert judge(results(7, 8, 7, 8, 9), sizes) == Verdict(REDUCTION, UNKNOWN, ())
    assert judge(results(3, 4, 5, 6, 7), sizes) == Verdict(REDUCTION, NOT_DETERMINISTIC, ())


def test_the_written_state_is_recorded():
    assert np.array_equal(written(run(4)), clean(4)[:, 6:])
