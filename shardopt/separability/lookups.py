"""Rules of gathers, scatters and dynamic slices, whose indices are operands."""

from collections.abc import Sequence

import numpy as np

from shardopt.separability.elementwise import first_unknown, is_zero, join, not_linear, resolve_numbers, unify
from shardopt.separability.moves import take_along_split
from shardopt.separability.numbers import row_numbers
from shardopt.separability.relations import (
    Columns,
    Known,
    OperandSite,
    Relation,
    Same,
    Site,
    Split,
    Total,
    Unknown,
    differing_dims,
)


def gather(site: Site, relations: Sequence[Relation]) -> list[Relation]:
    """Look up entries.

    The rule knows three cases:

    - The operand is the same in all pieces: rows of indices give rows of entries.
    - The operand has rows, and the indices are the same in all pieces: each piece looks up in its rows, if slices take the
      whole dim of rows.
    - The operand has rows, and the indices are known row numbers: `take_along_split` compares the numbers.
    """
    if unknown := first_unknown(relations):
        return [unknown]
    operand, indices = resolve_numbers(site, relations)[0], relations[1]
    numbers, sizes = site.params["dimension_numbers"], site.both_params("slice_sizes")
    shapes = site.operand_shapes(0)
    slice_dims = [
        dim
        for dim in range(len(shapes[0]))
        if dim not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    batch_dims = [dim for dim in range(len(site.result_shapes()[0])) if dim not in numbers.offset_dims]
    fully_taken_dims = [
        dim
        for dim in range(len(shapes[0]))
        if all(size[dim] == shape[dim] for size, shape in zip(sizes, shapes, strict=True))
    ]
    if not isinstance(operand, Same | Split | Total):
        return [not_linear(site, operand)]
    # a dim that is indexed, or only partly taken, must have one size in the whole trace and in the piece trace
    uneven_dims = [dim for dim in differing_dims(shapes) if dim not in fully_taken_dims or dim not in slice_dims]
    resized_dims = [
        dim for dim in range(len(shapes[0])) if sizes[0][dim] != sizes[1][dim] and dim not in differing_dims(shapes)
    ]
    if resized_dims:
        return [site.unknown("position")]
    index_relation = indices if isinstance(indices, Columns) else resolve_numbers(site, relations)[1]
    if isinstance(operand, Split) and uneven_dims == [operand.dim] and operand.dim in numbers.collapsed_slice_dims:
        return [_gather_known_rows(site, operand, indices, batch_dims)]
    if isinstance(index_relation, Columns):
        index_relation = join(site, [_resolve_column(site, column) for column in index_relation.columns])
    if _fill_breaks_ratio(site, operand):
        return [site.unknown("count")]
    if isinstance(operand, Split) and uneven_dims == [operand.dim] and operand.dim in numbers.operand_batching_dims:
        return [_gather_paired_dims(site, operand, index_relation, batch_dims)]
    if uneven_dims:
        return [site.unknown("mixes")]
    if not isinstance(index_relation, Same | Split):
        return [first_unknown([index_relation]) or not_linear(site, index_relation)]
    if not site.equal_ratios(index_relation.ratio, 1.0):
        return [site.unknown("count")]
    if isinstance(index_relation, Split):
        if not isinstance(operand, Same) or index_relation.dim == len(site.operand_shapes(1)[0]) - 1:
            return [site.unknown("mixes")]
        return [Split(batch_dims[index_relation.dim], index_relation.blocks, operand.ratio, index_relation.order)]
    if isinstance(operand, Split):
        return [operand.moved_to(numbers.offset_dims[slice_dims.index(operand.dim)])]
    if isinstance(operand, Same):
        return [Same(operand.ratio, operand.drawn or index_relation.drawn)]
    return [operand if isinstance(operand, Total) else site.unknown("shape")]


def _fill_breaks_ratio(site: Site, operand: Relation) -> bool:
    """Return whether an index out of bounds gives a number that does not have the operand's ratio."""
    if isinstance(operand, Same | Split) and operand.ratio == 1.0:
        return False
    fill_value = site.params.get("fill_value")
    has_fill_value = fill_value is not None and fill_value != 0
    return "FILL" in str(site.params.get("mode")) and (has_fill_value or not np.issubdtype(site.dtype, np.inexact))


def _resolve_column(site: Site, column: Relation) -> Relation:
    """Return the relation of a column of the indices; known numbers are replaced by the relation that follows from them."""
    if not isinstance(column, Known):
        return column
    whole_shape, piece_shape = site.operand_shapes(1)
    return resolve_numbers(OperandSite(site, shapes=((*whole_shape[:-1], 1), (*piece_shape[:-1], 1))), [column])[0]


def _gather_paired_dims(site: Site, operand: Split, indices: Relation, batch_dims: Sequence[int]) -> Relation:
    """Look up in each row by the indices of this row: the rows are a batching dim of the operand and of the indices."""
    numbers = site.params["dimension_numbers"]
    paired_dim = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
    same_rows = isinstance(indices, Same | Split) and site.equal_ratios(indices.ratio, 1.0)
    if isinstance(indices, Split):
        same_rows = same_rows and (paired_dim, *operand.place[1:]) == indices.place
    return operand.moved_to(batch_dims[paired_dim]) if same_rows else site.unknown("mixes")


def _gather_known_rows(site: Site, operand: Split, indices: Relation, batch_dims: Sequence[int]) -> Relation:
    """Look up entries of rows by row numbers that the trace knows."""
    numbers = site.params["dimension_numbers"]
    columns = indices.columns if isinstance(indices, Columns) else (indices,)
    if len(columns) != len(numbers.start_index_map) or operand.dim not in numbers.start_index_map:
        return site.unknown("mixes")
    row_column = columns[numbers.start_index_map.index(operand.dim)]
    other_columns = [
        _resolve_column(site, column) for i, column in enumerate(columns) if numbers.start_index_map[i] != operand.dim
    ]
    row_dim = _row_dim(site, row_column)
    if row_dim is None or not isinstance(row_column, Known):
        return site.unknown("mixes")
    sizes = site.operand_shapes(0)[0][operand.dim], site.operand_shapes(0)[1][operand.dim]
    rows = row_numbers(row_column.whole_values, sizes[0]), row_numbers(row_column.piece_values, sizes[1])
    if rows[0] is None or rows[1] is None:
        return site.unknown("mixes")
    taken = take_along_split(site, operand.moved_to(row_dim), rows[0], rows[1], sizes)
    if not isinstance(taken, Split):
        return taken
    for column in other_columns:  # the indices of the other dims must belong to the row that is looked up
        unscaled = isinstance(column, Same | Split) and site.equal_ratios(column.ratio, 1.0)
        if not unscaled or (isinstance(column, Split) and column.place != taken.place):
            return site.unknown("mixes")
    return taken.moved_to(batch_dims[row_dim])


def _row_dim(site: Site, column: Relation) -> int | None:
    """Return the only dim of the indices along which a column of row numbers varies; None if it is not the only one."""
    if not isinstance(column, Known):
        return None
    shapes = site.operand_shapes(1)
    dims = [
        dim
        for dim in range(column.whole_values.ndim - 1)
        if column.whole_values.shape[dim] > 1 or column.piece_values.shape[dim] > 1
    ]
    if len(dims) != 1 or any(
        values.shape[dims[0]] != shape[dims[0]]
        for values, shape in zip((column.whole_values, column.piece_values), shapes, strict=True)
    ):
        # a piece of one row has only the row number 0
        row_dims = [dim for dim in differing_dims(shapes) if column.whole_values.shape[dim] == shapes[0][dim]]
        if (
            len(row_dims) == 1
            and shapes[1][row_dims[0]] == 1
            and column.piece_values.size == 1
            and column.whole_values.size == shapes[0][row_dims[0]]
        ):
            return row_dims[0]
        return None
    return dims[0] if differing_dims(shapes) == (dims[0],) else None


ADDING = frozenset(["scatter-add", "scatter_add", "scatter_sub"])


def scatter(site: Site, relations: Sequence[Relation]) -> list[Relation]:
    """Write or add entries.

    The rule knows three cases:

    - The updates fill the whole dim of rows: each piece writes into its rows.
    - The index is the number of the row, or rows are a batching dim: each row writes into itself.
    - The operand is the same in all pieces, and rows are added to it: the result is a sum over rows.
    """
    operand, indices, updates = resolve_numbers(site, relations)
    if isinstance(relations[1], Columns):
        indices = join(site, [_resolve_column(site, column) for column in relations[1].columns])
    own_rows = _own_row_places(site, relations[1])
    if unknown := first_unknown([operand, updates] if own_rows else [operand, updates, indices]):
        return [unknown]
    if not own_rows and not (isinstance(indices, Same | Split) and site.equal_ratios(indices.ratio, 1.0)):
        return [site.unknown("mixes")]
    row_dims = differing_dims(site.operand_shapes(0))
    if len(row_dims) > 1 or len(differing_dims(site.operand_shapes(2))) > 1:
        return [site.unknown("shape")]
    zeros = [is_zero(relations[0]), is_zero(relations[2])]
    if not row_dims:
        return [_scatter_into_shared(site, operand, indices, updates, zeros)]
    written = _scatter_into_rows(
        site, row_dims[0], operand, own_rows or indices, updates, zeros, by_row_number=own_rows is not None
    )
    return [written]


def _batch_dims(site: Site) -> list[int]:
    """Return the dims of the updates that correspond to the dims of the indices, in order."""
    window_dims = site.params["dimension_numbers"].update_window_dims
    return [dim for dim in range(len(site.operand_shapes(2)[0])) if dim not in window_dims]


def _scatter_into_rows(
    site: Site,
    dim: int,
    operand: Relation,
    indices: Relation,
    updates: Relation,
    zeros: list[bool],
    *,
    by_row_number: bool,
) -> Relation:
    """Return the relation of a scatter into an operand that has rows along `dim`."""
    numbers, shapes = site.params["dimension_numbers"], site.operand_shapes(0)
    missing_dims = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window_dims = [operand_dim for operand_dim in range(len(shapes[0])) if operand_dim not in missing_dims]
    if by_row_number:
        assert isinstance(indices, Split)
        index_dim = indices.dim
        update_dim = _batch_dims(site)[index_dim]
    elif dim in numbers.operand_batching_dims:
        index_dim = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        update_dim = _batch_dims(site)[index_dim]
    elif dim in window_dims and dim not in numbers.scatter_dims_to_operand_dims:
        index_dim, update_dim = None, numbers.update_window_dims[window_dims.index(dim)]
        if any(shape[dim] != update[update_dim] for shape, update in zip(shapes, site.operand_shapes(2), strict=True)):
            return site.unknown("mixes")
    else:
        return site.unknown("mixes")
    if isinstance(indices, Split) and indices.dim != index_dim:
        return site.unknown("mixes")
    if any(differing_dim != update_dim for differing_dim in differing_dims(site.operand_shapes(2))):
        return site.unknown("shape")
    # express all of them along the dim of the result
    splits = [relation.moved_to(dim) for relation in (operand, indices, updates) if isinstance(relation, Split)]
    if len({split.place for split in splits}) > 1:
        return site.unknown("mixes")
    combined = _combine_entries(site, operand, updates, zeros)
    if not splits or not isinstance(combined, Same | Split):
        return combined if isinstance(combined, Same | Unknown) else site.unknown("mixes")
    return Split(dim, splits[0].blocks, combined.ratio, splits[0].order)


def _combine_entries(site: Site, operand: Relation, updates: Relation, zeros: list[bool]) -> Relation:
    """Return the relation of entries that come from the operand, from the updates, or from both, whatever their place."""
    entries = [
        Same(relation.ratio, isinstance(relation, Same) and relation.drawn)
        if isinstance(relation, Same | Split)
        else relation
        for relation in (operand, updates)
    ]
    if site.name not in ADDING and site.name != "scatter":  # scatter_mul, scatter_max, scatter_min
        unscaled = all(isinstance(relation, Same) and site.equal_ratios(relation.ratio, 1.0) for relation in entries)
        return Same(1.0) if unscaled else site.unknown("count")
    return unify(site, entries, zeros)


def _scatter_into_shared(
    site: Site, operand: Relation, indices: Relation, updates: Relation, zeros: list[bool]
) -> Relation:
    """Return the relation of a scatter into an operand without a dim of rows."""
    row_dims, batch_dims = differing_dims(site.operand_shapes(2)), _batch_dims(site)
    if isinstance(indices, Same) and not row_dims:
        return _combine_entries(site, operand, updates, zeros)
    # rows are added up, so it does not matter where their indices point
    if site.name not in ADDING or not row_dims or row_dims[0] not in batch_dims:
        return site.unknown("mixes")
    index_dim = batch_dims.index(row_dims[0])
    places = {(index_dim, *updates.place[1:])} if isinstance(updates, Split) else set()
    places |= {indices.place} if isinstance(indices, Split) else set()
    if len(places) != 1 or places.pop()[0] != index_dim or not isinstance(updates, Same | Split):
        return site.unknown("mixes")
    return unify(site, [operand, Total(updates.ratio, site.op)], [zeros[0], False])


def _own_row_places(site: Site, indices: Relation) -> Split | None:
    """Return the place of rows in the indices if each row is written into itself; None if this is not known."""
    numbers = site.params["dimension_numbers"]
    columns = indices.columns if isinstance(indices, Columns) else (indices,)
    row_dims = [dim for dim in differing_dims(site.operand_shapes(0)) if dim in numbers.scatter_dims_to_operand_dims]
    if len(columns) != len(numbers.scatter_dims_to_operand_dims) or len(row_dims) != 1:
        return None
    row_index = numbers.scatter_dims_to_operand_dims.index(row_dims[0])
    row_column, other_columns = (
        columns[row_index],
        [_resolve_column(site, column) for i, column in enumerate(columns) if i != row_index],
    )
    row_dim = _row_dim(site, row_column)
    if row_dim is None or not isinstance(row_column, Known):
        return None
    for values, shape in zip((row_column.whole_values, row_column.piece_values), site.operand_shapes(0), strict=True):
        if not np.array_equal(values.reshape(-1), np.arange(shape[row_dims[0]])):
            return None
    place = Split(row_dim).place
    for column in other_columns:
        if not isinstance(column, Same | Split) or not site.equal_ratios(column.ratio, 1.0):
            return None
        if isinstance(column, Split) and column.place != place:
            return None
    return Split(row_dim)


def dynamic_slice(site: Site, relations: Sequence[Relation]) -> list[Relation]:
    """Take a slice with a start that is an operand: it must take all entries along dims of rows."""
    operand, starts = resolve_numbers(site, relations)[0], resolve_numbers(site, relations)[1:]
    if unknown := first_unknown([operand, *starts]):
        return [unknown]
    if not all(isinstance(start, Same) and site.equal_ratios(start.ratio, 1.0) for start in starts):
        return [site.unknown("mixes")]
    shapes, result_shapes = site.operand_shapes(), site.result_shapes()
    for dim in range(len(shapes[0])):
        if shapes[0][dim] == shapes[1][dim]:
            if result_shapes[0][dim] != result_shapes[1][dim]:
                return [site.unknown("position")]
        elif not all(
            shape[dim] == result_shape[dim] for shape, result_shape in zip(shapes, result_shapes, strict=True)
        ):
            return [site.unknown("mixes")]
    return [operand if isinstance(operand, Same | Split | Total) else site.unknown("shape")]


def dynamic_update_slice(site: Site, relations: Sequence[Relation]) -> list[Relation]:
    """Write a slice with a start that is an operand: it must fill all entries along dims of rows."""
    operand, updates, *starts = resolve_numbers(site, relations)
    if unknown := first_unknown([operand, updates, *starts]):
        return [unknown]
    if not all(isinstance(start, Same) and site.equal_ratios(start.ratio, 1.0) for start in starts):
        return [site.unknown("mixes")]
    for sizes in zip(*site.operand_shapes(0), *site.operand_shapes(1), strict=True):
        whole_size, piece_size, whole_update_size, piece_update_size = sizes
        if (whole_size != piece_size or whole_update_size != piece_update_size) and (whole_size, piece_size) != (
            whole_update_size,
            piece_update_size,
        ):
            return [site.unknown("mixes")]
    return [unify(site, [operand, updates], [is_zero(relations[0]), is_zero(relations[1])])]
