"""`share_out`: work on owners, even where it can be."""

import pytest

from shardopt.partition._balance import busiest, share_out

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("costs", "owners", "max_load"),
    [
        ([1.0] * 16, 8, 2.0),
        ([1.0] * 12, 8, 2.0),  # no matrix is cut: four owners have two
        ([4.0] * 12 + [3.0] * 6 + [1.0] * 6, 8, 9.0),  # six blocks of a transformer
        ([4.0] * 24 + [3.0] * 12 + [1.0] * 12, 8, 18.0),  # twelve
        ([5.0, 1.0], 4, 5.0),
        ([3.0, 3.0, 2.0, 2.0, 2.0], 2, 6.0),
    ],
    ids=["even", "uneven", "six blocks", "twelve blocks", "few", "longest first is not best"],
)
def test_the_busiest_has_as_little_as_may_be(costs, owners, max_load):
    assignment = share_out(costs, owners)
    assert len(assignment) == len(costs)
    assert set(assignment) <= set(range(owners))
    assert busiest(costs, assignment, [0.0] * owners) == max_load


def test_there_may_be_nothing_to_share():
    assert share_out([], 4) == []


@pytest.mark.parametrize(
    ("costs", "max_load"), [([1.0] * 4, 2.0), ([2.0, 2.0, 1.0], 3.0)], ids=["even", "uneven"]
)
def test_owners_with_work_get_less(costs, max_load):
    loads = [2.0, 0.0, 0.0]
    assert busiest(costs, share_out(costs, 3, loads), loads) == max_load
