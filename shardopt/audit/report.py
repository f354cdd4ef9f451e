"""The collectives of a program as a table: filters, sums, comparison with what was promised."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shardopt.audit.collective import Collective
from shardopt.core.errors import format_error, plural

# What a program was meant to send against what it does.


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
    return format_error("audit", what, wrong)


def _without_single(row: Expected, mesh_shape: Mapping[str, int]) -> Expected:
    axes = (row.axes,) if isinstance(row.axes, str) else tuple(row.axes)
    if unknown := [axis for axis in axes if axis not in mesh_shape]:
        what = f"the expected {row.kind} is over {', '.join(map(repr, unknown))}, which the mesh does not have."
        raise ValueError(format_error("audit", what, fix=f"name axes among {', '.join(mesh_shape)}."))
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


class Traffic(NamedTuple):
    """What some collectives move in one execution of the program, per device.

    Attributes:
      calls: executions, loops multiplied in.
      bytes: whole buffers (see `Collective.bytes`) times calls.
      wire_bytes: what a device sends in rings, times calls.

    All are None where a loop does not tell how often it runs.
    """

    calls: int | None
    bytes: int | None
    wire_bytes: int | None


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
          expected: one row a kind and axes. Axes of size 1 are dropped from a row, and a row without axes with them.
          min_bytes: collectives with smaller buffers are not looked at.
          rtol: by how much the bytes may differ, relative to the expected ones.

        Raises:
          AssertionError: if bytes or calls differ, a row was not found, or something was found that no row expects.
          ValueError: if a row names an axis that the mesh has not.
        """
        shown = self.of(min_bytes=min_bytes)
        if problem := differences(shown.collectives, tuple(expected), self.mesh_shape, rtol):
            raise AssertionError(f"{problem}\n{shown}")

    def __str__(self) -> str:
        """Return the table: one line an instruction, then the sums by axes."""
        return "\n".join([self._title(), *_lines(self.collectives), *_sums(self.by_axis())])

    def _title(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items())
        return f"{self.name}: {len(self.collectives)} collectives on {mesh or 'one device'}"


def table(rows: list[list[str]]) -> list[str]:
    """Align columns: numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_align, row, widths)).rstrip() for row in rows]


def axes_text(axes: tuple[str, ...] | None) -> str:
    """Return `replica x data`, or `mixed` where the groups are neither a product of axes nor parts of one."""
    return "mixed" if axes is None else " x ".join(axes)


def _align(cell: str, width: int) -> str:
    return cell.rjust(width) if cell.replace(",", "").isdigit() or cell == "?" else cell.ljust(width)


def _traffic(collectives: Iterable[Collective]) -> Traffic:
    collectives = tuple(collectives)
    calls = [found.calls for found in collectives]
    known = [count for count in calls if count is not None]
    if len(known) < len(calls):
        return Traffic(None, None, None)
    pairs = list(zip(collectives, known, strict=True))
    return Traffic(
        sum(known),
        sum(found.bytes * count for found, count in pairs),
        sum(found.wire_bytes * count for found, count in pairs),
    )


def _grouped(collectives: tuple[Collective, ...], key: Callable[[Collective], Any]) -> dict[Any, Traffic]:
    members: dict[Any, list[Collective]] = {}
    for found in collectives:
        members.setdefault(key(found), []).append(found)
    return {name: _traffic(found) for name, found in members.items()}


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _calls(count: int | None) -> str:
    return "? calls" if count is None else plural(count, "call")


def _tail(name: str, width: int = 60) -> str:
    """The end of a jax name tells more than its beginning."""
    return name if len(name) <= width else f"...{name[3 - width :]}"


def _lines(collectives: tuple[Collective, ...]) -> list[str]:
    if not collectives:
        return []
    head = ["kind", "axes", "bytes a call", "calls", "wire bytes", "loops", "notes", "where"]
    rows = [
        [
            found.kind,
            axes_text(found.axes),
            _number(found.bytes),
            _number(found.calls),
            _number(_traffic([found]).wire_bytes),
            "x".join(map(_number, found.loops)) or "-",
            _notes(found),
            _tail(found.op_name or found.name),
        ]
        for found in collectives
    ]
    return table([head, *rows])


def _notes(found: Collective) -> str:
    notes = [
        ("branch", found.conditional),
        ("async", found.asynchronous),
        (f"a step of {found.group_size} along it", found.part),
        (f"groups {found.groups}", found.groups and not found.part),
    ]
    return ", ".join(note for note, holds in notes if holds) or "-"


def _sums(by_axis: dict[tuple[str, ...] | None, Traffic]) -> list[str]:
    lines = [
        f"{axes_text(axes)}: {_number(traffic.wire_bytes)} bytes sent per device in {_calls(traffic.calls)}"
        for axes, traffic in by_axis.items()
    ]
    if any(traffic.calls is None for traffic in by_axis.values()):
        lines.append("?: in a loop whose trip count the program does not tell")
    return lines
