"""The picture has a box for every pass, as long as the pass and when the lockstep program runs it."""

from itertools import pairwise

import pytest
from support.scripts import imported

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast


def drawn(schedule, **options):
    with imported("schedule_pictures") as script:
        return script.draw(schedule, **options)


def boxes(figure):
    """The extents (left, right, stage) of the boxes of every pass; idle ground lies below them."""
    return [
        (round(x.xmin, 6), round(x.xmax, 6), round((x.ymin + x.ymax) / 2))
        for collection in figure.axes[0].collections
        if collection.get_zorder() == 2
        for x in (path.get_extents() for path in collection.get_paths())
    ]


def test_boxes_of_all_passes_never_overlap_and_the_legend_names_them():
    schedule = schedules.interleaved(2, 4, 3)
    figure = drawn(schedule)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["forward", "backward", "idle", "chunk 0", "chunk 2"]
    extents = sorted((stage, left_edge, right) for left_edge, right, stage in boxes(figure))
    assert len(extents) == 2 * 3 * 2 * 4
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(extents))


def test_boxes_stand_where_the_clock_of_the_pace_counts_them(tmp_path):
    figure = drawn(
        schedules.gpipe(2, 2), pace="own", forward=[1, 2], backward=1, weight=0, communication=0.5
    )
    first = [(0, 1, 0), (1, 2, 0), (7, 8, 0), (8, 9, 0)]
    second = [(1.5, 3.5, 1), (3.5, 5.5, 1), (5.5, 6.5, 1), (6.5, 7.5, 1)]
    assert sorted(boxes(figure)) == sorted(first + second)
    lockstep = drawn(schedules.gpipe(2, 1), path=tmp_path / "gpipe.png", communication=0.5)
    assert sorted(boxes(lockstep)) == [(0, 1, 0), (1.5, 2.5, 1), (3, 5, 1), (5.5, 7.5, 0)]
    assert (tmp_path / "gpipe.png").read_bytes().startswith(b"\x89PNG")
