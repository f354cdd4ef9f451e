"""What a program was meant to send against what it does."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardopt.core.errors import complaint, plural
from shardopt.hlo.collective import Collective


class Expected(NamedTuple):
    """A row of a stated table: what all collectives of a kind over some axes move in one execution.

    Rows of the same kind, axes and `in_loop` add up; one that leaves `in_loop` open speaks of what the others leave.

    Attributes:
      kind: such as "all-reduce".
      axes: one mesh axis, or several in any order.
      bytes: whole buffers (see `Collective.bytes`) times calls, per device.
      calls: how many calls, loops multiplied in; None for any number.
      in_loop: True or False to speak only of those in a loop, or only of the others; None for all.
    """

    kind: str
    axes: str | tuple[str, ...]
    bytes: int
    calls: int | None = None
    in_loop: bool | None = None


def differences(
    collectives: tuple[Collective, ...], expected: tuple[Expected, ...], mesh_shape: Mapping[str, int], rtol: float
) -> str:
    """Return a complaint with every row that differs, or nothing.

    Raises:
      ValueError: if a row names an axis that the mesh has not.
    """
    rows = _merged([row for row in (_without_single(row, mesh_shape) for row in expected) if row.axes])
    members: dict[Expected, list[Collective]] = {row: [] for row in rows}
    strangers = []
    for found in collectives:
        matching = [row for row in members if _matches(row, found)]
        # a row that speaks of loops is more specific than one that does not
        matching.sort(key=lambda row: row.in_loop is None)
        (members[matching[0]] if matching else strangers).append(found)
    wrong = [line for row, found in members.items() if (line := _difference(row, found, rtol))]
    wrong += [
        f"{_name(found.kind, found.axes, found.in_loop)}{f' in steps of {found.group_size}' if found.part else ''}: "
        f"not expected, found {_found([found])}"
        for found in strangers
    ]
    if not wrong:
        return ""
    what = f"the compiled program does not send what it was meant to ({plural(len(wrong), 'difference')})."
    return complaint("audit", what, wrong)


def _without_single(row: Expected, mesh_shape: Mapping[str, int]) -> Expected:
    axes = (row.axes,) if isinstance(row.axes, str) else tuple(row.axes)
    if unknown := [axis for axis in axes if axis not in mesh_shape]:
        what = f"the expected {row.kind} is over {', '.join(map(repr, unknown))}, which the mesh does not have."
        raise ValueError(complaint("audit", what, fix=f"name axes among {', '.join(mesh_shape)}."))
    return row._replace(axes=tuple(axis for axis in mesh_shape if axis in axes and mesh_shape[axis] > 1))


def _merged(rows: list[Expected]) -> list[Expected]:
    """Add up the rows that speak of the same collectives."""
    merged: dict[tuple, Expected] = {}
    for row in rows:
        key = (row.kind, row.axes, row.in_loop)
        if (same := merged.get(key)) is not None:
            calls = None if None in (same.calls, row.calls) else (same.calls or 0) + (row.calls or 0)
            row = same._replace(bytes=same.bytes + row.bytes, calls=calls)
        merged[key] = row
    return list(merged.values())


def _matches(row: Expected, found: Collective) -> bool:
    same = (row.kind, row.axes) == (found.kind, found.axes) and not found.part  # a row speaks of whole axes
    return same and row.in_loop in (None, found.in_loop)


def _difference(row: Expected, found: list[Collective], rtol: float) -> str:
    calls = [one.calls for one in found]
    known = [count for count in calls if count is not None]
    total = sum(one.bytes * count for one, count in zip(found, calls, strict=True) if count is not None)
    right = len(known) == len(calls) and math.isclose(total, row.bytes, rel_tol=rtol, abs_tol=0.0)
    if right and row.calls in (None, sum(known)):
        return ""
    wanted = f"{row.bytes:,} bytes" + ("" if row.calls is None else f" in {plural(row.calls, 'call')}")
    return f"{_name(row.kind, row.axes, row.in_loop)}: expected {wanted}, found {_found(found)}"


def _found(found: list[Collective]) -> str:
    if not found:
        return "none"
    if any(one.calls is None for one in found):
        return f"{plural(len(found), 'instruction')} in a loop of unknown trip count"
    calls = sum(one.calls or 0 for one in found)
    return f"{sum(one.bytes * (one.calls or 0) for one in found):,} bytes in {plural(calls, 'call')}"


def _name(kind: str, axes: str | tuple[str, ...] | None, in_loop: bool | None) -> str:
    over = "mixed groups" if axes is None else " x ".join((axes,) if isinstance(axes, str) else axes)
    return f"{kind} over {over}" + {None: "", True: " in a loop", False: " outside of loops"}[in_loop]
