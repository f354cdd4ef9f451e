"""Who talks to whom: the forms in which HLO writes replica groups, as positions in the device assignment."""

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def replica_groups(attributes: Mapping[str, str], *, replicas: int, partitions: int, has_global_flag: bool) -> Groups:
    """Return the groups of a collective as positions in the device assignment, replica-major.

    What an id means depends on the instruction. With `use_global_device_ids=true` it is such a position. With a
    channel but without that flag, operations that could have it (`has_global_flag`: all-reduce, all-gather,
    reduce-scatter) number replicas and reach over all partitions, while the others number partitions within each
    replica. Without a channel an id is a replica, and each partition is on its own.

    Args:
      attributes: those of the instruction, as text.
      replicas: of the module, usually 1.
      partitions: of the module.
      has_global_flag: whether the operation knows `use_global_device_ids`.
    """
    is_global = attributes.get("use_global_device_ids") == "true"
    on_channel = "channel_id" in attributes
    if is_global:
        count = replicas * partitions
    elif on_channel and not has_global_flag:
        count = partitions
    else:
        count = replicas
    groups = read_groups(attributes.get("replica_groups", "{}"), count)
    if is_global:
        return groups
    positions = np.arange(replicas * partitions).reshape(replicas, partitions)
    if on_channel and has_global_flag:
        return tuple(tuple(positions[list(group)].ravel().tolist()) for group in groups)
    if on_channel:
        return tuple(tuple(row[list(group)].tolist()) for row in positions for group in groups)
    return tuple(tuple(column[list(group)].tolist()) for column in positions.T for group in groups)


def permute_pairs(attributes: Mapping[str, str], *, replicas: int, partitions: int) -> Groups:
    """Return the (source, target) pairs of a collective-permute as positions, those to oneself left out."""
    pairs = read_groups(attributes.get("source_target_pairs", "{}"), 0)
    positions = np.arange(replicas * partitions).reshape(replicas, partitions)
    rows = positions if "channel_id" in attributes else positions.T
    return tuple((int(row[s]), int(row[t])) for row in rows for s, t in pairs if s != t)


def read_groups(text: str, count: int) -> Groups:
    """Read `{{0,1},{2,3}}`, `{}` (all of `count`), `[2,4]<=[4,2]T(1,0)` or `mesh['a'=2,'b'=4] {'a'}`.

    Example:
      >>> read_groups("[2,4]<=[4,2]T(1,0)", 8)
      ((0, 2, 4, 6), (1, 3, 5, 7))
      >>> read_groups("mesh['data'=2,'tensor'=4] {'data'}", 8)
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    text = text.strip()
    if text.startswith("["):
        return _rows(_iota(text))
    if text.startswith("mesh"):
        return _rows(_mesh_axes(text))
    groups = tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d,\s]*)\}", text[1:-1]))
    return groups or (tuple(range(count)),)


_IOTA = re.compile(r"^\[(?P<out>[\d,]+)\](<=)?(\[(?P<dims>[\d,]+)\])?(T\((?P<order>[\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[(?P<axes>.*?)\](, device_ids=\((?P<ids>.*)\))? \{(?P<over>.*)\}$")


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: count up in the shape on the right, transpose, reshape to the shape on the left."""
    found = _IOTA.match(text.replace(" ", ""))
    if not found:
        raise ValueError(f"audit: cannot read the replica groups {text!r}.")
    out = _integers(found["out"])
    numbers = np.arange(math.prod(out)).reshape(_integers(found["dims"]) if found["dims"] else out)
    if found["order"]:
        numbers = numbers.transpose(_integers(found["order"]))
    return numbers.reshape(out) if found["dims"] else numbers


def _mesh_axes(text: str) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=(..) {'a','b':(1)2}`: named axes, or parts of an axis as (size before it)size."""
    found = _MESH.match(text)
    if not found:
        raise ValueError(f"audit: cannot read the replica groups {text!r}.")
    sizes = {name.strip(" '\""): int(size) for name, size in (part.rsplit("=", 1) for part in found["axes"].split(","))}
    ids = np.arange(math.prod(sizes.values()))
    if found["ids"]:
        ids = _iota(found["ids"]) if found["ids"].startswith("[") else np.array(_integers(found["ids"]))
    over = [_axis_part(part, sizes) for part in found["over"].split(",") if part.strip()]
    shape, grouped = [], {}
    for axis, size in sizes.items():  # cut every axis at the borders of its parts
        borders = {1, size} | {b for name, before, part in over if name == axis for b in (before, before * part)}
        ordered = sorted(borders)
        for low, high in itertools.pairwise(ordered):
            grouped[axis, low] = len(shape)
            shape.append(high // low)
        if len(ordered) == 1:
            grouped[axis, 1] = len(shape)
            shape.append(1)
    last = [grouped[axis, before] for axis, before, _ in over]
    first = [dim for dim in range(len(shape)) if dim not in last]
    members = math.prod(shape[dim] for dim in last)
    return ids.reshape(shape).transpose(first + last).reshape(-1, members)


def _axis_part(text: str, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    name, colon, part = text.strip().rpartition(":(")
    if not colon:
        name = text.strip(" '\"")
        return name, 1, sizes[name]
    before, size = part.split(")")
    return name.strip(" '\""), int(before), int(size)


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.reshape(array.shape[0], -1).tolist())


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
