"""Slices and updates at computed places, gathers, scatters and sorts: by number of the device, or
the same everywhere.
"""

import math
from collections.abc import Sequence

import numpy as np

from shardopt.hlo.proof._lines import Line
from shardopt.hlo.proof._lookup import Rows, own_rows, scattered_rows, without
from shardopt.hlo.proof._rules import elements_to_hidden, reduced, sliced_dim, unified_operands
from shardopt.hlo.proof._value import (
    REDUCTIONS,
    DerivedValue,
    Dim,
    Factor,
    Facts,
    Hidden,
    HiddenDims,
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
    resized,
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
        # The same place everywhere, known or not; below, each device has its own place.
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


def _of_index(index: DerivedValue, value: DerivedValue, line: Line) -> HiddenDims:
    hidden = used(index.hidden, line.order)
    if classes_of(hidden) & classes_of(pending(value)):
        raise Unproved("each device takes another element of a partial sum.")
    return hidden


def _own_block(dim: Dim, size: int, start: np.ndarray, order: int) -> tuple[Dim, list[Hidden]]:
    """Return the part of a dim that starts at another position on each device."""
    if is_constant_along(dim):
        return resized(dim, size), []
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
    changed: dict[int, Dim] = {}
    index_hidden: list[Hidden] = []
    padded: list[Hidden] = []
    for dim, (size, index) in enumerate(zip(update.shape, indices, strict=True)):
        if size == base.shape[dim]:
            same.append((dim, dim))
            continue
        local = base.shape[dim]
        start = starts_of(index, line.devices)
        # Each device writes its block into zeros: XLA's all-gather as an all-reduce of padded
        # buffers.
        if start is not None and base.zero and _covers(start, size, local):
            start = np.clip(start, 0, local - size)
            changed[dim], block, update = _padded(local, update, dim, start, line)
            padded.append(block)
            continue
        index_hidden += used(index.hidden, line.order)
        if is_whole(base.dims[dim]) and is_whole(update.dims[dim]):
            changed[dim] = whole(local, line.devices)
        else:
            changed[dim] = _updated_piece(base, update, dim)
    base, update = unify(base, update, same)
    hidden = added([base, update], line.order)
    if classes_of(index_hidden) & classes_of(h for h in hidden if h.kind in REDUCTIONS):
        raise Unproved("each device writes a partial sum to another place.")
    hidden = merged_hidden([hidden, tuple(index_hidden), tuple(padded)])
    fill = 0 if base.zero and update.zero else None
    return DerivedValue(line.dims, base.dims_with(changed), hidden, fill=fill)


def _covers(start: np.ndarray, size: int, local: int) -> bool:
    """Return whether the places at which devices write make up the whole dim."""
    return sorted(set(start.tolist())) == list(range(0, local, size))


def _updated_piece(base: DerivedValue, update: DerivedValue, dim: int) -> Dim:
    """Return a dim after each device writes elements at the same place within its piece."""
    for value, other in ((base, update), (update, base)):
        size = value.shape[dim]
        factors = value.dims[dim]
        if len(factors) != 1 or factors[0].size <= size:
            continue
        count = factors[0].size // size
        block = scaled(factors[0].at, 1, size)
        pieces = [(f.size, scaled(f.at, 1, other.shape[dim])) for f in other.dims[dim]]
        is_same_block = pieces == [(count * other.shape[dim], block)]
        if other.zero or is_constant_along(other.dims[dim]) or is_same_block:
            local = base.shape[dim]
            return (Factor(local, count * local, scaled(block, local)),)
    elements = {h.at for h in update.hidden if h.kind == "dim"}
    blocks = {scaled(f.at, 1, f.local) for f in base.dims[dim] if f.size > f.local}
    if update.shape[dim] == 1 and elements & blocks:
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
    remaining = update.hidden
    if [(factor.size, factor.at) for factor in factors] != [(local, at)]:
        remaining = _without_block(update, factors, local, coordinate)
    dims = replaced(update.dims, dim, whole(size, line.devices))
    return whole(local, line.devices), coordinate, update._replace(dims=dims, hidden=remaining)


def _without_block(update: DerivedValue, dim: Dim, local: int, block: Hidden) -> HiddenDims:
    """Return the coordinates of an update without the number of the block that each device writes.

    Whole blocks have that number as an element of a dim; numbers that are the same everywhere have
    none.
    """
    numbers = [
        h for h in update.hidden if (h.kind, h.at, h.count) == ("dim", block.at, block.count)
    ]
    if numbers and is_whole(dim):
        return tuple(h for h in update.hidden if h not in numbers)
    if update.constant or is_constant_along(dim):
        return update.hidden
    if len(dim) == 1 and dim[0].size == local:
        raise Wrong(
            "devices write their pieces at other places than these pieces have in the array."
        )
    raise Unproved("each device writes its own numbers at its own place.")


def gather(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of a gather."""
    operand, indices = values
    offset_dims = line.integers("offset_dims")
    sizes = line.integers("slice_sizes")
    batching = line.pairs("operand_batching_dims", "start_indices_batching_dims")
    indices = indices._replace(hidden=used(indices.hidden, line.order))
    operand, indices = unify(operand, indices, batching)
    batch_of_indices = {j: operand.dims[i] for i, j in batching}
    window = operand.other_dims(
        line.integers("collapsed_slice_dims") + line.integers("operand_batching_dims")
    )

    rows, indices = _looked_up(line, operand, indices, window)
    if classes_of(pending(operand)) & classes_of(indices.hidden):
        raise Unproved("each device looks up other elements of a partial sum.")
    dims_of_indices = indices.dims_with(batch_of_indices)
    batch_dims = iter(
        [dims_of_indices[j] for j in indices.other_dims(line.integers("index_vector_dim"))]
    )
    window_dims = iter(
        [
            operand.dims[i] if sizes[i] == operand.shape[i] else whole(sizes[i], line.devices)
            for i in window
        ]
    )
    dims = [
        next(window_dims) if i in offset_dims else next(batch_dims) for i in range(len(line.dims))
    ]
    hidden = merged_hidden([operand.hidden, indices.hidden, () if rows is None else (rows.row,)])
    return DerivedValue(line.dims, tuple(dims), hidden, facts=Facts(rows=rows))


def _looked_up(
    line: Line, operand: DerivedValue, indices: DerivedValue, window: Sequence[int]
) -> tuple[Rows | None, DerivedValue]:
    """Return the rows that a gather takes from the piece of each device, and the indices without
    their dependence on it; None if each device has the whole operand.
    """
    starts = line.integers("start_index_map")
    sizes = line.integers("slice_sizes")
    cut_pieces = [
        dim
        for dim in operand.other_dims(())
        if sizes[dim] != operand.shape[dim] and not is_whole(operand.dims[dim])
    ]
    rows = None
    indexed = [dim for dim in starts if dim in cut_pieces]
    if indexed:
        (dim, *_) = indexed
        if len(starts) != 1 or sizes[dim] != 1:
            raise Unproved(
                f"it looks up elements of dim {dim}, of which each device holds a piece."
            )
        rows, indices = own_rows(operand, dim, indices, line.order)
    if any(dim in window and dim not in starts for dim in cut_pieces):
        raise Unproved("it takes a part of a piece.")
    return rows, indices


def scatter(line: Line, values: Sequence[DerivedValue], kind: str | None) -> DerivedValue:
    """Return the rule of a scatter.

    `kind` is the reduction of its updates, None if they overwrite.
    """
    operand, indices, updates = values
    window_dims = line.integers("update_window_dims")
    vector_dims = line.integers("index_vector_dim")
    batching = line.pairs("input_batching_dims", "scatter_indices_batching_dims")
    batch_of_operand = {j: i for i, j in batching}
    # the dims of updates and of indices that count the windows
    pairs = list(zip(updates.other_dims(window_dims), indices.other_dims(vector_dims), strict=True))
    indices = indices._replace(hidden=used(indices.hidden, line.order))
    updates, indices = unify(updates, indices, pairs)
    inserted = line.integers("inserted_window_dims")
    windows = operand.other_dims({*inserted, *batch_of_operand.values()})
    same = [
        (i, j)
        for i, j in zip(windows, window_dims, strict=True)
        if operand.shape[i] == updates.shape[j]
    ]
    same += [(batch_of_operand[j], i) for i, j in pairs if j in batch_of_operand]
    operand, updates = unify(operand, updates, same)
    scattered = line.integers("scatter_dims_to_operand_dims")
    for dim in {*scattered, *windows} - dict(same).keys():
        local = operand.shape[dim]
        rows = scattered_rows(indices, local) if kind == "add" and scattered == (dim,) else None
        new_dim = _dim_of_own_rows(operand, dim, rows)
        if rows and new_dim:
            indices = without(indices, Hidden("device", rows[0], 0, line.order))
        elif is_whole(operand.dims[dim]):
            new_dim = whole(local, line.devices)
        else:
            raise Unproved(f"it writes to places of dim {dim}, of which each device holds a piece.")
        operand = operand._replace(dims=replaced(operand.dims, dim, new_dim))
    summed = [i for i, j in pairs if j not in batch_of_operand]
    terms = _terms(line, updates, indices, summed, kind)
    hidden = added([operand, terms], line.order, kind or "add")
    return DerivedValue(line.dims, operand.dims, hidden)


def _dim_of_own_rows(
    operand: DerivedValue, dim: int, rows: tuple[Positions, int] | None
) -> tuple[Factor, ...] | None:
    """Return the factors of a dim if devices add to rows of their own, None if they do not.

    The operand is 0, or it is split in the same way.
    """
    if rows is None:
        return None
    factors = (Factor(operand.shape[dim], rows[1], rows[0]),)
    return factors if operand.zero or operand.dims[dim] == factors else None


def _terms(
    line: Line,
    updates: DerivedValue,
    indices: DerivedValue,
    summed: Sequence[int],
    kind: str | None,
) -> DerivedValue:
    """Return the updates of a scatter as terms of its result: those along the dims `summed`, which
    may meet in one element, are reduced.
    """
    hidden = merged_hidden([updates.hidden, indices.hidden])
    if classes_of(pending(updates)) & classes_of(indices.hidden):
        # a device that writes its partial sums to places of its own does not complete them
        hidden = used(hidden, line.order)
    terms = updates._replace(hidden=hidden)
    if kind is None and not all(is_whole(terms.dims[i]) for i in summed):
        raise Unproved("devices overwrite elements with their own rows.")
    return terms._replace(hidden=reduced(terms, summed, kind or "add", line))


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
