"""A row of the table of `shardopt verify`, and its result."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardopt.core import Devices

Status = Literal["passed", "failed", "did not fit", "not on this platform", "out of time"]


class Measurement(NamedTuple):
    """The result of a comparison.

    Attributes:
      passed: whether all differences are within their tolerances.
      detail: one line for the table.
      numbers: the measured numbers, for JSON.
    """

    passed: bool
    detail: str
    numbers: dict[str, Any]


class Row(NamedTuple):
    """One comparison that can be made.

    Attributes:
      group: "same bits", "training", "kernels" or "collectives".
      name: the name within the group.
      measure: compares on the devices; raises `NotRun` if these devices cannot run it.
    """

    group: str
    name: str
    measure: Callable[[Devices], Measurement]


class Result(NamedTuple):
    """What became of a row.

    Attributes:
      group: as in the row.
      name: as in the row.
      status: "passed", "failed", or why the row did not run.
      detail: the measured difference, or the reason.
      seconds: how long the row took.
      numbers: the measured numbers.
    """

    group: str
    name: str
    status: Status
    detail: str
    seconds: float = 0.0
    numbers: Mapping[str, Any] = {}


class NotRun(Exception):  # noqa: N818
    """These devices cannot run a row.

    Args:
      status: "did not fit", or "not on this platform".
      reason: one line.
    """

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status


def mesh_sizes(axes: Mapping[str, int], devices: Devices) -> dict[str, int]:
    """Return the sizes of a mesh over all devices: these axes, and data for the others.

    Raises:
      NotRun: if the axes do not divide the number of devices.

    Example:
      >>> mesh_sizes({"tensor": 2}, range(8))
      {'data': 4, 'tensor': 2}
    """
    size = math.prod(axes.values())
    if len(devices) % size:
        names = " x ".join(f"{axis}={count}" for axis, count in axes.items())
        raise NotRun(
            "did not fit",
            f"{names} needs a multiple of {size} devices, and there are {len(devices)}",
        )
    return {"data": len(devices) // size, **axes}


def agree(numbers: np.ndarray) -> np.ndarray:
    """Return the largest of all processes, entry by entry; NaN if one has NaN."""
    if jax.process_count() == 1:
        return numbers
    return np.max(np.asarray(multihost_utils.process_allgather(numbers)), axis=0)


def device_names(devices: Devices) -> str:
    """Return names such as "device 3 (TPU v5 lite, process 0)", at most eight."""
    names = [
        f"device {device.id} ({device.device_kind}, process {device.process_index})"
        for device in devices[:8]
    ]
    return ", ".join(names) + (", ..." if len(devices) > 8 else "")


def tolerance(dtype: str, roundings: int) -> float:
    """Return the largest relative difference that counts as rounding: so many times the machine
    epsilon of a dtype.
    """
    return roundings * float(jax.numpy.finfo(dtype).eps)
