"""The picture has a box for every pass, as long as the pass and when the lockstep program runs it."""

from itertools import pairwise

import matplotlib.image
import pytest

from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast


def boxes(figure):
    """The extents (left, right, stage) of the boxes of every pass; idle ground lies below them."""
    return [
        (round(x.xmin, 6), round(x.xmax, 6), round((x.ymin + x.ymax) / 2))
        for collection in figure.axes[0].collections
        if collection.get_zorder() == 2
        for x in (path.get_extents() for path in collection.get_paths())
    ]


def labels(figure):
    numbers = [text for text in figure.axes[0].texts if text.get_text().isdigit()]
    return sorted((*text.get_position(), text.get_text()) for text in numbers)


def test_every_pass_has_a_box_and_a_number():
    figure = schedules.eager_one_f_one_b(2, 2).plot()  # ticks F, F B, F B, B: 1 + 3 + 3 + 2
    first = [(0, 1, 0), (1, 2, 0), (4, 6, 0), (7, 9, 0)]
    second = [(1, 2, 1), (2, 4, 1), (4, 5, 1), (5, 7, 1)]
    assert sorted(boxes(figure)) == sorted(first + second)
    order = zip(first + second, "01010011", strict=True)
    assert labels(figure) == sorted(
        ((left + right) / 2, stage, m) for (left, right, stage), m in order
    )
    assert figure.axes[0].get_xlim() == (0, 9)


@pytest.mark.parametrize(
    ("schedule", "legend"),
    [
        (schedules.gpipe(1, 1), ["forward", "backward", "idle"]),
        (schedules.zero_bubble(3, 4), ["forward", "input gradient", "weight gradient", "idle"]),
        (schedules.interleaved(2, 4, 3), ["forward", "backward", "idle", "chunk 0", "chunk 2"]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_legend_and_boxes_that_never_overlap(schedule, legend):
    figure = schedule.plot()
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == legend
    assert axes.get_title(loc="left") == repr(schedule).removeprefix("Schedule(").removesuffix(")")
    drawn = sorted((stage, left, right) for left, right, stage in boxes(figure))
    passes = (
        len(schedule.ticks.passes)
        * schedule.num_chunks
        * schedule.num_stages
        * schedule.num_micro_batches
    )
    assert len(drawn) == passes
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(drawn))


def test_a_path_gets_a_png(tmp_path):
    schedules.interleaved(4, 8, 2).plot(tmp_path / "schedule.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "schedule.png").shape
    assert width > 2 * height > 200


def test_passes_of_chunks_are_drawn_shorter_and_still_numbered():
    whole, chunks = (schedules.interleaved(4, 8, count).plot() for count in (1, 2))
    assert chunks.get_figwidth() < 12 < 2 * whole.get_figwidth()  # a page wide, not two
    assert len(labels(chunks)) == 2 * len(labels(whole))


def test_chunks_become_paler_and_numbers_too_small_to_read_are_left_out():
    figure = schedules.interleaved(2, 4, 3).plot()
    blues = {tuple(c.get_facecolor()[0]) for c in figure.axes[0].collections if c.get_zorder() == 2}
    assert len(blues) == 6  # three chunks, two kinds
    assert len(labels(schedules.gpipe(2, 600).plot())) == 0


def test_at_their_own_pace_boxes_stand_where_table_time_counts_them():
    figure = schedules.gpipe(2, 2).plot(
        pace="own", forward=[1, 2], backward=1, weight=0, communication=0.5
    )
    first = [(0, 1, 0), (1, 2, 0), (7, 8, 0), (8, 9, 0)]
    second = [(1.5, 3.5, 1), (3.5, 5.5, 1), (5.5, 6.5, 1), (6.5, 7.5, 1)]
    assert sorted(boxes(figure)) == sorted(first + second)
    assert figure.axes[0].get_xlim() == (0, 9)


def test_in_lockstep_messages_stand_between_ticks():
    figure = schedules.gpipe(2, 1).plot(communication=0.5)
    assert sorted(boxes(figure)) == [(0, 1, 0), (1.5, 2.5, 1), (3, 5, 1), (5.5, 7.5, 0)]
