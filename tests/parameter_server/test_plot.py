"""The picture of a run: what it draws, and what it refuses."""

import math

from matplotlib.colors import to_hex

from shardopt.parameter_server import SimulatedWorker, plot_timeline, simulate, timeline
from shardopt.parameter_server.views import _COLORS

WORKERS = [SimulatedWorker(), SimulatedWorker(3.0), SimulatedWorker(1.0, availability=((0.0, 4.5), (8.0, math.inf)))]


def boxes(figure):
    """Every box as (row, colour, from, to)."""
    found = []
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.get_extents().get_points()
            found.append((round((low + high) / 2), to_hex(collection.get_facecolor()[0]), left, right))
    return found


def test_each_stretch_is_a_box(tmp_path):
    log = simulate(WORKERS, max_staleness=1, num_updates=20).log
    figure = plot_timeline(log, tmp_path / "run.png")
    drawn = {box for box in boxes(figure) if box[1] in _COLORS.values()}
    assert drawn == {(one.worker, _COLORS[one.doing], one.start, one.end) for one in timeline(log)}
    assert {box[1] for box in drawn} == {_COLORS[doing] for doing in ("step", "wait", "lost")}
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["worker 0", "worker 1", "worker 2"]


def test_only_the_beginning():
    figure = plot_timeline(simulate(WORKERS, max_staleness=1, num_updates=20).log, until=2.0)
    assert max(box[3] for box in boxes(figure)) == 2.0


def test_refusals(message_of):
    assert message_of(ValueError, plot_timeline, []) == "plot_timeline: the log has no events."
    assert message_of(ValueError, plot_timeline, simulate(65, num_updates=1).log) == (
        "plot_timeline: 65 workers are more rows than can be told apart, at most 64.\n"
        "Fix: pick some: [event for event in log if event.worker < 32]."
    )
