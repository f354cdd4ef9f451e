"""Rules of gathers, scatters and dynamic slices, whose indices are operands."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardopt.separability._elementwise import (
    first_unknown,
    is_zero,
    join,
    not_linear,
    resolve_numbers,
    unify,
)
from shardopt.separability._moves import take_along_split
from shardopt.separability._numbers import relation_of_numbers, row_numbers
from shardopt.separability._relations import (
    Columns,
    EquationPair,
    Known,
    Relation,
    Same,
    Split,
    Total,
    Unrelated,
    differing_dims,
    is_exactly_same,
    is_unscaled,
    sizes_of_dim,
)


def gather(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Look up entries.

    The rule knows three cases:

    - The operand is the same in all pieces: rows of indices give rows of entries.
    - The operand has rows, and the indices are the same in all pieces: each piece looks up in its
      rows, if slices take the whole dim of rows.
    - The operand has rows, and the indices are known row numbers: `take_along_split` compares the
      numbers.
    """
    unknown = first_unknown(relations)
    if unknown:
        return [unknown]
    operand = resolve_numbers(site, relations)[0]
    indices = relations[1]
    numbers = site.params["dimension_numbers"]
    sizes = site.both_params("slice_sizes")
    shapes = site.operand_shapes(0)
    slice_dims = [
        dim
        for dim in range(len(shapes[0]))
        if dim not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    batch_dims = [
        dim for dim in range(len(site.result_shapes()[0])) if dim not in numbers.offset_dims
    ]
    if not isinstance(operand, Same | Split | Total):
        return [not_linear(site, operand)]
    # a dim that is indexed, or only partly taken, must have one size in the whole trace and in the
    # piece trace
    uneven_dims = [
        dim
        for dim in differing_dims(shapes)
        if dim not in slice_dims
        or any(size[dim] != shape[dim] for size, shape in zip(sizes, shapes, strict=True))
    ]
    if set(differing_dims(sizes)).difference(differing_dims(shapes)):
        return [site.unknown("position")]
    if _fill_breaks_ratio(site, operand):
        return [site.unknown("count")]
    if (
        isinstance(operand, Split)
        and uneven_dims == [operand.dim]
        and operand.dim in numbers.collapsed_slice_dims
    ):
        return [_gather_known_rows(site, operand, indices, batch_dims)]
    index_relation = _resolve_indices(site, relations)
    if len(uneven_dims) == 1 and uneven_dims[0] in numbers.operand_batching_dims:
        return [_gather_paired_dims(site, uneven_dims[0], operand, index_relation, batch_dims)]
    if uneven_dims:
        return [site.unknown("mixes")]
    if not is_unscaled(index_relation):
        return [first_unknown([index_relation]) or not_linear(site, index_relation)]
    if isinstance(index_relation, Split):
        if (
            not isinstance(operand, Same)
            or index_relation.dim == len(site.operand_shapes(1)[0]) - 1
        ):
            return [site.unknown("mixes")]
        return [
            Split(
                batch_dims[index_relation.dim],
                index_relation.blocks,
                operand.ratio,
            )
        ]
    if isinstance(operand, Split):
        return [operand.moved_to(numbers.offset_dims[slice_dims.index(operand.dim)])]
    return [operand]


def _fill_breaks_ratio(site: EquationPair, operand: Relation) -> bool:
    """Return whether an index out of bounds gives a number that does not have the operand's ratio."""
    if is_unscaled(operand):
        return False
    return "FILL" in str(site.params.get("mode")) and (
        bool(site.params.get("fill_value")) or not np.issubdtype(site.dtype, np.inexact)
    )


def _resolve_column(site: EquationPair, column: Relation) -> Relation:
    """Return the relation of a column of the indices.

    Known numbers are replaced by the relation that follows from them.
    """
    if not isinstance(column, Known):
        return column
    whole_shape, piece_shape = site.operand_shapes(1)
    shapes = (*whole_shape[:-1], 1), (*piece_shape[:-1], 1)
    return relation_of_numbers(column, shapes, site.num_pieces, site.operand_dtype(1))


def _resolve_indices(site: EquationPair, relations: Sequence[Relation]) -> Relation:
    """Return one relation for all columns of the indices."""
    if isinstance(relations[1], Columns):
        return join(site, [_resolve_column(site, column) for column in relations[1].columns])
    return resolve_numbers(site, relations)[1]


def _gather_paired_dims(
    site: EquationPair,
    operand_dim: int,
    operand: Same | Split | Total,
    indices: Relation,
    batch_dims: Sequence[int],
) -> Relation:
    """Look up in each row by the indices of this row: the rows are a batching dim of the operand
    and of the indices.
    """
    numbers = site.params["dimension_numbers"]
    dim = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand_dim)]
    if isinstance(operand, Same) and isinstance(indices, Split):  # equal entries in each row
        operand = dataclasses.replace(indices, dim=operand_dim, ratio=operand.ratio)
    if not isinstance(operand, Split) or operand.dim != operand_dim:
        return site.unknown("mixes")
    same_rows = _belong_to_rows([indices], (dim, *operand.place[1:]))
    return operand.moved_to(batch_dims[dim]) if same_rows else site.unknown("mixes")


def _belong_to_rows(indices: Sequence[Relation], place: tuple[Any, ...]) -> bool:
    """Return whether indices are the same in all pieces, or split like rows at a place.

    Their ratio must be 1.
    """
    return all(
        is_unscaled(index) and (isinstance(index, Same) or index.place == place)
        for index in indices
    )


def _gather_known_rows(
    site: EquationPair, operand: Split, indices: Relation, batch_dims: Sequence[int]
) -> Relation:
    """Look up entries of rows by row numbers that the trace knows."""
    row_indices = _known_row_indices(
        site, indices, site.params["dimension_numbers"].start_index_map, operand.dim
    )
    if row_indices is None:
        return site.unknown("mixes")
    column, row_dim, other_columns = row_indices
    sizes = sizes_of_dim(site.operand_shapes(0), operand.dim)
    rows = row_numbers(column.whole_values, sizes[0]), row_numbers(column.piece_values, sizes[1])
    if rows[0] is None or rows[1] is None:
        return site.unknown("mixes")
    taken = take_along_split(site, operand.moved_to(row_dim), rows[0], rows[1], sizes)
    if not isinstance(taken, Split):
        return taken
    # the indices of the other dims must belong to the row that is looked up
    same_rows = _belong_to_rows(other_columns, taken.place)
    return taken.moved_to(batch_dims[row_dim]) if same_rows else site.unknown("mixes")


def _known_row_indices(
    site: EquationPair, indices: Relation, index_map: Sequence[int], operand_dim: int
) -> tuple[Known, int, list[Relation]] | None:
    """Return the column of the indices with known row numbers, its dim of rows, and the other
    columns; None if not known.

    Args:
      site: the equation.
      indices: the relation of the indices.
      index_map: the operand's dim for each column of the indices.
      operand_dim: the operand's dim of rows.
    """
    columns = indices.columns if isinstance(indices, Columns) else (indices,)
    if len(columns) != len(index_map) or operand_dim not in index_map:
        return None
    position = index_map.index(operand_dim)
    column = columns[position]
    if not isinstance(column, Known):
        return None
    row_dim = _row_dim(site, column)
    if row_dim is None:
        return None
    return (
        column,
        row_dim,
        [_resolve_column(site, other) for i, other in enumerate(columns) if i != position],
    )


def _row_dim(site: EquationPair, column: Known) -> int | None:
    """Return the only dim of the indices along which a column of row numbers varies.

    None if it is not the only one.
    """
    shapes = site.operand_shapes(1)
    dims = differing_dims(shapes)
    if len(dims) != 1:
        return None
    varies_only_along_rows = all(
        values.size == values.shape[dims[0]] == shape[dims[0]]
        for values, shape in zip((column.whole_values, column.piece_values), shapes, strict=True)
    )
    return dims[0] if varies_only_along_rows else None


def scatter(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Write or add entries.

    The rule knows three cases:

    - The updates fill the whole dim of rows: each piece writes into its rows.
    - The index is the number of the row, or rows are a batching dim: each row writes into itself.
    - The operand is the same in all pieces, and rows are added to it: the result is a sum over
      rows.
    """
    operand, _, updates = resolve_numbers(site, relations)
    indices = _resolve_indices(site, relations)
    own_rows = _own_row_place(site, relations[1])
    unknown = first_unknown([operand, updates] if own_rows else [operand, updates, indices])
    if unknown:
        return [unknown]
    if not own_rows and not is_unscaled(indices):
        return [site.unknown("mixes")]
    row_dims = differing_dims(site.operand_shapes(0))
    if len(row_dims) > 1 or len(differing_dims(site.operand_shapes(2))) > 1:
        return [site.unknown("shape")]
    zeros = [is_zero(relations[0]), is_zero(relations[2])]
    if not row_dims:
        return [_scatter_into_shared(site, operand, indices, updates, zeros)]
    return [
        _scatter_into_rows(
            site, row_dims[0], operand, own_rows or indices, updates, zeros, own_rows
        )
    ]


def _batch_dims(site: EquationPair) -> list[int]:
    """Return the dims of the updates that correspond to the dims of the indices, in order."""
    window_dims = site.params["dimension_numbers"].update_window_dims
    return [dim for dim in range(len(site.operand_shapes(2)[0])) if dim not in window_dims]


def _scatter_into_rows(
    site: EquationPair,
    dim: int,
    operand: Relation,
    indices: Relation,
    updates: Relation,
    zeros: list[bool],
    own_rows: Split | None,
) -> Relation:
    """Return the relation of a scatter into an operand that has rows along `dim`."""
    numbers = site.params["dimension_numbers"]
    shapes = site.operand_shapes(0)
    missing_dims = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window_dims = [
        operand_dim for operand_dim in range(len(shapes[0])) if operand_dim not in missing_dims
    ]
    if own_rows is not None:
        index_dim = own_rows.dim
        update_dim = _batch_dims(site)[index_dim]
    elif dim in numbers.operand_batching_dims:
        index_dim = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        update_dim = _batch_dims(site)[index_dim]
    elif dim in window_dims and dim not in numbers.scatter_dims_to_operand_dims:
        index_dim = None
        update_dim = numbers.update_window_dims[window_dims.index(dim)]
        if any(
            shape[dim] != update[update_dim]
            for shape, update in zip(shapes, site.operand_shapes(2), strict=True)
        ):
            return site.unknown("mixes")
    else:
        return site.unknown("mixes")
    if isinstance(indices, Split) and indices.dim != index_dim:
        return site.unknown("mixes")
    if any(differing_dim != update_dim for differing_dim in differing_dims(site.operand_shapes(2))):
        return site.unknown("shape")
    # express all of them along the dim of the result
    splits = [
        relation.moved_to(dim)
        for relation in (operand, indices, updates)
        if isinstance(relation, Split)
    ]
    if len({split.place for split in splits}) > 1:
        return site.unknown("mixes")
    combined = _combine_entries(site, operand, updates, zeros)
    if not splits or not isinstance(combined, Same | Split):
        return combined if isinstance(combined, Same | Unrelated) else site.unknown("mixes")
    return Split(dim, splits[0].blocks, combined.ratio)


def _combine_entries(
    site: EquationPair, operand: Relation, updates: Relation, zeros: list[bool]
) -> Relation:
    """Return the relation of entries that come from the operand, from the updates, or from both,
    whatever their place.
    """
    entries = [
        (Same(relation.ratio) if isinstance(relation, Split) else relation)
        for relation in (operand, updates)
    ]
    return unify(site, entries, zeros)


def _scatter_into_shared(
    site: EquationPair, operand: Relation, indices: Relation, updates: Relation, zeros: list[bool]
) -> Relation:
    """Return the relation of a scatter into an operand without a dim of rows."""
    row_dims = differing_dims(site.operand_shapes(2))
    batch_dims = _batch_dims(site)
    if isinstance(indices, Same) and not row_dims:
        return _combine_entries(site, operand, updates, zeros)
    # rows are added up, so it does not matter where their indices point
    if site.name != "scatter-add" or not row_dims or row_dims[0] not in batch_dims:
        return site.unknown("mixes")
    index_dim = batch_dims.index(row_dims[0])
    places = {(index_dim, *updates.place[1:])} if isinstance(updates, Split) else set()
    places |= {indices.place} if isinstance(indices, Split) else set()
    if len(places) != 1 or places.pop()[0] != index_dim or not isinstance(updates, Same | Split):
        return site.unknown("mixes")
    return unify(site, [operand, Total(updates.ratio, site.op)], [zeros[0], False])


def _own_row_place(site: EquationPair, indices: Relation) -> Split | None:
    """Return the place of rows in the indices if each row is written into itself.

    None if this is not known.
    """
    index_map = site.params["dimension_numbers"].scatter_dims_to_operand_dims
    shapes = site.operand_shapes(0)
    # an update with a dim of rows would write into the next rows too
    inserted_dims = site.params["dimension_numbers"].inserted_window_dims
    row_dims = [dim for dim in differing_dims(shapes) if dim in inserted_dims]
    row_indices = (
        _known_row_indices(site, indices, index_map, row_dims[0]) if len(row_dims) == 1 else None
    )
    if row_indices is None:
        return None
    column, row_dim, other_columns = row_indices
    sizes = sizes_of_dim(shapes, row_dims[0])
    place = Split(row_dim)
    counts_rows = all(
        np.array_equal(values.reshape(-1), np.arange(size))
        for values, size in zip((column.whole_values, column.piece_values), sizes, strict=True)
    )
    return place if counts_rows and _belong_to_rows(other_columns, place.place) else None


def dynamic_slice(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Take or write a slice with a start that is an operand.

    Along dims of rows it must have all entries.
    """
    num_arrays = 1
    slice_shapes = site.result_shapes()
    if site.name == "dynamic_update_slice":
        num_arrays = 2
        slice_shapes = site.operand_shapes(1)
    operands = resolve_numbers(site, relations)
    unknown = first_unknown(operands)
    if unknown:
        return [unknown]
    if not all(map(is_exactly_same, operands[num_arrays:])):
        return [site.unknown("mixes")]
    for whole_size, piece_size, *slice_sizes in zip(
        *site.operand_shapes(), *slice_shapes, strict=True
    ):
        has_rows = whole_size != piece_size or slice_sizes[0] != slice_sizes[1]
        if has_rows and slice_sizes != [whole_size, piece_size]:
            return [site.unknown("position")]
    return [join(site, relations[:num_arrays])]
