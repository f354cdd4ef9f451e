"""What equations that look up entries, or write them, by index do to rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardopt.separability.arithmetic import elementwise, joined, not_linear
from shardopt.separability.rule_parts import As, opaque, uniform
from shardopt.separability.values import Clean, Const, Mixed, Rows, Site, Sum, Value, scaled


def gather(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Look up entries by index."""
    operand, indices = values
    numbers, sizes = site.params["dimension_numbers"], site.params["slice_sizes"]
    shape = site.outs()[0]
    if isinstance(operand, Const) and isinstance(indices, Const):
        return uniform(site, values)
    if isinstance(indices, Sum) or (isinstance(indices, Rows) and indices.plus):
        return [not_linear(site, values)]
    if isinstance(operand, Sum):
        return [operand if isinstance(indices, Const) else site.mixed("unknown")]
    last = len(site.ins(1)[0]) - 1
    batch = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    kept = [
        dim
        for dim in range(len(sizes))
        if dim not in numbers.collapsed_slice_dims and dim not in numbers.operand_batching_dims
    ]

    if isinstance(operand, Const):
        assert isinstance(indices, Rows)
        if operand.varies and not operand.anywhere:
            return [Mixed(operand.op or site.op, why="position")]
        if indices.own or indices.dim == last:
            return [site.mixed("unknown")]
        dim = None if indices.dim is None else batch[indices.dim]
        return [indices._replace(dim=dim, degree=operand.degree)]

    assert isinstance(operand, Rows)
    if operand.own:
        return [site.mixed()]
    if operand.dim is None:
        fine = isinstance(indices, Const) or indices.place == operand.place
        return [operand if fine else site.mixed()]
    own = indices.own if isinstance(indices, Rows) else _own_columns(site, indices)
    by_number = {numbers.start_index_map[column]: column for column in own if column >= 0}
    if operand.dim in by_number and operand.dim in numbers.collapsed_slice_dims and set(by_number) == {operand.dim}:
        where = indices.dim if isinstance(indices, Rows) else _varying(indices)
        if where is None or (isinstance(indices, Rows) and indices.place[1:] != operand.place[1:]):
            return [site.mixed("unknown")]
        return [operand._replace(dim=batch[where])]
    if isinstance(indices, Rows):
        if operand.dim in numbers.operand_batching_dims and not indices.own:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
            if (paired, *operand.place[1:]) == indices.place:
                return [operand._replace(dim=batch[paired])]
        return [site.mixed()]
    if operand.dim in kept and all(
        eqn.params["slice_sizes"][operand.dim] == old[operand.dim]
        for eqn, old in zip(site.eqns, site.ins(), strict=True)
    ):
        if indices.varies and not indices.anywhere:
            return [Mixed(indices.op or site.op, why="position")]
        return [operand._replace(dim=numbers.offset_dims[kept.index(operand.dim)])]
    if operand.dim in numbers.operand_batching_dims and (indices.anywhere or not indices.varies):
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
        return [operand._replace(dim=batch[paired])]
    return [site.mixed()]


def _varying(indices: Const) -> int | None:
    return next(iter(indices.varies)) if len(indices.varies) == 1 else None


def _own_columns(site: Site, indices: Const) -> frozenset[int]:
    """Return which columns of constant indices are row numbers; none if any other varies along rows."""
    dim = _varying(indices)
    last = len(site.ins(1)[0]) - 1
    if dim is None or indices.values is None or dim == last:
        return frozenset()
    own = set()
    for column in range(site.ins(1)[0][last]):
        numbers = [value.take([min(column, value.shape[last] - 1)], last) for value in indices.values]
        if all(value.size == 1 for value in numbers):
            continue
        shapes = [(*shape[:last], 1) for shape in site.ins(1)]
        right = all(
            value.size == shape[dim] and np.array_equal(value.reshape(-1), np.arange(shape[dim]))
            for value, shape in zip(numbers, shapes, strict=True)
        )
        if not right and any(len(np.unique(value)) > 1 and value.shape[dim] > 1 for value in numbers):
            return frozenset()
        if right:
            own.add(column)
    return frozenset(own)


def scatter(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Write or add entries by index."""
    operand, indices, updates = values
    numbers, adds = site.params["dimension_numbers"], site.name in ("scatter-add", "scatter_add", "scatter_sub")
    if all(isinstance(value, Const) for value in values):
        return uniform(site, values) if _scatters_whole_rows(site) else opaque(site, values)
    if isinstance(indices, Sum) or any(isinstance(value, Rows) and value.plus for value in values):
        return [not_linear(site, values)]
    if isinstance(operand, Sum) or isinstance(updates, Sum):
        if not isinstance(indices, Const) or isinstance(operand, Rows) or isinstance(updates, Rows):
            return [not_linear(site, values)]
        return [joined(site, [operand, updates])]
    ndim = len(site.ins(2)[0])
    batch = [dim for dim in range(ndim) if dim not in numbers.update_window_dims]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(len(site.ins(0)[0])) if dim not in inserted]
    rows = [value for value in (operand, indices, updates) if isinstance(value, Rows)]
    if any(row.loop is not None for row in rows):
        return [rows[0] if len({row.place for row in rows}) == 1 else site.mixed("unknown")]
    own = (
        indices.own if isinstance(indices, Rows) else _own_columns(site, indices) if isinstance(indices, Const) else ()
    )
    home = _home(operand, indices, own, numbers)
    if home is None and not isinstance(operand, Rows):  # rows are added up, wherever their indices say
        where = indices.dim if isinstance(indices, Rows) else None
        if isinstance(updates, Rows):
            expected = updates.dim in batch and where in (None, batch.index(updates.dim))
        else:
            expected = where is not None and not (isinstance(updates, Const) and updates.varies)
        same_rows = len({row.place[1:] for row in rows}) == 1
        if not (adds and expected and same_rows and not own) or (where is None and _position(indices)):
            return [site.mixed() if not adds else site.mixed("unknown")]
        total = Sum(updates.degree, site.op)
        return [joined(site, [total, operand])]
    dim = operand.dim if isinstance(operand, Rows) else home
    assert dim is not None
    windowed = dim in windows and dim not in numbers.scatter_dims_to_operand_dims
    if dim in windows:
        full = [s[dim] == u[numbers.update_window_dims[windows.index(dim)]]
                for s, u in zip(site.ins(0), site.ins(2), strict=True)]  # fmt: skip
        windowed = windowed or all(full)
    if windowed:
        at = numbers.update_window_dims[windows.index(dim)]
        fine = isinstance(indices, Const) and not _position(indices)
        place = at
    elif dim in numbers.operand_batching_dims:
        at = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        fine, place = not own, batch[at]
        fine = fine and (not isinstance(indices, Rows) or indices.dim == at)
    else:
        columns = {numbers.scatter_dims_to_operand_dims[one] for one in own}
        at = indices.dim if isinstance(indices, Rows) else _varying(indices) if isinstance(indices, Const) else None
        fine = columns == {dim} and at is not None
        place = batch[at] if fine and at is not None else -1
    fine = fine and (not isinstance(updates, Rows) or updates.dim == place)
    fine = (
        fine and len({row.place[1:] for row in rows}) == 1 and not (isinstance(updates, Const) and _position(updates))
    )
    if not fine:
        return [site.mixed() if windowed or isinstance(operand, Rows) else site.mixed("unknown")]
    parts = [operand, updates._replace(dim=dim) if isinstance(updates, Rows) else updates]
    joint = elementwise(As(site, "add"), [*parts])[0]
    if isinstance(joint, Const):
        assert isinstance(indices, Rows)
        joint = indices._replace(dim=dim, own=frozenset(), degree=joint.degree)
    return [joint]


def _scatters_whole_rows(site: Site) -> bool:
    """Return whether a scatter writes alike into every row: its windows are whole in the dims of rows, and start at none."""
    numbers = site.params["dimension_numbers"]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(len(site.ins(0)[0])) if dim not in inserted]
    return all(
        dim in windows
        and dim not in numbers.scatter_dims_to_operand_dims
        and all(
            s[dim] == u[numbers.update_window_dims[windows.index(dim)]]
            for s, u in zip(site.ins(0), site.ins(2), strict=True)
        )
        for dim in scaled(site.ins(0))
    )


def _position(value: Value) -> bool:
    return isinstance(value, Const) and bool(value.varies) and not value.anywhere


def _home(operand: Clean, indices: Clean, own: Sequence[int] | frozenset[int], numbers: Any) -> int | None:
    """Return the dim of the operand in which each row has a place of its own; None if rows meet there."""
    if isinstance(operand, Rows):
        return operand.dim
    if isinstance(indices, Rows) and indices.dim in numbers.scatter_indices_batching_dims:
        return numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(indices.dim)]
    columns = {numbers.scatter_dims_to_operand_dims[one] for one in own}
    return columns.pop() if len(columns) == 1 else None


def dynamic_update_slice(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Write a slice."""
    operand, update, *starts = values
    if not all(isinstance(one, Const) for one in starts):
        loops = [one for one in values if isinstance(one, Rows) and one.loop is not None]
        alike = loops and all(isinstance(one, Const) or one in loops for one in values)
        return [loops[0] if alike else site.mixed("unknown")]
    if isinstance(operand, Const) and isinstance(update, Const):
        return opaque(site, values)
    if isinstance(operand, Rows) or isinstance(update, Rows):
        dim = next(one.dim for one in (operand, update) if isinstance(one, Rows))
        if dim is not None and any(old[dim] != new[dim] for old, new in zip(site.ins(0), site.ins(1), strict=True)):
            return [site.mixed("unknown")]
    return elementwise(As(site, "add"), [operand, update])
