"""`make_mesh`: sizes, order of devices, refusals."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import shardopt as so
from shardopt import mesh as axes

pytestmark = pytest.mark.fast


def test_all_devices_go_to_data_by_default():
    mesh = so.make_mesh()
    assert mesh.axis_names == ("data", "pipeline", "tensor")
    assert dict(mesh.shape) == {"data": 8, "pipeline": 1, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("requested_sizes", "sizes"),
    [
        ({"data": -1, "tensor": 2}, (4, 1, 2)),
        ({"data": 2, "tensor": -1, "pipeline": 2}, (2, 2, 2)),
        ({"data": 1, "tensor": 1, "pipeline": -1}, (1, 8, 1)),
        ({"data": np.int64(4), "tensor": np.int32(2)}, (4, 1, 2)),
    ],
)
def test_one_size_is_inferred(requested_sizes, sizes):
    assert tuple(so.make_mesh(**requested_sizes).shape.values()) == sizes


def test_replica_is_outermost_and_only_there_above_one():
    mesh = so.make_mesh(data=2, tensor=2, replica=2)
    assert mesh.axis_names == ("replica", "data", "pipeline", "tensor")
    assert "replica" not in so.make_mesh(replica=1).axis_names


def test_tensor_neighbours_are_adjacent_then_pipeline_then_data():
    ids = np.vectorize(lambda device: device.id)(so.make_mesh(data=2, pipeline=2, tensor=2).devices)
    assert ids.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    shuffled = [jax.devices()[i] for i in (3, 1, 0, 2)]
    assert [device.id for device in so.make_mesh(tensor=2, devices=shuffled).devices.flat] == [
        0,
        1,
        2,
        3,
    ]


def test_devices_may_come_as_a_grid():
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    assert dict(so.make_mesh(tensor=2, devices=grid).shape) == {
        "data": 2,
        "pipeline": 1,
        "tensor": 2,
    }


def test_hosts_are_put_on_data():
    devices = [SimpleNamespace(process_index=i % 2, id=i, platform="cpu") for i in range(8)]
    grid = axes.arrange({"data": 2, "pipeline": 1, "tensor": 4}, devices, num_outer_dims=1)
    assert [[device.process_index for device in row] for row in grid[:, 0]] == [[0] * 4, [1] * 4]


def test_slices_are_put_on_replica_and_data():
    assert axes._over_slices((2, 8, 1, 4), 4, 2) == ((1, 4, 1, 4), (2, 2, 1, 1))
    with pytest.raises(ValueError, match="3 slices cannot be laid along replica and data"):
        axes._over_slices((1, 8, 1, 4), 3, 2)


@pytest.mark.parametrize(
    ("requested_sizes", "error", "message"),
    [
        (
            {"data": 3, "tensor": 2},
            ValueError,
            (
                "make_mesh: replica=1, data=3, pipeline=1, tensor=2 needs 6 devices, but there are"
                " 8.\nFix: set one size to -1, choose sizes whose product is 8, or pass"
                " devices=jax.devices()[:6]."
            ),
        ),
        (
            {"data": 8, "tensor": 2},
            ValueError,
            (
                "make_mesh: replica=1, data=8, pipeline=1, tensor=2 needs 16 devices, but there are"
                " 8.\nFix: set one size to -1, or choose sizes whose product is 8."
                " JAX_NUM_CPU_DEVICES=16 simulates more devices."
            ),
        ),
        (
            {"tensor": 3},
            ValueError,
            (
                "make_mesh: cannot infer data: 8 devices are not divisible by 3 "
                "(replica=1, data=-1, pipeline=1, tensor=3).\n"
                "Fix: choose sizes whose product divides 8."
            ),
        ),
        (
            {"tensor": -1},
            ValueError,
            (
                "make_mesh: only one size can be -1, got data and tensor.\nFix: give every size but"
                " one."
            ),
        ),
        (
            {"tensor": 0, "pipeline": -2},
            ValueError,
            "make_mesh: sizes must be positive, or -1 for one of them; got pipeline=-2, tensor=0.",
        ),
        ({"tensor": 2.0}, TypeError, "make_mesh: tensor must be an integer, got 2.0 (float)."),
        (
            {"devices": []},
            ValueError,
            "make_mesh: there are no devices.\nFix: pass some, or leave devices out.",
        ),
        ({"data": True}, TypeError, "make_mesh: data must be an integer, got True (bool)."),
    ],
)
def test_bad_input_is_refused(requested_sizes, error, message):
    with pytest.raises(error) as caught:
        so.make_mesh(**requested_sizes)
    assert str(caught.value) == message
