"""Layers in the global view where devices do not divide the rows, or the positions: they repeat work,
and results and gradients are those of one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.reference import relative_difference
from support.tiers import tiered

import shardopt as so

ROWS, POSITIONS, DIM = 6, 8, 4
DRAW = np.random.default_rng(0)


def drawn(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


def attention(arrays, **marks):
    return so.nn.attention(arrays["query"], arrays["key"], arrays["value"], **marks)


HEADS = {name: drawn(ROWS, POSITIONS, 2, DIM) for name in ("query", "key", "value")}
PLACES = np.broadcast_to(np.arange(POSITIONS), (ROWS, POSITIONS)).copy()
SEGMENTS = np.repeat([[0, 1]], POSITIONS // 2, axis=1) + np.zeros((ROWS, 1), int)


def experts(arrays):
    weights = {name: arrays[name] for name in ("up", "down")}
    y, statistics = so.nn.mixture_of_experts(weights, arrays["x"], arrays["router"], top_k=2)
    return y + statistics.z_loss.mean() + statistics.load.std()


def of_experts(rows, positions):
    x = drawn(rows, positions, DIM)
    return {"x": x, "router": drawn(DIM, 4), "up": drawn(4, DIM, 8), "down": drawn(4, 8, DIM)}


CASES = {
    "attention over context": ({"data": 4, "context": 2}, attention, HEADS),
    "attention at places": (
        {"replica": 2, "data": 4},
        lambda arrays: attention(arrays, positions=PLACES),
        HEADS,
    ),
    "attention of documents": (
        {"data": 4, "context": 2},
        lambda arrays: attention(arrays, segment_ids=SEGMENTS),
        HEADS,
    ),
    "experts over data": ({"data": 8}, experts, of_experts(6, 5)),
    "experts over expert": ({"data": 2, "expert": 4}, experts, of_experts(6, 5)),
    "one row of experts": ({"expert": 4, "tensor": 2}, experts, of_experts(1, 5)),
    "experts over context": ({"data": 4, "context": 2}, experts, of_experts(8, 5)),
}


@pytest.mark.parametrize(
    "name", tiered(CASES, lambda name: name in ("attention at places", "experts over expert"))
)
def test_rows_and_positions_that_devices_do_not_divide_are_repeated(name, mesh_of):
    sizes, layer, arrays = CASES[name]

    def sum_of_squares(arrays):
        return jnp.sum(layer(arrays) ** 2)

    expected = jax.jit(jax.value_and_grad(sum_of_squares))(arrays)
    mesh = mesh_of(**sizes)
    on_devices = jax.jit(so.mesh.on_mesh(mesh, jax.value_and_grad(sum_of_squares)))
    placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
    assert relative_difference(on_devices(placed), expected) < 1e-5
