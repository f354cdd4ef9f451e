"""Orders of positions: the positions of each device, and refusals."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.contexts import mesh_of

import shardopt as so

pytestmark = pytest.mark.fast


def test_each_device_counts_from_its_first_position():
    mesh = mesh_of(data=2, context=4)
    spec = PartitionSpec("context")
    inside = jax.shard_map(
        lambda: so.nn.positions(3), mesh=mesh, in_specs=(), out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(inside)(), np.arange(12))
    global_positions = jax.jit(
        so.mesh.on_mesh(mesh, lambda: so.nn.positions(12))
    )  # the global view
    np.testing.assert_array_equal(global_positions(), np.arange(12))


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]])],
)
def test_zigzag_puts_positions_in_the_named_order(order, wanted):
    mesh = mesh_of(context=2)
    batch = {
        "tokens": np.arange(16).reshape(2, 8),
        "positions": np.arange(16).reshape(2, 8) % 3,
        "weight": np.ones(2),
    }
    moved = so.nn.zigzag(batch, mesh, order=order)
    np.testing.assert_array_equal(moved["order"], [np.ravel(wanted)] * 2)
    assert moved["order"].dtype == np.int32
    np.testing.assert_array_equal(moved["positions"], batch["positions"][:, np.ravel(wanted)])
    np.testing.assert_array_equal(moved["tokens"][1], 8 + np.ravel(wanted))
    assert moved["weight"] is batch["weight"]
    back = so.nn.zigzag(moved, mesh, order=order, inverse=True)
    np.testing.assert_array_equal(back["tokens"], batch["tokens"])
    assert "order" not in so.nn.zigzag(batch, mesh, order=order, inverse=True)
    # nothing is split, so kernels can be used
    assert so.nn.zigzag(batch, mesh_of(data=2), order=order) is batch
    twice = so.nn.zigzag(moved, mesh, order=order)
    np.testing.assert_array_equal(twice["order"][0], np.ravel(wanted)[np.ravel(wanted)])


@pytest.mark.parametrize("context", [2, 4, 8])
def test_zigzag_balances_causal_work(context):
    batch = so.nn.zigzag({"tokens": np.zeros((1, 64))}, mesh_of(context=context))
    work = (batch["order"][0] + 1).reshape(context, -1).sum(axis=1)
    assert len(set(work)) == 1


def test_bad_input_is_refused():
    mesh = mesh_of(context=4)

    def refused(message, batch, **how):
        with pytest.raises(ValueError, match="zigzag") as caught:
            so.nn.zigzag(batch, mesh, **how)
        assert str(caught.value) == f"zigzag: {message}"

    refused(
        "zigzag over 4 devices needs a number of positions (dim 1) divisible by 8.\n"
        "  tokens: shape (2, 12)\nFix: pad the rows to a multiple of 8.",
        {"tokens": np.zeros((2, 12))},
    )
    refused(
        "unknown order 'random'.\nFix: use 'zigzag' or 'striped'.",
        {"x": np.zeros((2, 8))},
        order="random",
    )
    refused("no leaf has a dim of positions.\nFix: give arrays [B, T, ...].", {"x": np.zeros(8)})
    refused(
        "leaves have rows of several lengths, so that one order does not fit all.\n"
        "  x: shape (2, 8)\n  y: shape (2, 16)\nFix: add 'order' [B, T] to the batch yourself.",
        {"x": np.zeros((2, 8)), "y": np.zeros((2, 16))},
    )
