"""What uneven loads of experts cost, against counts by hand and by chance."""

import re

import numpy as np
import pytest

from shardopt.planning import expected_imbalance, imbalance, plot_expert_loads, tile_overlap


def test_the_busiest_device_is_waited_for():
    # [steps, layers, experts]
    loads = np.array([[[1, 1, 1, 1], [4, 0, 2, 2]], [[0, 0, 3, 3], [1, 1, 1, 1]]])
    found = imbalance(loads, 2)
    np.testing.assert_allclose(found.each, [[1, 1], [2, 1]])
    assert (found.slowdown, found.worst) == (1.25, 2)
    np.testing.assert_allclose(imbalance(loads, 4).each, [[1, 2], [2, 1]])


def test_copies_of_hot_experts_are_those_of_the_step_before():
    def hot(expert):
        return [[9 if one == expert else 1 for one in range(8)]]

    loads = np.array([hot(0), hot(0), hot(7)])
    alone, copied = imbalance(loads, 4), imbalance(loads, 4, replicas=1)
    np.testing.assert_allclose(alone.each[:, 0], 10 * 4 / 16)
    # expert 0 has four copies then, 9/4 on each device beside what it has: 3.25, 4.25, 4.25, 4.25
    # of 16
    np.testing.assert_allclose(
        copied.each[:2, 0], [alone.each[0, 0], 4.25 * 4 / 16], err_msg="nothing is known at first"
    )
    assert copied.each[2, 0] == 10.25 * 4 / 16, (
        "at the third step the copies are of the wrong expert"
    )


def test_chance_is_as_uneven_as_said():
    draw = np.random.default_rng(0)
    tokens, experts, top_k, devices = 4096, 32, 4, 8
    loads = np.zeros((40, 1, experts))
    for step in loads:
        chosen = np.argsort(draw.random((tokens, experts)), axis=1)[:, :top_k]
        step[0] = np.bincount(chosen.ravel(), minlength=experts)
    said = expected_imbalance(tokens, num_experts=experts, top_k=top_k, devices=devices)
    measured = imbalance(loads, devices).slowdown
    assert 0.6 * (said - 1) < measured - 1 < said - 1, (
        "sqrt(2 ln X) bounds the mean of the largest of X"
    )
    assert expected_imbalance(1, num_experts=4, top_k=4, devices=2) == 1


def test_tiles_that_experts_share_are_as_many_as_said():
    """Tiles that a grid visits: of each expert from the one in which its rows begin to that in
    which they end.
    """
    draw = np.random.default_rng(0)
    tokens, experts, top_k, devices, tile = 16384, 32, 2, 4, 128
    rows, visits = tokens * top_k // devices, []
    for _ in range(200):
        inner = np.sort(draw.choice(rows - 1, experts // devices - 1, replace=False) + 1)
        bounds = np.concatenate([[0], inner, [rows]])
        visits.append(np.sum(-(-bounds[1:] // tile) - bounds[:-1] // tile))
    said = tile_overlap(tokens, num_experts=experts, top_k=top_k, devices=devices, tile=tile)
    assert said - 1 == pytest.approx(np.mean(visits) * tile / rows - 1, rel=0.02)
    assert tile_overlap(8, num_experts=4, top_k=2, devices=4) == 1


def test_a_picture_has_a_strip_for_each_layer(tmp_path):
    loads = np.random.default_rng(0).random((20, 3, 8))
    figure = plot_expert_loads(loads, devices=4, path=tmp_path / "loads.png")
    strips = [axes for axes in figure.axes if axes.images]
    assert [axes.get_ylabel() for axes in strips] == ["layer 0", "layer 1", "layer 2"]
    assert strips[0].images[0].get_array().shape == (8, 20)
    assert len(strips[0].lines) == 3
    assert (tmp_path / "loads.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: imbalance(np.ones((2, 2, 6)), 4), "imbalance: loads must be [steps, layers, experts] with experts divisible by "
         "devices=4, got (2, 2, 6).\nFix: choose a divisor of the experts."),
        (lambda: tile_overlap(8, num_experts=6, top_k=1, devices=4),
         "tile_overlap: tokens=8 must be positive, and num_experts=6 divisible by devices=4."),
        (lambda: expected_imbalance(8, num_experts=2, top_k=3, devices=2),
         "expected_imbalance: tokens=8 must be positive, and top_k=3 at most num_experts=2."),
        (lambda: plot_expert_loads(np.ones((2, 6))), "plot_expert_loads: loads must be [steps, layers, experts], got (2, 6)."),
    ],
    ids=["uneven", "not shared out", "too many", "two dims"],
)  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        call()
