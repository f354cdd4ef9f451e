"""One collective of a compiled program, with its bytes."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardopt.hlo.axes import axes_of_groups, axes_of_pairs, axis_of_parts
from shardopt.hlo.groups import Groups, permute_pairs, replica_groups
from shardopt.hlo.shapes import arrays, elements, nbytes
from shardopt.hlo.text import Instruction, attributes
from shardopt.hlo.walk import Found, crosses_slices


class Collective(NamedTuple):
    """One collective instruction, reached one way.

    Attributes:
      kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `collective-permute`, ...
      axes: the mesh axes that its groups span, in mesh order; None if the groups are neither a product of whole axes
        nor a `part` of one. Of a permute: the axes along which something moves.
      bytes: of one call, per device: the *whole* buffer, summed over all arrays that travel together. The result
        of an all-gather, the operand of a reduce-scatter, operand and result alike of the others.
      wire_bytes: of one call: what each device sends in a ring, with n devices in a group, rounded up.
        2 (n - 1) / n x bytes for an all-reduce, (n - 1) / n x bytes for all-gather, reduce-scatter and
        all-to-all, bytes for a permute or a broadcast.
      loops: trip counts of the loops around it, outermost first; None for one that the program does not tell.
      group_size: n, how many devices take part; 0 for a permute.
      conditional: it stands in a branch, which is counted as if it were always taken, or as often as the schedule says
        that `audit` was given.
      asynchronous: computation may run between its start and its end.
      shapes: of the arrays in the result, such as `f32[8,4]`.
      name: of the instruction.
      op_name: where in the user's program it comes from, as jax names it.
      groups: positions in the mesh, or (source, target) pairs; only where `axes` is None, or of a `part`.
      part: each group is a regular part of its one axis: neighbours, or every so many-th. Such are the steps of a
        collective that goes over the axis in several, as gathers over a whole TPU torus do.
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
        """How often it runs in one execution of the program; None if a loop around it does not tell."""
        return None if None in self.loops else math.prod(count for count in self.loops if count is not None)

    @property
    def in_loop(self) -> bool:
        """Whether it stands in a loop."""
        return bool(self.loops)


def read_collective(
    found: Found, sizes: Mapping[str, int], *, replicas: int, partitions: int, slices: int = 1
) -> Collective | None:
    """Return the collective, or None if nobody talks to anybody else.

    Args:
      found: the instruction.
      sizes: of the mesh axes.
      replicas: of the program, as XLA counts them.
      partitions: likewise.
      slices: how many times the program runs, once a slice; the outermost axis spans them.
    """
    instruction = found.instruction
    words = attributes(instruction)
    outer = next((axis for axis, size in sizes.items() if size > 1), "")
    if crosses_slices(instruction):
        sent = nbytes(elements(instruction.shape)[0]) * (slices if found.kind == "all-gather" else 1)
        return _made(found, (outer,), sent, slices, elements(instruction.shape)[0], None)
    if slices > 1:
        sizes = {**sizes, outer: sizes[outer] // slices}
    if found.kind == "collective-permute":
        groups = permute_pairs(words, replicas=replicas, partitions=partitions)
        group_size, axes_of = 0, axes_of_pairs
    else:
        has_global_flag = found.kind in ("all-reduce", "all-gather", "reduce-scatter")
        groups = replica_groups(words, replicas=replicas, partitions=partitions, has_global_flag=has_global_flag)
        group_size, axes_of = max(len(group) for group in groups), axes_of_groups
    if not groups or group_size == 1:
        return None
    axes, part = axes_of(groups, sizes), None
    if axes is None and (part := axis_of_parts(groups, sizes)) is not None:
        axes = (part,)
    result = _result(instruction, found.kind)
    # the result of a reduce-scatter is a shard of what travels, unless it is rendered as an all-reduce and a slice
    is_shard = found.kind == "reduce-scatter" and instruction.opcode.startswith("reduce-scatter")
    size = nbytes(result) * (group_size if is_shard else 1)
    told = groups if axes is None or part else None
    return _made(found, axes, size, group_size, result, told, part=part is not None)


def _made(
    found: Found,
    axes: tuple[str, ...] | None,
    size: int,
    group_size: int,
    result: str,
    groups: Groups | None,
    *,
    part: bool = False,
) -> Collective:
    return Collective(
        kind=found.kind,
        axes=axes,
        bytes=size,
        wire_bytes=_wire_bytes(found.kind, size, group_size),
        loops=found.loops,
        group_size=group_size,
        conditional=found.conditional,
        asynchronous=found.asynchronous,
        shapes=tuple(arrays(result)),
        name=found.instruction.name,
        op_name=_op_name(attributes(found.instruction)),
        groups=groups,
        part=part,
    )


def _result(instruction: Instruction, kind: str) -> str:
    """A start holds (operands, results, contexts), but that of an all-reduce holds just the results."""
    parts = elements(instruction.shape)
    holds_operands = instruction.opcode.endswith("-start") and kind != "all-reduce" and len(parts) > 1
    return parts[1] if holds_operands else instruction.shape


def _wire_bytes(kind: str, size: int, n: int) -> int:
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    return -(-(2 if kind == "all-reduce" else 1) * (n - 1) * size // n)


def _op_name(words: Mapping[str, str]) -> str:
    return words.get("metadata", "").partition('op_name="')[2].partition('"')[0]
