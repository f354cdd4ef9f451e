"""Every form of replica groups against lists written by hand, and what their ids mean."""

import re

import pytest

from shardopt.hlo._collective import (
    axes_of_groups,
    axes_of_pairs,
    axis_of_parts,
    permute_pairs,
    read_groups,
    replica_groups,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{{0,1,2,3}}", ((0, 1, 2, 3),)),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{0},{1}}", ((0,), (1,))),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=4,'tensor'=2] {'data'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['data'=2,'pipeline'=1,'tensor'=4] {'tensor'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh[a=2,b=4] {b}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (
            "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'a'}", ((3, 2), (1, 0))),
    ],
)
def test_every_form_gives_the_groups(text, groups):
    assert read_groups(text, 8) == groups


@pytest.mark.parametrize("text", ["[4,2]<=8", "mesh['a'=2]"])
def test_an_unknown_form_is_refused(text):
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'audit: cannot read the replica groups {text!r}.')}$"
    ):
        read_groups(text, 8)


IDS = "{{0,1}}"
MODES = [
    # replicas, partitions, global, channel, knows the flag -> positions
    (2, 4, True, True, True, ((0, 1),)),
    (1, 2, False, True, False, ((0, 1),)),
    (2, 2, False, True, False, ((0, 1), (2, 3))),  # partitions, within each replica
    (2, 2, False, False, True, ((0, 2), (1, 3))),  # replicas, each partition on its own
    (2, 2, False, True, True, ((0, 1, 2, 3),)),  # replicas, over all partitions
]


@pytest.mark.parametrize(
    ("replicas", "partitions", "is_global", "channel", "has_flag", "groups"), MODES
)
def test_what_an_id_means(replicas, partitions, is_global, channel, has_flag, groups):
    words = {"replica_groups": IDS}
    words |= {"use_global_device_ids": "true"} if is_global else {}
    words |= {"channel_id": "1"} if channel else {}
    found = replica_groups(
        words, replicas=replicas, partitions=partitions, has_global_flag=has_flag
    )
    assert found == groups


def test_no_groups_means_everybody():
    words = {"replica_groups": "{}", "channel_id": "1", "use_global_device_ids": "true"}
    assert replica_groups(words, replicas=1, partitions=4, has_global_flag=True) == ((0, 1, 2, 3),)
    assert replica_groups({}, replicas=4, partitions=1, has_global_flag=True) == ((0, 1, 2, 3),)


def test_permutes_leave_out_what_stays():
    words = {"source_target_pairs": "{{0,1},{1,0},{2,2}}"}
    assert permute_pairs(words | {"channel_id": "1"}, replicas=1, partitions=3) == ((0, 1), (1, 0))
    assert permute_pairs(words, replicas=3, partitions=1) == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("c",)),
        (((4, 0), (1, 5), (2, 6), (3, 7)), ("a",)),
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("b",)),
        (((0, 5, 1, 4), (2, 3, 6, 7)), ("a", "c")),
        ((tuple(range(8)),), ("a", "b", "c")),
        (((0, 3), (1, 2), (4, 7), (5, 6)), None),  # a diagonal
        (((0, 1), (2, 6), (3, 7), (4, 5)), None),  # two kinds of groups
        (((0, 1, 2), (3, 4, 5)), None),
        (((0, 1), (2,), (3,)), None),  # unequal sizes
    ],
)
def test_axes_of_groups(groups, axes):
    assert axes_of_groups(groups, {"a": 2, "b": 2, "c": 2}) == axes


def test_half_of_an_axis_is_not_the_axis():
    assert axes_of_groups(((0, 1), (2, 3)), {"a": 4}) is None


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)), "long"),
        (((0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11)), "long"),
        (((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)), "long"),
        (((4, 0, 2), (1, 3, 5), (6, 8, 10), (7, 9, 11)), "long"),  # in any order
        (((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)), "long"),
        (((0, 1), (2, 3)), "long"),  # those that take part
        (((0, 2), (1, 3)), None),  # pairs two apart do not divide six
        (((1, 2), (3, 4)), None),  # not aligned
        (((0, 1, 2, 3), (4, 5, 6, 7)), None),  # over both axes
        (((0, 1, 3), (2, 4, 5)), None),  # no regular steps
        (((0, 1), (6, 7, 8)), None),  # unequal sizes
        (((0, 1), (2, 5)), None),  # two kinds of groups
        (((0, 6), (1, 7)), None),  # the whole of an axis is no part
        (((0,), (1,)), None),
    ],
)
def test_axis_of_parts(groups, axis):
    assert axis_of_parts(groups, {"short": 2, "long": 6}) == axis


def test_axes_of_pairs_are_those_that_any_pair_moves_along():
    sizes = {"data": 2, "pipeline": 2, "tensor": 2}
    assert axes_of_pairs(((0, 2), (4, 6)), sizes) == ("pipeline",)
    assert axes_of_pairs(((0, 1), (1, 4)), sizes) == ("data", "tensor")
