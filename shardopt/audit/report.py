"""The collectives of a program as a table: filters, sums, comparison with what was promised."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from shardopt.audit.collective import Collective
from shardopt.core.errors import format_error, plural

_Key = TypeVar("_Key")


class Traffic(NamedTuple):
    """What some collectives move in one execution of the program, per device.

    All are None where a loop does not tell how often it runs.

    Attributes:
      calls: executions, loops multiplied in.
      bytes: whole buffers (see `Collective.bytes`) times calls.
      wire_bytes: what a device sends in ring collectives, times calls.
    """

    calls: int | None
    bytes: int | None
    wire_bytes: int | None


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


class Audit(NamedTuple):
    """The collectives of one compiled program. `print` shows them as a table.

    Attributes:
      collectives: in program order; those whose groups have a single member move nothing and are left out.
      mesh_shape: mesh axis to size.
      name: of the compiled module.
    """

    collectives: tuple[Collective, ...]
    mesh_shape: dict[str, int]
    name: str

    @property
    def total(self) -> Traffic:
        """The traffic of all collectives together."""
        return _traffic(self.collectives)

    @property
    def total_wire_bytes(self) -> int | None:
        """The bytes that a device sends in one execution; None if a loop does not tell how often it runs."""
        return self.total.wire_bytes

    def of(
        self, kind: str | None = None, axis: str | None = None, in_loop: bool | None = None, min_bytes: int = 0
    ) -> "Audit":
        """Return the audit of a part: one kind, those that involve an axis, those in loops or not, the large ones.

        Args:
          kind: such as "all-reduce".
          axis: a mesh axis that is among the collective's axes.
          in_loop: True for those in a loop, False for the others.
          min_bytes: leave out those whose buffers are smaller, such as the reduction of the loss.
        """
        kept = tuple(
            found
            for found in self.collectives
            if kind in (None, found.kind)
            and (axis is None or axis in (found.axes or ()))
            and in_loop in (None, found.in_loop)
            and found.bytes >= min_bytes
        )
        return self._replace(collectives=kept)

    def by_axis(self) -> dict[tuple[str, ...] | None, Traffic]:
        """Return the traffic by the mesh axes that the collectives span."""
        return _grouped(self.collectives, lambda found: found.axes)

    def by_kind(self) -> dict[str, Traffic]:
        """Return the traffic by kind of collective."""
        return _grouped(self.collectives, lambda found: found.kind)

    def check(self, expected: Iterable[Expected], *, min_bytes: int = 0, rtol: float = 0.0) -> None:
        """Compare with what the program was meant to send, instruction boundaries apart.

        The compiler may merge collectives or split them, so rows are compared by their sums: all found collectives
        of one kind over the same axes count together, unless the rows tell those in loops from those outside.

        Args:
          expected: one row per kind and axes. Axes of size 1 are dropped from a row, and a row without axes with them.
          min_bytes: collectives with smaller buffers are not looked at.
          rtol: by how much the bytes may differ, relative to the expected ones.

        Raises:
          AssertionError: if bytes or calls differ, a row was not found, or something was found that no row expects.
          ValueError: if a row names an axis that the mesh has not.
        """
        shown = self.of(min_bytes=min_bytes)
        if wrong := _differences(shown.collectives, expected, self.mesh_shape, rtol):
            what = f"the compiled program does not send what it was meant to ({plural(len(wrong), 'difference')})."
            raise AssertionError(f"{format_error('audit', what, wrong)}\n{shown}")

    def __str__(self) -> str:
        """Return the table: one line per instruction, then the sums by axes."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items())
        title = f"{self.name}: {len(self.collectives)} collectives on {mesh or 'one device'}"
        return "\n".join([title, *_lines(self.collectives), *_sums(self.by_axis())])


def _traffic(collectives: Iterable[Collective]) -> Traffic:
    calls, size, wire = 0, 0, 0
    for found in collectives:
        if found.calls is None:
            return Traffic(None, None, None)
        calls, size, wire = calls + found.calls, size + found.bytes * found.calls, wire + found.wire_bytes * found.calls
    return Traffic(calls, size, wire)


def _grouped(collectives: Iterable[Collective], key: Callable[[Collective], _Key]) -> dict[_Key, Traffic]:
    members: dict[_Key, list[Collective]] = {}
    for found in collectives:
        members.setdefault(key(found), []).append(found)
    return {name: _traffic(found) for name, found in members.items()}


def _differences(
    collectives: Iterable[Collective], expected: Iterable[Expected], mesh_shape: Mapping[str, int], rtol: float
) -> list[str]:
    """Return a line for every row that differs, and for every collective that no row expects."""
    rows = _merged(row for row in (_without_single(row, mesh_shape) for row in expected) if row.axes)
    members: dict[Expected, list[Collective]] = {row: [] for row in rows}
    strangers = []
    for found in collectives:
        matching = [row for row in rows if _matches(row, found)]
        # a row that speaks of loops is more specific than one that does not
        matching.sort(key=lambda row: row.in_loop is None)
        (members[matching[0]] if matching else strangers).append(found)
    wrong = [line for row, found in members.items() if (line := _difference(row, found, rtol))]
    for found in strangers:
        part = f" in steps of {found.group_size}" if found.part else ""
        wrong.append(f"{_name(found.kind, found.axes, found.in_loop)}{part}: not expected, found {_found([found])}")
    return wrong


def _without_single(row: Expected, mesh_shape: Mapping[str, int]) -> Expected:
    axes = (row.axes,) if isinstance(row.axes, str) else tuple(row.axes)
    if unknown := [axis for axis in axes if axis not in mesh_shape]:
        what = f"the expected {row.kind} is over {', '.join(map(repr, unknown))}, which the mesh does not have."
        raise ValueError(format_error("audit", what, fix=f"name axes among {', '.join(mesh_shape)}."))
    return row._replace(axes=tuple(axis for axis in mesh_shape if axis in axes and mesh_shape[axis] > 1))


def _merged(rows: Iterable[Expected]) -> list[Expected]:
    """Add up the rows that speak of the same collectives."""
    merged: dict[tuple[str, str | tuple[str, ...], bool | None], Expected] = {}
    for row in rows:
        key = (row.kind, row.axes, row.in_loop)
        if (same := merged.get(key)) is not None:
            calls = None if same.calls is None or row.calls is None else same.calls + row.calls
            row = same._replace(bytes=same.bytes + row.bytes, calls=calls)
        merged[key] = row
    return list(merged.values())


def _matches(row: Expected, found: Collective) -> bool:
    same = (row.kind, row.axes) == (found.kind, found.axes) and not found.part  # a row speaks of whole axes
    return same and row.in_loop in (None, found.in_loop)


def _difference(row: Expected, found: list[Collective], rtol: float) -> str:
    total = _traffic(found)
    right = total.bytes is not None and math.isclose(total.bytes, row.bytes, rel_tol=rtol, abs_tol=0.0)
    if right and row.calls in (None, total.calls):
        return ""
    wanted = f"{row.bytes:,} bytes" + ("" if row.calls is None else f" in {plural(row.calls, 'call')}")
    return f"{_name(row.kind, row.axes, row.in_loop)}: expected {wanted}, found {_found(found)}"


def _found(found: list[Collective]) -> str:
    total = _traffic(found)
    if total.calls is None:
        return f"{plural(len(found), 'instruction')} in a loop of unknown trip count"
    return f"{total.bytes:,} bytes in {plural(total.calls, 'call')}" if found else "none"


def _name(kind: str, axes: str | tuple[str, ...] | None, in_loop: bool | None) -> str:
    over = "mixed groups" if axes is None else _axes_text((axes,) if isinstance(axes, str) else axes)
    return f"{kind} over {over}" + {None: "", True: " in a loop", False: " outside of loops"}[in_loop]


def _axes_text(axes: tuple[str, ...] | None) -> str:
    """Return `replica x data`, or `mixed` where the groups are neither a product of axes nor parts of one."""
    return "mixed" if axes is None else " x ".join(axes)


def _lines(collectives: tuple[Collective, ...]) -> list[str]:
    """Return the table, numbers aligned to the right."""
    if not collectives:
        return []
    rows = [
        ["kind", "axes", "bytes a call", "calls", "wire bytes", "loops", "notes", "where"],
        *map(_row, collectives),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_align, row, widths)).rstrip() for row in rows]


def _row(found: Collective) -> list[str]:
    notes = {
        "branch": found.conditional,
        "async": found.asynchronous,
        f"a step of {found.group_size} along it": found.part,
        f"groups {found.groups}": found.groups and not found.part,
    }
    where = found.op_name or found.name
    return [
        found.kind,
        _axes_text(found.axes),
        _number(found.bytes),
        _number(found.calls),
        _number(_traffic([found]).wire_bytes),
        "x".join(map(_number, found.loops)) or "-",
        ", ".join(note for note, holds in notes.items() if holds) or "-",
        where if len(where) <= 60 else f"...{where[-57:]}",  # the end of a jax name tells more than its beginning
    ]


def _align(cell: str, width: int) -> str:
    return cell.rjust(width) if cell.replace(",", "").isdigit() or cell == "?" else cell.ljust(width)


def _sums(by_axis: Mapping[tuple[str, ...] | None, Traffic]) -> list[str]:
    lines = []
    for axes, traffic in by_axis.items():
        calls = "? calls" if traffic.calls is None else plural(traffic.calls, "call")
        lines.append(f"{_axes_text(axes)}: {_number(traffic.wire_bytes)} bytes sent per device in {calls}")
    if any(traffic.calls is None for traffic in by_axis.values()):
        lines.append("?: in a loop whose trip count the program does not tell")
    return lines


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
