"""One collective of a compiled program: its groups of devices, its mesh axes and its bytes."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardopt.hlo._hlo_text import Instruction, arrays, attributes, elements, nbytes, numbers
from shardopt.hlo._source_lines import op_name_of
from shardopt.hlo._walk import CollectiveSite, crosses_slices

Groups = tuple[tuple[int, ...], ...]
"""The positions of each group's devices in the device assignment."""


class Collective(NamedTuple):
    """One collective instruction, reached by one path of loops, branches and calls.

    Attributes:
      kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `collective-permute`, ...
      axes: the mesh axes that its groups span, in mesh order; None if the groups are neither a
        product of whole axes nor a `part` of one. For a permute, the axes along which data moves.
      bytes: bytes of one call, per device: the *whole* buffer, summed over all arrays that travel
        together. It is the result of an all-gather and the operand of a reduce-scatter. Operand and
        result of other kinds are equal. For a ragged-all-to-all it is the result, which has room
        for the largest possible message.
      wire_bytes: bytes that each device sends in one call in a ring of n devices, rounded up. An
        all-reduce sends 2 (n - 1) / n x bytes. An all-gather, reduce-scatter or all-to-all sends (n
        - 1) / n x bytes. A permute or a broadcast sends all bytes.
      loops: trip counts of the loops around it, outermost first; None for an unknown trip count.
      group_size: n, the number of devices in a group; 0 for a permute.
      conditional: whether it is in a branch. A branch counts as always taken, or as often as the
        `schedule` of `audit` says.
      asynchronous: whether computation may run between its start and its end.
      shapes: shapes of the arrays in the result, such as `f32[8,4]`.
      name: name of the instruction.
      op_name: its place in the user's program, as jax names it.
      groups: positions in the mesh, or (source, target) pairs; None unless `axes` is None or `part`
        is True.
      part: whether each group is a regular part of its one axis: neighbours, or every k-th device.
        Collectives that cross an axis in several steps have such groups, for example gathers over a
        whole TPU torus.
    """

    kind: str
    axes: tuple[str, ...] | None
    bytes: int
    wire_bytes: int
    loops: tuple[int | None, ...]
    group_size: int
    conditional: bool
    asynchronous: bool
    shapes: tuple[str, ...]
    name: str
    op_name: str
    groups: Groups | None
    part: bool

    @property
    def calls(self) -> int | None:
        """Calls in one execution of the program.

        None if the trip count of a loop around it is unknown.
        """
        return (
            None
            if None in self.loops
            else math.prod(count for count in self.loops if count is not None)
        )

    @property
    def in_loop(self) -> bool:
        """Whether it is in a loop."""
        return bool(self.loops)


def read_collective(
    site: CollectiveSite,
    sizes: Mapping[str, int],
    *,
    replicas: int,
    partitions: int,
    slices: int = 1,
) -> Collective | None:
    """Return the collective at a site, or None if no device sends to another.

    The program has `replicas` x `partitions` devices and runs once per slice. The outermost mesh
    axis spans the slices.
    """
    instruction = site.instruction
    outermost = next((axis for axis, size in sizes.items() if size > 1), "")
    if crosses_slices(instruction):
        sent = elements(instruction.shape)[0]
        sent_bytes = nbytes(sent) * (slices if site.kind == "all-gather" else 1)
        return _collective(site, (outermost,), sent_bytes, slices, sent, None)
    if slices > 1:
        # A program is compiled for one slice: its ids count the devices of that slice.
        sizes = {**sizes, outermost: sizes[outermost] // slices}
    groups = _groups(site, replicas, partitions)
    longest = max(map(len, groups), default=0)
    if longest < 2:
        return None
    is_permute = site.kind == "collective-permute"
    group_size = 0 if is_permute else longest
    axes = axes_of_pairs(groups, sizes) if is_permute else axes_of_groups(groups, sizes)
    part = axis_of_parts(groups, sizes) if axes is None else None
    if part is not None:
        axes = (part,)
    result = _result(instruction, site.kind)
    # the result of a reduce-scatter is a shard of what travels, unless it is rendered as an
    # all-reduce and a slice
    # Bytes are of the larger side: what a gather returns, and what a scatter takes.
    is_shard = site.kind == "reduce-scatter" and instruction.opcode.startswith("reduce-scatter")
    size = nbytes(result) * (group_size if is_shard else 1)
    shown_groups = groups if axes is None or part else None
    return _collective(site, axes, size, group_size, result, shown_groups, part=part is not None)


def _groups(site: CollectiveSite, replicas: int, partitions: int) -> Groups:
    """Return the devices that send to each other: groups, or pairs of a permute."""
    words = attributes(site.instruction)
    if site.kind != "collective-permute":
        return replica_groups(site.kind, words, replicas, partitions)
    pairs = permute_pairs(words, replicas, partitions)
    return tuple((source, target) for source, target in pairs if source != target)


def _collective(
    site: CollectiveSite,
    axes: tuple[str, ...] | None,
    size: int,
    group_size: int,
    result: str,
    groups: Groups | None,
    *,
    part: bool = False,
) -> Collective:
    return Collective(
        kind=site.kind,
        axes=axes,
        bytes=size,
        wire_bytes=_wire_bytes(site.kind, size, group_size),
        loops=site.loops,
        group_size=group_size,
        conditional=site.conditional,
        asynchronous=site.asynchronous,
        shapes=tuple(arrays(result)),
        name=site.instruction.name,
        op_name=op_name_of(site.instruction),
        groups=groups,
        part=part,
    )


def _result(instruction: Instruction, kind: str) -> str:
    """Return the shape of the results.

    The full shape of a `-start` is (operands, results, contexts).
    """
    _, *results = elements(instruction.shape)
    # the shape of an all-reduce-start contains the results alone
    holds_operands = instruction.opcode.endswith("-start") and kind != "all-reduce"
    return results[0] if holds_operands and results else instruction.shape


def _wire_bytes(kind: str, size: int, n: int) -> int:
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    # On a ring an all-reduce is a reduce-scatter and an all-gather, each (n - 1) / n of the bytes.
    return -(-(2 if kind == "all-reduce" else 1) * (n - 1) * size // n)


_WITH_GLOBAL_FLAG = ("all-reduce", "all-gather", "reduce-scatter")


def replica_groups(
    kind: str, attributes: Mapping[str, str], replicas: int, partitions: int
) -> Groups:
    """Return the groups of a collective as positions in the device assignment, replica-major, from
    its attributes.

    The meaning of an id depends on the instruction:

    - With `use_global_device_ids=true` an id is such a position.
    - With a channel, without that flag, all-reduce, all-gather and reduce-scatter: an id is a
      replica, and a group contains all partitions of its replicas.
    - With a channel, other kinds: an id is a partition, and each replica has its own groups.
    - Without a channel: an id is a replica, and each partition has its own groups.
    """
    has_global_flag = kind in _WITH_GLOBAL_FLAG
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
    # [replicas, partitions]: devices are numbered replica by replica.
    positions = np.arange(replicas * partitions).reshape(replicas, partitions)
    if on_channel and has_global_flag:
        return tuple(tuple(positions[list(group)].ravel().tolist()) for group in groups)
    rows = positions if on_channel else positions.T
    return tuple(tuple(row[list(group)].tolist()) for row in rows for group in groups)


def permute_pairs(attributes: Mapping[str, str], replicas: int, partitions: int) -> Groups:
    """Return the (source, target) pairs of a collective-permute as positions.

    A device that keeps its value is a pair of equal positions.
    """
    pairs = read_groups(attributes.get("source_target_pairs", "{}"), 0)
    positions = np.arange(replicas * partitions).reshape(replicas, partitions)
    rows = positions if "channel_id" in attributes else positions.T
    return tuple((int(row[s]), int(row[t])) for row in rows for s, t in pairs)


def read_groups(text: str, count: int) -> Groups:
    """Parse `{{0,1},{2,3}}`, `{}` (all of `count`), `[2,4]<=[4,2]T(1,0)` or `mesh['a'=2,'b'=4]
    {'a'}`.

    Example:
      >>> read_groups("[2,4]<=[4,2]T(1,0)", 8)
      ((0, 2, 4, 6), (1, 3, 5, 7))
      >>> read_groups("mesh['data'=2,'tensor'=4] {'data'}", 8)
      ((0, 4), (1, 5), (2, 6), (3, 7))
      >>> read_groups("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 8)
      ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    text = text.strip()
    if text.startswith("["):
        return _rows(_iota(text))
    if text.startswith("mesh"):
        return _rows(_mesh_axes(text))
    groups = tuple(map(numbers, re.findall(r"\{([\d,\s]*)\}", text[1:-1])))
    return groups or (tuple(range(count)),)


_IOTA = re.compile(r"^\[(?P<out>[\d,]+)\](<=)?(\[(?P<dims>[\d,]+)\])?(T\((?P<order>[\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[(?P<axes>.*?)\](, device_ids=\((?P<ids>.*)\))? \{(?P<over>.*)\}$")


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.match(text)
    if not match:
        raise ValueError(f"audit: cannot read the replica groups {text!r}.")
    return match


def _iota(text: str) -> np.ndarray:
    """Parse `[2,4]<=[4,2]T(1,0)`: count up in the shape on the right, transpose, reshape to the
    shape on the left.
    """
    match = _matched(_IOTA, text.replace(" ", ""))
    out_shape = numbers(match["out"])
    positions = np.arange(math.prod(out_shape)).reshape(
        numbers(match["dims"]) if match["dims"] else out_shape
    )
    if match["order"]:
        positions = positions.transpose(numbers(match["order"]))
    return positions.reshape(out_shape) if match["dims"] else positions


def _mesh_axes(text: str) -> np.ndarray:
    """Parse `mesh['a'=2,'b'=4], device_ids=(..) {'a','b':(1)2}`: axes, or parts of an axis as (size
    before)size.
    """
    match = _matched(_MESH, text)
    sizes = {
        name.strip(" '\""): int(size)
        for name, size in (part.rsplit("=", 1) for part in match["axes"].split(","))
    }
    ids = np.arange(math.prod(sizes.values()))
    if match["ids"]:
        is_iota = match["ids"].startswith("[")
        ids = _iota(match["ids"]).reshape(-1) if is_iota else np.array(numbers(match["ids"]))
    positions = np.arange(len(ids))
    first = positions
    member = np.zeros_like(positions)
    size = 1
    for part in filter(str.strip, match["over"].split(",")):
        axis, before, count = _axis_part(part, sizes)
        following = list(sizes)[list(sizes).index(axis) + 1 :]
        step = math.prod(sizes[name] for name in following) * sizes[axis] // (before * count)
        place = positions // step % count
        first = first - place * step
        member = member * count + place
        size = size * count
    # the members of a group have the same first position
    return ids[np.lexsort((member, first))].reshape(-1, size)


def _axis_part(text: str, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    name, separator, part = text.strip().rpartition(":(")
    if not separator:
        name = text.strip(" '\"")
        return name, 1, sizes[name]
    before, size = part.split(")")
    return name.strip(" '\""), int(before), int(size)


def _rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.reshape(array.shape[0], -1).tolist()))


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes whose product each group is, in mesh order.

    None if groups are not a product of whole axes.

    Positions count through the mesh with its last axis fastest.

    Example:
      >>> axes_of_groups(((0, 2), (1, 3)), {"data": 2, "tensor": 2})
      ('data',)
      >>> axes_of_groups(((0, 3), (1, 2)), {"data": 2, "tensor": 2}) is None
      True
    """
    names = tuple(sizes)
    group_axes: set[tuple[str, ...]] = set()
    for group in groups:
        coordinates = _coordinates(group, sizes)
        # [axes]: along which the members of a group differ.
        moving = (coordinates != coordinates[:, :1]).any(axis=1)
        axes = tuple(name for name, moves in zip(names, moving, strict=True) if moves)
        if len(set(group)) != np.prod([sizes[axis] for axis in axes], dtype=int):
            return None
        group_axes.add(axes)
    return group_axes.pop() if len(group_axes) == 1 else None


def axis_of_parts(groups: Groups, sizes: Mapping[str, int]) -> str | None:
    """Return the mesh axis that all groups are regular parts of, as in a mesh that splits this
    axis; else None.

    A collective that crosses an axis in several steps has such groups: first neighbours, then every
    second device.

    Example:
      >>> axis_of_parts(((0, 1), (2, 3)), {"data": 4}), axis_of_parts(((0, 2), (1, 3)), {"data": 4})
      ('data', 'data')
      >>> axis_of_parts(((0, 3), (1, 2)), {"data": 4}) is None
      True
    """
    names = tuple(sizes)
    group_parts: set[tuple[int, int, int]] = set()
    for group in groups:
        coordinates = _coordinates(tuple(sorted(group)), sizes)
        moving = np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1))
        if len(moving) != 1:
            return None
        positions = coordinates[moving[0]]
        count = len(group)
        stride = int(positions[1] - positions[0])
        # Such a group begins here if the axis is split into [size / (stride count), count, stride].
        expected_first = positions[0] // (stride * count) * stride * count + positions[0] % stride
        if (positions != expected_first + stride * np.arange(count)).any():
            return None
        group_parts.add((int(moving[0]), stride, count))
    if len(group_parts) != 1:
        return None
    ((axis, stride, count),) = group_parts
    size = sizes[names[axis]]
    return names[axis] if count < size and size % (stride * count) == 0 else None


def axes_of_pairs(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which any (source, target) pair moves, in mesh order."""
    source, target = (_coordinates(ends, sizes) for ends in zip(*pairs, strict=True))
    moving = (source != target).any(axis=1)
    return tuple(name for name, moves in zip(sizes, moving, strict=True) if moves)


def _coordinates(positions: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    return np.stack(np.unravel_index(np.array(positions), tuple(sizes.values())))
