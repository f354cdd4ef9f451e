"""Where each worker computes: a mesh a worker, of one device or several."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.errors import format_error
from shardopt.mesh import data_axes, make_mesh

Workers = int | Sequence[Any]
"""How many, or for each a device, a sequence of devices or a mesh."""


def worker_meshes(who: str, workers: Any) -> list[Mesh]:
    """Return a mesh a worker. A number of workers share out the devices of this process, one each, round robin.

    Raises:
      TypeError: if `workers` is neither a number nor a sequence of devices, sequences of devices and meshes.
      ValueError: if there are none, a mesh splits something else than the batch, or workers with several devices
        share one.
    """
    if is_integer(workers):
        check_count(who, "workers", workers, least=1)
        devices = jax.local_devices()
        return [make_mesh(data=1, devices=[devices[i % len(devices)]]) for i in range(workers)]
    fix = "pass how many, or for each worker a device, a list of devices or a mesh."
    if isinstance(workers, str | bytes | Mesh) or not isinstance(workers, Sequence | np.ndarray):
        what = f"workers must be an integer or a sequence, got {type(workers).__name__}."
        raise TypeError(format_error(who, what, fix=fix))
    if not len(workers):
        raise ValueError(format_error(who, "workers must be at least 1, got none.", fix=fix))
    meshes = [_mesh(who, number, worker, fix) for number, worker in enumerate(workers)]
    check_shared(who, meshes)
    return meshes


def check_shared(who: str, meshes: Sequence[Mesh], noun: str = "worker") -> None:
    """Refuse shared devices: two programs with collectives can each wait for a device that the other has.

    Raises:
      ValueError: if a worker with several devices shares one.
    """
    owners: dict[Any, list[int]] = {}
    for number, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            owners.setdefault(device, []).append(number)
    shared = [
        f"{device.platform}:{device.id}: {noun}s {', '.join(map(str, numbers))}"
        for device, numbers in owners.items()
        if len(numbers) > 1 and any(meshes[number].size > 1 for number in numbers)
    ]
    if shared:
        what = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} with several devices must have them for itself."
        raise ValueError(format_error(who, what, shared, f"give each its own, or one device to several {noun}s."))


def _mesh(who: str, number: int, worker: Any, fix: str) -> Mesh:
    if isinstance(worker, jax.Device):
        return make_mesh(data=1, devices=[worker])
    if not isinstance(worker, Mesh):
        devices = list(worker) if isinstance(worker, Sequence | np.ndarray) else [worker]
        if not devices or not all(isinstance(device, jax.Device) for device in devices):
            what = f"worker {number} must be a device, a sequence of devices or a mesh, got {worker!r}."
            raise TypeError(format_error(who, what, fix=fix))
        return make_mesh(data=len(devices), devices=devices)
    idle = [
        f"{axis} (size {size})" for axis, size in worker.shape.items() if size > 1 and axis not in data_axes(worker)
    ]
    if idle:
        what = f"the mesh of worker {number} has axes that nothing is split over: {', '.join(idle)}."
        raise ValueError(
            format_error(who, what, fix="an async_sgd worker splits its batch: use so.make_mesh(data=...).")
        )
    return worker


def process_meshes(who: str, workers: Any) -> tuple[list[int], list[Mesh]]:
    """Return the devices of each worker in a process of its own, and meshes like theirs in this process, for replays.

    Raises:
      TypeError: if `workers` is neither a number nor a sequence of numbers.
      ValueError: if there are none, or a number is below 1.
    """
    sizes = [1] * workers if is_integer(workers) and workers > 0 else workers
    if is_integer(sizes):
        check_count(who, "workers", workers, least=1)
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence) or not all(is_integer(one) for one in sizes):
        what = f"on Ray workers must be an integer or for each its number of devices, got {workers!r}."
        raise TypeError(format_error(who, what, fix="pass workers=4, or workers=[2, 2] for two devices each."))
    if not sizes:
        raise ValueError(format_error(who, "workers must be at least 1, got none.", fix="pass workers=4."))
    for number, size in enumerate(sizes):
        check_count(who, f"workers[{number}]", size, least=1)
    devices = jax.local_devices()
    meshes = [make_mesh(data=min(size, len(devices)), devices=devices[:size]) for size in sizes]
    return [int(size) for size in sizes], meshes
