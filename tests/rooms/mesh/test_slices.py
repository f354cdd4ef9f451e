"""Devices of several TPU slices, and chips with two cores: neighbours stay neighbours, slices stay
whole.
"""

import dataclasses
import itertools
import re

import pytest
from jax.experimental import mesh_utils

import shardopt as so

pytestmark = pytest.mark.fast


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a TPU device as laying out reads."""

    id: int
    coords: tuple
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


def torus(x, y, *, slices=1, cores=1, z=1):
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [
        Chip(len(places) * cores * part + cores * place + core, at, part, core)
        for part in range(slices)
        for place, at in enumerate(places)
        for core in range(cores)
    ]


def distance(device, other, size):
    steps = [
        min(abs(a - b), size - abs(a - b)) for a, b in zip(device.coords, other.coords, strict=True)
    ]
    return sum(steps)


def test_data_goes_across_slices_and_tensor_stays_within_one():
    mesh = so.make_mesh(data=32, tensor=4, devices=torus(8, 4, slices=4))
    grid = mesh.devices.reshape(32, 4)
    assert len({device.id for device in grid.flat}) == 128
    assert all(len({device.slice_index for device in row}) == 1 for row in grid)
    assert [device.slice_index for device in grid[:, 0]] == [
        part for part in range(4) for _ in range(8)
    ]


def test_replica_takes_the_slices_where_it_can():
    mesh = so.make_mesh(replica=2, data=4, tensor=2, devices=torus(2, 4, slices=2))
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]


def test_neighbours_along_tensor_are_neighbours_on_the_torus():
    mesh = so.make_mesh(data=16, tensor=4, devices=torus(8, 8))
    for row in mesh.devices.reshape(16, 4):
        assert all(distance(a, b, 8) == 1 for a, b in itertools.pairwise(row))


@pytest.mark.parametrize("sizes", [{"expert": 8}, {"context": 4}, {"expert": 2, "context": 4}])
def test_data_expert_and_context_lie_together_as_data_alone(sizes):
    """Weights are gathered over all of them at once, which XLA:TPU does by a gather only in this
    order.
    """
    devices = torus(4, 4, z=4)
    alone = [device.id for device in so.make_mesh(devices=devices).devices.flat]
    assert [device.id for device in so.make_mesh(**sizes, devices=devices).devices.flat] == alone


def test_stages_stand_between_them_in_the_mesh_alone():
    mesh = so.make_mesh(data=2, pipeline=4, expert=4, tensor=2, devices=torus(4, 4, z=4))
    assert dict(mesh.shape) == {"data": 2, "pipeline": 4, "expert": 4, "tensor": 2}
    together = mesh.devices.transpose(1, 0, 2, 3).reshape(4, 8, 2)
    alone = mesh_utils.create_device_mesh(
        (4, 8, 2), torus(4, 4, z=4), allow_split_physical_axes=True
    )
    assert (together == alone).all()


def test_both_cores_of_a_chip_are_neighbours_on_the_innermost_axis_that_is_even():
    mesh = so.make_mesh(data=16, tensor=2, devices=torus(4, 4, cores=2))
    for row in mesh.devices.reshape(16, 2):
        assert row[0].coords == row[1].coords
        assert [device.core_on_chip for device in row] == [0, 1]
    mesh = so.make_mesh(devices=torus(4, 4, cores=2))
    assert [device.core_on_chip for device in mesh.devices.flat] == [0, 1] * 16
    assert len(set(mesh.devices.flat)) == 32


def test_slices_of_different_sizes_are_refused():
    message = (
        "make_mesh: the slices have different sizes (slice 0: 8, slice 1: 4).\nFix: pass as many"
        " devices of every slice."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        so.make_mesh(devices=torus(4, 2, slices=2)[:12])


def test_cores_need_an_even_axis():
    message = (
        "make_mesh: chips have 2 cores each, and none of the sizes (3, 1, 3) is divisible by 2.\n"
        "Fix: make one axis even, so that it can hold both cores of a chip."
    )
    devices = torus(3, 3, cores=2)[:9]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        so.make_mesh(data=3, tensor=3, devices=devices)
