"""A table of the traffic that a compiled program is meant to send, compared with its collectives."""

import math
from typing import NamedTuple

from shardopt.core import format_error, plural


class Expected(NamedTuple):
    """A row of expected traffic: all collectives of one kind over the same axes, in one execution.

    Rows of the same kind, axes and `in_loop` add up. A row with `in_loop=None` counts the
    collectives that no row with True or False counts.

    Attributes:
      kind: kind of collective, such as "all-reduce".
      axes: one mesh axis, or several in any order.
      bytes: whole buffers (see `Collective.bytes`) times calls, per device.
      calls: calls, multiplied by the trip counts of loops; None for any number.
      in_loop: True for collectives in a loop, False for collectives outside of loops, None for
        both.
    """

    kind: str
    axes: str | tuple[str, ...]
    bytes: int
    calls: int | None = None
    in_loop: bool | None = None


def check_traffic(audit, expected, *, min_bytes=0, rtol=0.0):
    """Fail if the program sends other traffic than expected.

    The compiler may merge or split collectives, so sums are compared. All collectives of one kind
    over the same axes count together, unless rows distinguish collectives in loops from collectives
    outside.

    Args:
      audit: of the program.
      expected: one row per kind and axes. Axes of size 1 are removed from rows, and rows without
        axes are ignored.
      min_bytes: collectives with smaller buffers are ignored.
      rtol: allowed difference of bytes, relative to the expected bytes.
    """
    compared = audit.of(min_bytes=min_bytes)
    differences = differences_of(compared, expected, rtol)
    differences += [f"{name}: its traffic on the SparseCore is unknown" for name in audit.unread]
    if differences:
        problem = (
            "the compiled program does not send what it was meant to"
            f" ({plural(len(differences), 'difference')})."
        )
        raise AssertionError(f"{format_error('audit', problem, differences)}\n{compared}")


def differences_of(audit, expected, rtol):
    """Return a line for every row that differs, and for every collective that no row expects."""
    rows = merged(
        row for row in (without_single_axes(row, audit.mesh_shape) for row in expected) if row.axes
    )
    members = {row: [] for row in rows}
    unexpected = []
    for collective in audit.collectives:
        matching = [row for row in rows if matches(row, collective)]
        # a row with in_loop is more specific than a row without
        matching.sort(key=lambda row: row.in_loop is None)
        (members[matching[0]] if matching else unexpected).append(collective)
    differences = [difference(audit, row, group, rtol) for row, group in members.items()]
    for collective in unexpected:
        part = f" in steps of {collective.group_size}" if collective.part else ""
        name = name_of(collective.kind, collective.axes, collective.in_loop)
        sent = traffic_text(audit, [collective])
        differences.append(f"{name}{part}: not expected, found {sent}")
    return list(filter(None, differences))


def without_single_axes(row, mesh_shape):
    axes = (row.axes,) if isinstance(row.axes, str) else tuple(row.axes)
    assert set(axes) <= set(mesh_shape), f"the mesh does not have all of {axes}"
    return row._replace(
        axes=tuple(axis for axis in mesh_shape if axis in axes and mesh_shape[axis] > 1)
    )


def merged(rows):
    """Add up the rows of the same kind, axes and `in_loop`."""
    sums = {}
    for row in rows:
        key = (row.kind, row.axes, row.in_loop)
        previous = sums.get(key)
        if previous is not None:
            counts = (previous.calls, row.calls)
            calls = None if None in counts else sum(counts)
            row = previous._replace(bytes=previous.bytes + row.bytes, calls=calls)
        sums[key] = row
    return list(sums.values())


def matches(row, collective):
    # a row names whole axes
    same = (row.kind, row.axes) == (collective.kind, collective.axes) and not collective.part
    return same and row.in_loop in (None, collective.in_loop)


def difference(audit, row, collectives, rtol):
    total = audit._replace(collectives=tuple(collectives)).total
    same_bytes = total.bytes is not None and math.isclose(
        total.bytes, row.bytes, rel_tol=rtol, abs_tol=0.0
    )
    if same_bytes and row.calls in (None, total.calls):
        return ""
    calls = "" if row.calls is None else f" in {plural(row.calls, 'call')}"
    name = name_of(row.kind, row.axes, row.in_loop)
    sent = traffic_text(audit, collectives)
    return f"{name}: expected {row.bytes:,} bytes{calls}, found {sent}"


def traffic_text(audit, collectives):
    total = audit._replace(collectives=tuple(collectives)).total
    if total.calls is None:
        return f"{plural(len(collectives), 'instruction')} in a loop of unknown trip count"
    return f"{total.bytes:,} bytes in {plural(total.calls, 'call')}" if collectives else "none"


def name_of(kind, axes, in_loop):
    over = "mixed groups" if axes is None else " x ".join([axes] if isinstance(axes, str) else axes)
    where = {None: "", True: " in a loop", False: " outside of loops"}
    return f"{kind} over {over}{where[in_loop]}"
