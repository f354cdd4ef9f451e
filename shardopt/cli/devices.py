"""The devices of a command: real ones where there are some, else simulated on the CPU; and the mesh over them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

import shardopt as so
from shardopt.core.errors import complaint
from shardopt.mesh import num_processes

_AXES = ("replica", "data", "tensor", "pipeline")

_DIGITS = 18
"""Nobody has so many devices that their number has more; and Python refuses to read thousands."""


def start_devices(count: int) -> Sequence[Any]:
    """Start jax and return its devices: accelerators where there are some, else `count` simulated on the CPU.

    Several processes have as many of them each.

    Raises:
      ValueError: if `count` is below 1, or cannot be shared out evenly among the processes that are to simulate it.
    """
    if count < 1:
        raise ValueError(f"train: --devices must be at least 1, got {count}.")
    so.initialize()
    processes = num_processes()
    try:
        jax.config.update("jax_num_cpu_devices", max(count // processes, 1))
    except RuntimeError:  # jax has started already, in a notebook or a test: what is there is there
        return jax.devices()
    devices = jax.devices()
    if count % processes and devices[0].platform == "cpu":
        near = max(count // processes, 1) * processes
        what = f"--devices {count} cannot be shared out evenly among {processes} processes."
        raise ValueError(complaint("train", what, fix=f"use --devices {near} or {near + processes}."))
    return devices


def mesh_of(sizes: str, devices: Sequence[Any], *, pipelined: bool = False, replicas: int | None = None) -> Mesh:
    """Return the mesh that "data=4,tensor=2" or "auto" describes; `pipelined` gives "auto" two stages.

    Raises:
      ValueError: if the text cannot be read, says another number of replicas, or the sizes do not fit the devices.
    """
    if sizes == "auto":
        count = replicas or 1
        if len(devices) % count:
            what = f"{len(devices)} devices cannot be shared evenly by --replicas {count}."
            raise ValueError(
                complaint("train", what, fix="choose another number of either, or name sizes with --mesh.")
            )
        pipeline = 2 if pipelined and len(devices) // count % 2 == 0 else 1
        rest = len(devices) // count // pipeline
        tensor = 2 if rest >= 4 and rest % 2 == 0 else 1
        return so.make_mesh(replica=count, tensor=tensor, pipeline=pipeline, devices=devices)
    named = parse_mesh(sizes)
    if replicas is not None and named.get("replica", replicas) != replicas:
        what = f"--mesh {sizes} and --replicas {replicas} disagree."
        raise ValueError(complaint("train", what, fix="leave one of them out."))
    return so.make_mesh(**{"data": 1, "replica": replicas or 1} | named, devices=devices)


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes in a text such as "data=4,tensor=2".

    Raises:
      ValueError: if an axis is unknown or named twice, or a size is no integer.

    Example:
      >>> parse_mesh("data=4,tensor=2")
      {'data': 4, 'tensor': 2}
    """
    sizes: dict[str, int] = {}
    problems = []
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in _AXES:
            problems.append(f"{part.strip()!r}: there is no axis {axis!r}")
        elif axis in sizes:
            problems.append(f"{part.strip()!r}: {axis} is there twice")
        elif not size.removeprefix("-").isdecimal() or len(size) > _DIGITS:
            problems.append(f"{part.strip()!r}: the size must be an integer")
        else:
            sizes[axis] = int(size)
    if problems:
        fix = f"write --mesh data=4,tensor=2; the axes are {', '.join(_AXES)}, and one size may be -1."
        raise ValueError(complaint("train", f"--mesh {text} cannot be read.", problems, fix))
    return sizes
