"""Rules of equations that look up entries, or write them, by indices that are values."""

from collections.abc import Sequence

import numpy as np

from shardopt.separability.elementwise import first_unknown, is_zero, join, not_linear, related, unify
from shardopt.separability.moves import take
from shardopt.separability.numbers import source_rows
from shardopt.separability.relations import (
    Columns,
    Known,
    OfOperand,
    Same,
    Site,
    Split,
    Total,
    Unknown,
    Value,
    differing,
)


def gather(site: Site, values: Sequence[Value]) -> list[Value]:
    """Look up entries.

    - Of what is the same everywhere: rows of indices give rows of entries.
    - Of rows, by indices that are the same: each piece looks up in its own rows, if their dim is taken whole.
    - Of rows, by the row's own number: the number that each entry of the result asks for is compared.
    """
    if unknown := first_unknown(values):
        return [unknown]
    operand, indices = related(site, values)[0], values[1]
    numbers, sizes = site.params["dimension_numbers"], site.params_of("slice_sizes")
    shapes = site.operand(0)
    kept = [
        dim
        for dim in range(len(shapes[0]))
        if dim not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    batch = [dim for dim in range(len(site.result()[0])) if dim not in numbers.offset_dims]
    whole_dims = [
        dim
        for dim in range(len(shapes[0]))
        if all(size[dim] == shape[dim] for size, shape in zip(sizes, shapes, strict=True))
    ]
    if not isinstance(operand, Same | Split | Total):
        return [not_linear(site, operand)]
    # along dims that are looked up in, and those of which a part is taken, whole and pieces must be equally long
    uneven = [dim for dim in differing(shapes) if dim not in whole_dims or dim not in kept]
    changed = [dim for dim in range(len(shapes[0])) if sizes[0][dim] != sizes[1][dim] and dim not in differing(shapes)]
    if changed:
        return [site.unknown("position")]
    plain = indices if isinstance(indices, Columns) else related(site, values)[1]
    if isinstance(operand, Split) and uneven == [operand.dim] and operand.dim in numbers.collapsed_slice_dims:
        return [_own_rows(site, operand, indices, batch)]
    if isinstance(plain, Columns):
        plain = join(site, [_as_relation(site, one) for one in plain.columns])
    if _scales_filling(site, operand):
        return [site.unknown("count")]
    if isinstance(operand, Split) and uneven == [operand.dim] and operand.dim in numbers.operand_batching_dims:
        return [_paired(site, operand, plain, batch)]
    if uneven:
        return [site.unknown("mixes")]
    if not isinstance(plain, Same | Split):
        return [first_unknown([plain]) or not_linear(site, plain)]
    if not site.equal(plain.ratio, 1.0):
        return [site.unknown("count")]
    if isinstance(plain, Split):
        if not isinstance(operand, Same) or plain.dim == len(site.operand(1)[0]) - 1:
            return [site.unknown("mixes")]
        return [Split(batch[plain.dim], plain.blocks, operand.ratio, plain.order)]
    if isinstance(operand, Split):
        return [operand.at(numbers.offset_dims[kept.index(operand.dim)])]
    if isinstance(operand, Same):
        return [Same(operand.ratio, operand.drawn or plain.drawn)]
    return [operand if isinstance(operand, Total) else site.unknown("shape")]


def _scales_filling(site: Site, operand: Value) -> bool:
    """Return whether indices outside give a number that has not the operand's ratio."""
    if isinstance(operand, Same | Split) and operand.ratio == 1.0:
        return False
    filling = site.params.get("fill_value")
    given = filling is not None and filling != 0
    return "FILL" in str(site.params.get("mode")) and (given or not np.issubdtype(site.dtype, np.inexact))


def _as_relation(site: Site, column: Value) -> Value:
    if not isinstance(column, Known):
        return column
    whole, piece = site.operand(1)
    return related(OfOperand(site, shapes=((*whole[:-1], 1), (*piece[:-1], 1))), [column])[0]


def _paired(site: Site, operand: Split, indices: Value, batch: Sequence[int]) -> Value:
    """Look up in each row by indices of that row: dims of operand and indices that are counted together."""
    numbers = site.params["dimension_numbers"]
    paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
    fine = isinstance(indices, Same | Split) and site.equal(indices.ratio, 1.0)
    if isinstance(indices, Split):
        fine = fine and (paired, *operand.place[1:]) == indices.place
    return operand.at(batch[paired]) if fine else site.unknown("mixes")


def _own_rows(site: Site, operand: Split, indices: Value, batch: Sequence[int]) -> Value:
    """Look up entries of rows by numbers of rows that the trace knows."""
    numbers = site.params["dimension_numbers"]
    columns = indices.columns if isinstance(indices, Columns) else (indices,)
    if len(columns) != len(numbers.start_index_map) or operand.dim not in numbers.start_index_map:
        return site.unknown("mixes")
    own = columns[numbers.start_index_map.index(operand.dim)]
    others = [_as_relation(site, one) for k, one in enumerate(columns) if numbers.start_index_map[k] != operand.dim]
    row_dim = _row_dim(site, own)
    if row_dim is None or not isinstance(own, Known):
        return site.unknown("mixes")
    sizes = site.operand(0)[0][operand.dim], site.operand(0)[1][operand.dim]
    rows = source_rows(own.whole, sizes[0]), source_rows(own.piece, sizes[1])
    if rows[0] is None or rows[1] is None:
        return site.unknown("mixes")
    taken = take(site, operand.at(row_dim), rows[0], rows[1], sizes)
    if not isinstance(taken, Split):
        return taken
    for other in others:  # what is looked up in further dims is that of the row at the same place
        fine = isinstance(other, Same | Split) and site.equal(other.ratio, 1.0)
        if not fine or (isinstance(other, Split) and other.place != taken.place):
            return site.unknown("mixes")
    return taken.at(batch[row_dim])


def _row_dim(site: Site, column: Value) -> int | None:
    """Return the dim along which a column of indices goes from row to row; None if there is no one such dim."""
    if not isinstance(column, Known):
        return None
    shapes = site.operand(1)
    dims = [dim for dim in range(column.whole.ndim - 1) if column.whole.shape[dim] > 1 or column.piece.shape[dim] > 1]
    if len(dims) != 1 or any(
        one.shape[dims[0]] != shape[dims[0]] for one, shape in zip((column.whole, column.piece), shapes, strict=True)
    ):
        # a piece of one row has one number, 0
        rows = [dim for dim in differing(shapes) if column.whole.shape[dim] == shapes[0][dim]]
        if (
            len(rows) == 1
            and shapes[1][rows[0]] == 1
            and column.piece.size == 1
            and column.whole.size == shapes[0][rows[0]]
        ):
            return rows[0]
        return None
    return dims[0] if differing(shapes) == (dims[0],) else None


ADDING = frozenset(["scatter-add", "scatter_add", "scatter_sub"])


def scatter(site: Site, values: Sequence[Value]) -> list[Value]:
    """Write or add entries.

    - Along a dim of rows that updates fill whole, each piece writes into its own rows.
    - By the row's own number, or by dims that are counted together, each row writes into itself.
    - Rows that are added to what all share are a sum over rows.
    """
    operand, indices, updates = related(site, values)
    if isinstance(values[1], Columns):
        indices = join(site, [_as_relation(site, column) for column in values[1].columns])
    own = _writes_own_rows(site, values[1])
    if unknown := first_unknown([operand, updates] if own else [operand, updates, indices]):
        return [unknown]
    if not own and not (isinstance(indices, Same | Split) and site.equal(indices.ratio, 1.0)):
        return [site.unknown("mixes")]
    rows = differing(site.operand(0))
    if len(rows) > 1 or len(differing(site.operand(2))) > 1:
        return [site.unknown("shape")]
    zeros = [is_zero(values[0]), is_zero(values[2])]
    if not rows:
        return [_into_shared(site, operand, indices, updates, zeros)]
    written = _into_rows(site, rows[0], operand, own or indices, updates, zeros, by_number=own is not None)
    return [written]


def _batch_dims(site: Site) -> list[int]:
    """Return the dims of the updates that belong to dims of the indices."""
    windows = site.params["dimension_numbers"].update_window_dims
    return [dim for dim in range(len(site.operand(2)[0])) if dim not in windows]


def _into_rows(
    site: Site, dim: int, operand: Value, indices: Value, updates: Value, zeros: list[bool], *, by_number: bool
) -> Value:
    """Write into what has rows along `dim`."""
    numbers, shapes = site.params["dimension_numbers"], site.operand(0)
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [one for one in range(len(shapes[0])) if one not in inserted]
    if by_number:
        assert isinstance(indices, Split)
        at = indices.dim
        place = _batch_dims(site)[at]
    elif dim in numbers.operand_batching_dims:
        at = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        place = _batch_dims(site)[at]
    elif dim in windows and dim not in numbers.scatter_dims_to_operand_dims:
        at, place = None, numbers.update_window_dims[windows.index(dim)]
        if any(shape[dim] != update[place] for shape, update in zip(shapes, site.operand(2), strict=True)):
            return site.unknown("mixes")
    else:
        return site.unknown("mixes")
    if isinstance(indices, Split) and indices.dim != at:
        return site.unknown("mixes")
    if any(one != place for one in differing(site.operand(2))):
        return site.unknown("shape")
    # all of them along the dim of the result
    splits = [one.at(dim) for one in (operand, indices, updates) if isinstance(one, Split)]
    if len({one.place for one in splits}) > 1:
        return site.unknown("mixes")
    joined = _combined(site, operand, updates, zeros)
    if not splits or not isinstance(joined, Same | Split):
        return joined if isinstance(joined, Same | Unknown) else site.unknown("mixes")
    return Split(dim, splits[0].blocks, joined.ratio, splits[0].order)


def _combined(site: Site, operand: Value, updates: Value, zeros: list[bool]) -> Value:
    """Return what holds of entries that are the operand's, the updates', or both combined, wherever rows are."""
    ones = [
        Same(one.ratio, isinstance(one, Same) and one.drawn) if isinstance(one, Same | Split) else one
        for one in (operand, updates)
    ]
    if site.name not in ADDING and site.name != "scatter":  # a product, the larger, the smaller
        fine = all(isinstance(one, Same) and site.equal(one.ratio, 1.0) for one in ones)
        return Same(1.0) if fine else site.unknown("count")
    return unify(site, ones, zeros)


def _into_shared(site: Site, operand: Value, indices: Value, updates: Value, zeros: list[bool]) -> Value:
    """Write into what has no dim of rows."""
    repeated, batch = differing(site.operand(2)), _batch_dims(site)
    if isinstance(indices, Same) and not repeated:
        return _combined(site, operand, updates, zeros)
    # updates of rows, which are added up, wherever their indices say
    if site.name not in ADDING or not repeated or repeated[0] not in batch:
        return site.unknown("mixes")
    at = batch.index(repeated[0])
    where = {(at, *updates.place[1:])} if isinstance(updates, Split) else set()
    where |= {indices.place} if isinstance(indices, Split) else set()
    if len(where) != 1 or where.pop()[0] != at or not isinstance(updates, Same | Split):
        return site.unknown("mixes")
    return unify(site, [operand, Total(updates.ratio, site.op)], [zeros[0], False])


def _writes_own_rows(site: Site, indices: Value) -> Split | None:
    """Return where rows are among the indices, if each row is written into itself; None if that is not known."""
    numbers = site.params["dimension_numbers"]
    columns = indices.columns if isinstance(indices, Columns) else (indices,)
    rows = [dim for dim in differing(site.operand(0)) if dim in numbers.scatter_dims_to_operand_dims]
    if len(columns) != len(numbers.scatter_dims_to_operand_dims) or len(rows) != 1:
        return None
    at = numbers.scatter_dims_to_operand_dims.index(rows[0])
    own, others = columns[at], [_as_relation(site, one) for k, one in enumerate(columns) if k != at]
    row_dim = _row_dim(site, own)
    if row_dim is None or not isinstance(own, Known):
        return None
    for known, shape in zip((own.whole, own.piece), site.operand(0), strict=True):
        if not np.array_equal(known.reshape(-1), np.arange(shape[rows[0]])):
            return None
    place = Split(row_dim).place
    for other in others:
        if not isinstance(other, Same | Split) or not site.equal(other.ratio, 1.0):
            return None
        if isinstance(other, Split) and other.place != place:
            return None
    return Split(row_dim)


def dynamic_slice(site: Site, values: Sequence[Value]) -> list[Value]:
    """Take a slice that begins at a value: along the dims of rows it must be all of them."""
    operand, starts = related(site, values)[0], related(site, values)[1:]
    if unknown := first_unknown([operand, *starts]):
        return [unknown]
    if not all(isinstance(start, Same) and site.equal(start.ratio, 1.0) for start in starts):
        return [site.unknown("mixes")]
    shapes, results = site.operand(), site.result()
    for dim in range(len(shapes[0])):
        if shapes[0][dim] == shapes[1][dim]:
            if results[0][dim] != results[1][dim]:
                return [site.unknown("position")]
        elif not all(shape[dim] == result[dim] for shape, result in zip(shapes, results, strict=True)):
            return [site.unknown("mixes")]
    return [operand if isinstance(operand, Same | Split | Total) else site.unknown("shape")]


def dynamic_update_slice(site: Site, values: Sequence[Value]) -> list[Value]:
    """Write a slice that begins at a value: along the dims of rows it must be all of them."""
    operand, updates, *starts = related(site, values)
    if unknown := first_unknown([operand, updates, *starts]):
        return [unknown]
    if not all(isinstance(start, Same) and site.equal(start.ratio, 1.0) for start in starts):
        return [site.unknown("mixes")]
    for shapes in zip(*site.operand(0), *site.operand(1), strict=True):
        whole, piece, of_whole, of_piece = shapes
        if (whole != piece or of_whole != of_piece) and (whole, piece) != (of_whole, of_piece):
            return [site.unknown("mixes")]
    return [unify(site, [operand, updates], [is_zero(values[0]), is_zero(values[1])])]
