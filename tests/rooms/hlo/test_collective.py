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
    # replicas, partitions, global, channel, kind -> positions
    (2, 4, True, True, "all-reduce", ((0, 1),)),
    (1, 2, False, True, "all-to-all", ((0, 1),)),
    (2, 2, False, True, "all-to-all", ((0, 1), (2, 3))),  # partitions, within each replica
    (2, 2, False, False, "all-gather", ((0, 2), (1, 3))),  # replicas, each partition on its own
    (2, 2, False, True, "reduce-scatter", ((0, 1, 2, 3),)),  # replicas, over all partitions
]


@pytest.mark.parametrize(
    ("replicas", "partitions", "is_global", "channel", "kind", "groups"), MODES
)
def test_ids_of_groups_follow_the_kind_of_the_collective(
    replicas, partitions, is_global, channel, kind, groups
):
    words = {"replica_groups": IDS}
    words |= {"use_global_device_ids": "true"} if is_global else {}
    words |= {"channel_id": "1"} if channel else {}
    assert replica_groups(kind, words, replicas, partitions) == groups


def test_no_groups_means_everybody():
    words = {"replica_groups": "{}", "channel_id": "1", "use_global_device_ids": "true"}
    assert replica_groups("all-reduce", words, 1, 4) == ((0, 1, 2, 3),)
    assert replica_groups("all-reduce", {}, 4, 1) == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("replicas", "partitions", "channel", "pairs"),
    [
        (1, 3, True, ((0, 1), (1, 0), (2, 2))),
        (3, 1, False, ((0, 1), (1, 0), (2, 2))),
        (2, 3, True, ((0, 1), (1, 0), (2, 2), (3, 4), (4, 3), (5, 5))),  # within each replica
    ],
)
def test_the_pairs_of_a_permute_have_what_stays(replicas, partitions, channel, pairs):
    words = {"source_target_pairs": "{{0,1},{1,0},{2,2}}"} | (
        {"channel_id": "1"} if channel else {}
    )
    assert permute_pairs(words, replicas, partitions) == pairs


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
def test_groups_have_the_axes_they_go_over(groups, axes):
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
        (((0, 1), (2, 3)), "long"),  # only some devices take part
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
def test_groups_within_an_axis_have_this_axis(groups, axis):
    assert axis_of_parts(groups, {"short": 2, "long": 6}) == axis


def test_axes_of_pairs_are_those_that_any_pair_moves_along():
    sizes = {"data": 2, "pipeline": 2, "tensor": 2}
    assert axes_of_pairs(((0, 2), (4, 6)), sizes) == ("pipeline",)
    assert axes_of_pairs(((0, 1), (1, 4)), sizes) == ("data", "tensor")
