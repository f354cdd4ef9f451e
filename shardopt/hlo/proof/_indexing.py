"""Slices and updates at computed places, gathers, scatters and sorts: by number of the device, or
the same everywhere.
"""

import math
from collections.abc import Sequence

import numpy as np

from shardopt.hlo.proof._lines import Line
from shardopt.hlo.proof._lookup import own_rows, scattered_rows, without
from shardopt.hlo.proof._rules import elements_to_hidden, reduced, sliced_dim, unified_operands
from shardopt.hlo.proof._value import (
    REDUCTIONS,
    DerivedValue,
    Dim,
    Factor,
    Facts,
    Hidden,
    Positions,
    Unproved,
    Wrong,
    added,
    classes_of,
    is_constant_along,
    is_whole,
    merged_hidden,
    mixed,
    normal,
    pending,
    replaced,
    scaled,
    unify,
    used,
    whole,
    with_element,
)


def starts_of(value: DerivedValue, devices: int) -> np.ndarray | None:
    """Return the start on each device; None if it is unknown."""
    if value.data is None:
        return None
    starts = value.data.array.reshape(-1).astype(np.int64)
    return np.broadcast_to(starts, (devices,))


def dynamic_slice(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of a slice that starts at computed positions."""
    value = values[0]
    indices = values[1:]
    dims = list(value.dims)
    hidden = value.hidden
    for dim, (size, index) in enumerate(
        zip(line.integers("dynamic_slice_sizes"), indices, strict=True)
    ):
        local = value.shape[dim]
        if size == local:
            continue
        start = starts_of(index, line.devices)
        if start is None or (start == start[0]).all():
            hidden += _of_index(index, value, line)
            first = 0 if start is None else int(min(max(start[0], 0), local - size))
            if start is None and not (is_whole(dims[dim]) or len(dims[dim]) == 1):
                raise Unproved("it slices a dim that is made of several pieces.")
            dims[dim] = sliced_dim(dims[dim], local, size, first, 1)
            if size == 1:
                _, hidden = elements_to_hidden([dims[dim]], hidden, line.order)
                dims[dim] = ()
            continue
        start = np.clip(start, 0, local - size)
        dims[dim], elements = _own_block(dims[dim], size, start, line.order)
        for element in elements:
            hidden = with_element(hidden, element)
    result, remaining = elements_to_hidden(dims, merged_hidden([hidden]))
    return DerivedValue(line.dims, result, remaining, fill=value.fill)


def _of_index(index: DerivedValue, value: DerivedValue, line: Line) -> tuple[Hidden, ...]:
    hidden = used(index.hidden, line.order)
    if classes_of(hidden) & classes_of(pending(value)):
        raise Unproved("each device takes another element of a partial sum.")
    return hidden


def _own_block(dim: Dim, size: int, start: np.ndarray, order: int) -> tuple[Dim, list[Hidden]]:
    """Return the part of a dim that starts at another position on each device."""
    if is_constant_along(dim):
        return tuple(factor._replace(local=size) for factor in dim[:1] if size != 1), []
    if len(dim) == 1 and dim[0].size > 0:
        (factor,) = dim
        at = Positions.of(factor.at.array + start)
        total = factor.size
        if size == 1:
            return (), [Hidden("dim", at, total, order)]
        return (Factor(size, total, at),), []
    major = dim[0]
    minor = math.prod(factor.local for factor in dim[1:])
    if major.size > 0 and size % minor == 0 and not (start % minor).any():
        at = Positions.of(major.at.array + start // minor)
        if size == minor:
            return dim[1:], [Hidden("dim", at, major.size, order)]
        return (Factor(size // minor, major.size, at), *dim[1:]), []
    raise Unproved("each device slices a dim that is made of several pieces.")


def dynamic_update_slice(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of an update at computed positions."""
    base = values[0]
    update = values[1]
    indices = values[2:]
    same = []
    dims = list(base.dims)
    index_hidden: list[Hidden] = []
    padded: list[Hidden] = []
    for dim, (size, index) in enumerate(zip(update.shape, indices, strict=True)):
        if size == base.shape[dim]:
            same.append((dim, dim))
            continue
        start = starts_of(index, line.devices)
        by_device = start is not None and bool((start != start[0]).any())
        if (
            start is None
            or not by_device
            or not (base.zero and _covers(start, size, base.shape[dim]))
        ):
            index_hidden += used(index.hidden, line.order)
            if not (is_whole(base.dims[dim]) and is_whole(update.dims[dim])):
                dims[dim] = _updated_piece(base, update, dim)
            else:
                dims[dim] = whole(base.shape[dim], line.devices)
            continue
        dims[dim], new, update = _padded(
            base.shape[dim], update, dim, np.clip(start, 0, base.shape[dim] - size), line
        )
        padded.append(new)
    common, base, update = unify(base, update, same)
    result = base._replace(dims=tuple(dims)).dims_with(common)
    hidden = added([base, update], line.order)
    if classes_of(index_hidden) & classes_of(h for h in hidden if h.kind in REDUCTIONS):
        raise Unproved("each device writes a partial sum to another place.")
    hidden = merged_hidden([hidden, tuple(index_hidden), tuple(padded)])
    return DerivedValue(line.dims, result, hidden, fill=0 if base.zero and update.zero else None)


def _covers(start: np.ndarray, size: int, local: int) -> bool:
    """Return whether the places at which devices write make up the whole dim."""
    return sorted(set(start.tolist())) == list(range(0, local, size))


def _updated_piece(base: DerivedValue, update: DerivedValue, dim: int) -> Dim:
    """A device writes its elements at the same place within its piece."""
    size = update.shape[dim]
    local = base.shape[dim]
    for value, count in ((base, local), (update, size)):
        factors = value.dims[dim]
        if len(factors) != 1 or factors[0].size <= count:
            continue
        (factor,) = factors
        blocks = factor.size // count
        at = scaled(factor.at, 1, count)
        other = update if value is base else base
        if (
            other.zero
            or is_constant_along(other.dims[dim])
            or (
                len(other.dims[dim]) == 1
                and other.dims[dim][0].size == blocks * other.shape[dim]
                and scaled(other.dims[dim][0].at, 1, other.shape[dim]) is at
            )
        ):
            return (Factor(local, blocks * local, scaled(at, local)),)
    if size == 1:
        for h in update.hidden:
            for factor in base.dims[dim]:
                if (
                    factor.size > factor.local
                    and h.kind == "dim"
                    and h.at is scaled(factor.at, 1, factor.local)
                ):
                    return base.dims[dim]
    raise Unproved("it writes a piece of a dim into another piece of it.")


def _padded(
    local: int, update: DerivedValue, dim: int, start: np.ndarray, line: Line
) -> tuple[Dim, Hidden, DerivedValue]:
    """Every device writes its piece into zeros, at its place: the sum over devices is the whole
    array.
    """
    size = update.shape[dim]
    at = Positions.of(start)
    blocks = local // size
    coordinate = Hidden("add", scaled(at, 1, size), blocks, line.order)
    if local % size or (start % size).any():
        raise Unproved("each device writes its piece at a place that overlaps others.")
    factors = normal(update.dims[dim])
    if (
        len(factors) == 1
        and factors[0].size > 0
        and factors[0].at is at
        and factors[0].size == local
    ):
        remaining = update.hidden
    else:
        matching = [
            h
            for h in update.hidden
            if h.kind == "dim" and h.at is coordinate.at and h.count == blocks
        ]
        if not matching or not is_whole(factors):
            if update.constant or is_constant_along(factors):
                matching = []
            elif len(factors) != 1 or factors[0].size != local:
                raise Unproved("each device writes its own numbers at its own place.")
            else:
                raise Wrong(
                    "devices write their pieces at other places than these pieces have in the"
                    " array."
                )
        remaining = tuple(h for h in update.hidden if h not in matching)
    dims = replaced(update.dims, dim, whole(size, line.devices))
    return whole(local, line.devices), coordinate, update._replace(dims=dims, hidden=remaining)


def gather(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of a gather."""
    operand, indices = values
    offset_dims = line.integers("offset_dims")
    collapsed = line.integers("collapsed_slice_dims")
    starts = line.integers("start_index_map")
    sizes = line.integers("slice_sizes")
    vector_dim = line.integers("index_vector_dim")[0]
    batching = line.pairs("operand_batching_dims", "start_indices_batching_dims")
    if pending(indices):
        indices = indices._replace(hidden=used(indices.hidden, line.order))
    common, operand, indices = unify(operand, indices, batching)
    batch = [i for i in range(len(indices.shape)) if i != vector_dim]
    by_indices = {j: common[i] for i, j in batching}
    window = _windows(operand, collapsed, batching)
    rows = None
    for dim in starts:
        if sizes[dim] != operand.shape[dim] and not is_whole(operand.dims[dim]):
            if len(starts) != 1 or sizes[dim] != 1:
                raise Unproved(
                    f"it looks up elements of dim {dim}, of which each device holds a piece."
                )
            rows, indices = own_rows(operand, dim, indices, line.order)
    batch_dims = iter([by_indices.get(j, indices.dims[j]) for j in batch])
    window_dims = iter(
        [
            operand.dims[i] if sizes[i] == operand.shape[i] else whole(sizes[i], line.devices)
            for i in window
        ]
    )
    dims = [
        next(window_dims) if i in offset_dims else next(batch_dims) for i in range(len(line.dims))
    ]
    for i in window:
        if i not in starts and sizes[i] != operand.shape[i] and not is_whole(operand.dims[i]):
            raise Unproved("it takes a part of a piece.")
    if classes_of(pending(operand)) & classes_of(indices.hidden):
        raise Unproved("each device looks up other elements of a partial sum.")
    hidden = merged_hidden([operand.hidden, indices.hidden, () if rows is None else (rows.row,)])
    return DerivedValue(line.dims, tuple(dims), hidden, facts=Facts(rows=rows))


def _windows(
    operand: DerivedValue, left_out: Sequence[int], batching: list[tuple[int, int]]
) -> list[int]:
    """Return the dims of an operand that the windows of a gather or scatter have."""
    without = {*left_out, *(i for i, _ in batching)}
    return [i for i in range(len(operand.shape)) if i not in without]


def scatter(line: Line, values: Sequence[DerivedValue], kind: str | None) -> DerivedValue:
    """Return the rule of a scatter.

    `kind` is the reduction of its updates, None if they overwrite.
    """
    operand, indices, updates = values
    window_dims = line.integers("update_window_dims")
    inserted = line.integers("inserted_window_dims")
    scattered = line.integers("scatter_dims_to_operand_dims")
    vector_dim = line.integers("index_vector_dim")[0]
    batching = line.pairs("input_batching_dims", "scatter_indices_batching_dims")
    indices = indices._replace(hidden=used(indices.hidden, line.order))
    batch_of_indices = [i for i in range(len(indices.shape)) if i != vector_dim]
    batch_of_updates = [i for i in range(len(updates.shape)) if i not in window_dims]
    pairs = list(zip(batch_of_updates, batch_of_indices, strict=True))
    common, updates, indices = unify(updates, indices, pairs)
    updates = updates._replace(dims=updates.dims_with(common))
    windows = _windows(operand, inserted, batching)
    window_of = dict(zip(windows, window_dims, strict=True))
    same = [(i, j) for i, j in window_of.items() if operand.shape[i] == updates.shape[j]]
    batched = {j: i for i, j in batching}
    same += [(batched[j], i) for i, j in pairs if j in batched]
    dims_of_operand, operand, updates = unify(operand, updates, same)
    dims = list(operand.dims_with(dims_of_operand))
    for dim in {*scattered, *windows} - dims_of_operand.keys():
        is_row = scattered == (dim,) and operand.zero and kind == "add"
        rows = scattered_rows(indices, operand.shape[dim]) if is_row else None
        if rows is not None:
            at, size = rows
            dims[dim] = (Factor(operand.shape[dim], size, at),)
            indices = without(indices, Hidden("device", at, 0, line.order))
            continue
        if not is_whole(operand.dims[dim]):
            raise Unproved(f"it writes to places of dim {dim}, of which each device holds a piece.")
        dims[dim] = whole(operand.shape[dim], line.devices)
    reduced_dims = [i for i, j in pairs if j not in batched]
    terms = DerivedValue(
        updates.shape,
        updates.dims,
        merged_hidden([updates.hidden, indices.hidden]),
        fill=updates.fill,
    )
    if classes_of(pending(updates)) & classes_of(indices.hidden):
        terms = terms._replace(hidden=used(terms.hidden, line.order))
    sums = [f for i in reduced_dims for f in terms.dims[i] if f.size > f.local or f.size == -1]
    if sums and kind is None:
        raise Unproved("devices overwrite elements with their own rows.")
    hidden = reduced(terms, reduced_dims, kind or "add", line) if sums else terms.hidden
    result = terms._replace(hidden=hidden)
    return DerivedValue(line.dims, tuple(dims), added([operand, result], line.order, kind or "add"))


def along_whole(
    line: Line, values: Sequence[DerivedValue], dims: Sequence[int]
) -> tuple[DerivedValue, ...]:
    """Return the operands after a computation that mixes the elements of some dims, which must be
    whole.
    """
    common, operands = unified_operands(values)
    for dim in dims:
        if not is_whole(common[dim]):
            raise Unproved(
                f"it mixes the elements of dim {dim}, of which each device holds a piece."
            )
    hidden = mixed(operands, line.order)
    shape = operands[0].shape
    result = tuple(
        whole(shape[i], line.devices) if i in dims and dim else dim for i, dim in enumerate(common)
    )
    return tuple(DerivedValue(shape, result, hidden) for _ in operands)
