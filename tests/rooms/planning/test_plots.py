"""Pictures of plans: what is drawn, read off the figure."""

import jax
import optax
import pytest

import shardopt as so
from shardopt.models import gpt


@pytest.fixture(scope="module")
def plans():
    return so.plan("gpt2", hardware="a100", chips=8, batch_size=16)


def lengths(axes):
    """Return the total length of the bars of each row, top to bottom."""
    totals = {}
    for box in axes.patches:
        totals[box.get_y()] = totals.get(box.get_y(), 0.0) + box.get_width()
    return [totals[y] for y in sorted(totals)]


def test_memory_bars_add_up_to_what_is_predicted(plans, tmp_path):
    shown, path = plans.ranked[:5], tmp_path / "memory.png"
    axes, _ = plans.plot(shown, path).axes
    assert lengths(axes) == pytest.approx([one.memory.total / 1e9 for one in shown])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(plans.limit / 1e9)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        str(one.layout) for one in shown
    ]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_traffic_bars_add_up_to_what_is_sent(plans):
    _, axes = plans.plot().axes
    sent = [sum(one.wire_bytes.values()) / 1e9 for one in plans.ranked[:10]]
    assert lengths(axes) == pytest.approx(sent)


def test_a_leaf_is_drawn_in_as_many_boxes_as_it_has_shards(mesh_of):
    config = gpt.GPTConfig(dim=64, num_layers=2, num_heads=4)
    params = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
    opt = so.fsdp(optax.adamw(1e-3), mesh_of(data=4, tensor=2), gpt.model(config), rules=gpt.rules)
    (axes,) = so.planning.plot_placement(opt, params).axes
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == len(jax.tree.leaves(params))
    by_leaf = {
        label.get_text().split()[0]: text
        for label, text in zip(axes.get_yticklabels(), texts, strict=True)
    }
    assert by_leaf["norm"] == "replicated: 256 bytes on each of 8 devices"
    assert by_leaf["head"] == "tensor=2 x data=4: 8 shards of 8,192 bytes, each on 1 device"
    assert 8 in [len(strip.get_paths()) for strip in axes.collections]


def test_too_many_or_none_are_refused(plans):
    message = (
        r"^plot: there are 0 predictions to draw\.\nFix: pass between 1 and 40, such as"
        r" plans\.ranked\[:10\]\.$"
    )
    with pytest.raises(ValueError, match=message):
        plans.plot([])
