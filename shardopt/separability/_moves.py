"""Rules of equations that move entries: reshape, transpose, slice, concatenate and similar ones."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from shardopt.separability._elementwise import (
    first_unknown,
    is_zero,
    join,
    not_linear,
    resolve_numbers,
    unknown_results,
)
from shardopt.separability._relations import (
    Columns,
    EquationPair,
    Extreme,
    Known,
    Relation,
    Same,
    Shapes,
    Split,
    Total,
    Unrelated,
    differing_dims,
    dim_after_removal,
    growth,
    sizes_of_dim,
)


def as_split(site: EquationPair, relation: Relation, i: int = 0) -> Relation:
    """Return `Split` for equal entries along a dim that is n times as long in the whole trace.

    Else the same relation.
    """
    dims = differing_dims(site.operand_shapes(i))
    if (
        isinstance(relation, Same)
        and len(dims) == 1
        and growth(site.operand_shapes(i), dims) == site.num_pieces
    ):
        return Split(dims[0], 1, relation.ratio, relation.drawn)
    return relation


def reshape(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Arrange the entries in other dims, in the same order. A parameter may transpose them first.

    The order of entries is [outer, block, piece, j, inner] in the whole trace and [outer, block, j,
    inner] in the piece trace. If a result dim holds the pieces and some of the outer entries, these
    are its blocks.
    """
    relation = relations[0]
    old_shapes = site.operand_shapes()
    new_shapes = site.result_shapes()
    dims_order = site.params["dimensions"] or range(len(old_shapes[0]))
    old_shapes = (
        tuple(old_shapes[0][dim] for dim in dims_order),
        tuple(old_shapes[1][dim] for dim in dims_order),
    )
    if isinstance(relation, Same | Total | Extreme) and _keeps_differing_dims(
        old_shapes, new_shapes
    ):
        return [relation]
    relation = as_split(site, relation)
    if isinstance(relation, Split):
        relation = relation.moved_to(list(dims_order).index(relation.dim))
    if not isinstance(relation, Split):
        return [site.unknown("position" if isinstance(relation, Same) else "shape")]
    if differing_dims(old_shapes) != (relation.dim,):
        return [site.unknown("shape")]
    dims = differing_dims(new_shapes)
    if len(dims) != 1:
        return [site.unknown("shape")]
    (dim,) = dims
    outer_blocks = math.prod(old_shapes[1][: relation.dim]) * relation.blocks
    outer_entries = math.prod(new_shapes[1][:dim])
    if (
        outer_entries == 0
        or outer_blocks % outer_entries
        or new_shapes[0][dim] != new_shapes[1][dim] * site.num_pieces
    ):
        return [site.unknown("shape")]
    blocks = outer_blocks // outer_entries
    if new_shapes[1][dim] % blocks:
        return [site.unknown("shape")]
    return [Split(dim, blocks, relation.ratio)]


def _keeps_differing_dims(old_shapes: Shapes, new_shapes: Shapes) -> bool:
    """Return whether dims of equal entries stay separate dims: with the same size, and as many
    entries before them.
    """

    def dims(shapes: Shapes) -> list[tuple[int, int, int]]:
        return [
            (math.prod(shapes[1][:dim]), shapes[0][dim], shapes[1][dim])
            for dim in differing_dims(shapes)
        ]

    return dims(old_shapes) == dims(new_shapes)


def broadcast(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Repeat entries along new dims."""
    relation = relations[0]
    dims = site.params["broadcast_dimensions"]
    if isinstance(relation, Split):
        dim = dims[relation.dim]
        same_sizes = all(
            new_shape[dim] == old_shape[relation.dim]
            for new_shape, old_shape in zip(
                site.result_shapes(), site.operand_shapes(), strict=True
            )
        )
        return [relation.moved_to(dim) if same_sizes else site.unknown("shape")]
    return [relation]


def moving(
    result_dim: Callable[[EquationPair, int], int],
) -> Callable[[EquationPair, Sequence[Relation]], list[Relation]]:
    """Return the rule of an equation that reorders, removes or adds dims: dim d of the operand is
    dim `result_dim(site, d)`.
    """

    def rule(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
        relation = relations[0]
        return [
            (
                relation.moved_to(result_dim(site, relation.dim))
                if isinstance(relation, Split)
                else relation
            )
        ]

    return rule


transpose = moving(lambda site, dim: list(site.params["permutation"]).index(dim))
squeeze = moving(lambda site, dim: dim_after_removal(dim, site.params["dimensions"]))
expand_dims = moving(
    lambda site, dim: [
        i for i in range(len(site.result_shapes()[0])) if i not in site.params["dimensions"]
    ][dim]
)


def take_along_split(
    site: EquationPair,
    relation: Split,
    whole_entries: np.ndarray,
    piece_entries: np.ndarray,
    sizes: tuple[int, int],
) -> Relation:
    """Return the relation of entries that are taken along the split dim, at known indices.

    If piece i takes its entry [block, j], the whole batch must take its entry [block, i, j] at this
    place. This is compared index by index.

    Args:
      site: the equation.
      relation: the relation of the operand.
      whole_entries: the index along the split dim of each entry of the result, in the whole trace.
      piece_entries: the same in the piece trace.
      sizes: the sizes of the operand's split dim in the whole trace and in the piece trace.
    """
    num_pieces = site.num_pieces
    block_size = sizes[1] // relation.blocks
    if whole_entries.size != piece_entries.size * num_pieces or piece_entries.size == 0:
        return site.unknown("mixes")
    block, j = np.divmod(piece_entries, block_size)
    for blocks in (
        relation.blocks,
        *(count for count in range(1, 2 * relation.blocks + 1) if count != relation.blocks),
    ):
        if piece_entries.size % blocks:
            continue
        per_piece = np.stack(
            [block * num_pieces * block_size + i * block_size + j for i in range(num_pieces)]
        ).reshape(num_pieces, blocks, -1)
        if np.array_equal(per_piece.swapaxes(0, 1).reshape(-1), whole_entries):
            return Split(relation.dim, blocks, relation.ratio)
    return site.unknown("mixes")


def slice_entries(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Take a slice with fixed bounds.

    Dims that are not split must have the same bounds in both traces. Along dims of equal entries
    any slice is right.
    """
    relation = relations[0]
    shapes = site.operand_shapes()
    ranges = [
        [
            range(*bounds)
            for bounds in zip(
                params["start_indices"],
                params["limit_indices"],
                params["strides"] or (1,) * len(shapes[0]),
                strict=True,
            )
        ]
        for params in (site.whole_eqn.params, site.piece_eqn.params)
    ]
    split_dim = relation.dim if isinstance(relation, Split) else None
    uneven_dims = [
        dim
        for dim in range(len(shapes[0]))
        if dim != split_dim and ranges[0][dim] != ranges[1][dim]
    ]
    # another part of a value that is the same in all pieces: `table[:rows]`
    if any(shapes[0][dim] == shapes[1][dim] for dim in uneven_dims):
        return [site.unknown("position")]
    if isinstance(relation, Split):
        whole_entries, piece_entries = (
            np.asarray(dim_ranges[relation.dim]) for dim_ranges in ranges
        )
        sizes = sizes_of_dim(shapes, relation.dim)
        return [take_along_split(site, relation, whole_entries, piece_entries, sizes)]
    if isinstance(relation, Columns):
        whole_dims = [[*map(range, shape[:-1])] for shape in shapes]
        if [taken[:-1] for taken in ranges] != whole_dims or ranges[0][-1] != ranges[1][-1]:
            return [site.unknown("shape")]
        return [Columns(tuple(relation.columns[i] for i in ranges[0][-1]))]
    return [relation]


def rev(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Reverse the entries along dims, but not along the dim of rows."""
    relation = relations[0]
    reverses_rows = isinstance(relation, Split) and relation.dim in site.params["dimensions"]
    return [site.unknown("position") if reverses_rows else relation]


def tile(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Repeat all entries of dims, one copy after the other, but not along the dim of rows."""
    relation = relations[0]
    repeats = site.both_params("reps")
    repeats_rows = isinstance(relation, Split) and repeats[0][relation.dim] != 1
    uneven = any(
        sizes_of_dim(site.operand_shapes(), dim) != (1, 1) for dim in differing_dims(repeats)
    )
    return [site.unknown("position") if repeats_rows or uneven else relation]


def pad(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Put a number around the entries, but not along dims of rows."""
    if any(
        any(site.params["padding_config"][dim])
        for shapes in (site.operand_shapes(), site.result_shapes())
        for dim in differing_dims(shapes)
    ):
        return unknown_results(site, relations)
    return [join(site, relations)]


def concatenate(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Join operands along a dim.

    Along the split dim, operands with blocks of one size give the result more blocks. Along other
    dims the entries of the operands are only put together, so a relation of all operands is a
    relation of the result.
    """
    dim = site.params["dimension"]
    if dim not in differing_dims(site.result_shapes()):
        if dim in site.differing_operand_dims:
            return unknown_results(site, relations, "position")
        joined = join(site, relations)
        if (
            isinstance(joined, Unrelated)
            and dim == len(site.result_shapes()[0]) - 1
            and (columns := _columns(site, relations))
        ):
            return [columns]
        return [joined]
    operands = resolve_numbers(site, relations)
    unknown = first_unknown(operands)
    if unknown:
        return [unknown]
    parts = [
        operand if isinstance(operand, Split) else as_split(site, operand, i)
        for i, operand in enumerate(operands)
    ]
    blocks = 0
    block_size = None
    for i, part in enumerate(parts):
        if not isinstance(part, Split) or part.dim != dim:
            return [not_linear(site, part)]
        length = site.operand_shapes(i)[1][dim]
        if block_size is None:
            block_size = length // part.blocks
        if part.blocks * block_size != length and not (
            isinstance(operands[i], Same) and length % block_size == 0
        ):
            return [site.unknown("mixes")]
        blocks += length // block_size
    ratios = [
        part.ratio
        for i, part in enumerate(parts)
        if isinstance(part, Split) and not is_zero(relations[i])
    ]
    if len(set(ratios)) > 1:
        return [site.unknown("count")]
    return [Split(dim, blocks, ratios[0] if ratios else Fraction(1))]


def _columns(site: EquationPair, relations: Sequence[Relation]) -> Columns | None:
    """Return the relation of each column if the operands are indices of different dims.

    None if a relation is unknown.
    """
    columns: list[Relation] = []
    last_dim = len(site.result_shapes()[0]) - 1
    for i, relation in enumerate(relations):
        width = site.operand_shapes(i)[0][last_dim]
        if isinstance(relation, Columns):
            columns += relation.columns
        elif isinstance(relation, Known) and width > 1:
            for column in range(width):
                whole_values, piece_values = (
                    values.take([min(column, values.shape[last_dim] - 1)], last_dim)
                    for values in (relation.whole_values, relation.piece_values)
                )
                columns.append(Known(whole_values, piece_values, relation.op))
        elif isinstance(relation, Known | Same | Split):
            columns += [relation] * width
        else:
            return None
    return Columns(tuple(columns))


def split(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Cut a dim into slices."""
    relation = relations[0]
    dim = site.params["axis"]
    part_sizes = site.both_params("sizes")
    if isinstance(relation, Split) and relation.dim == dim:
        whole_bounds, piece_bounds = (np.cumsum((0, *lengths)) for lengths in part_sizes)
        sizes = sizes_of_dim(site.operand_shapes(), dim)
        return [
            take_along_split(
                site,
                relation,
                np.arange(whole_bounds[i], whole_bounds[i + 1]),
                np.arange(piece_bounds[i], piece_bounds[i + 1]),
                sizes,
            )
            for i in range(site.num_results)
        ]
    if part_sizes[0] != part_sizes[1] and dim not in differing_dims(site.operand_shapes()):
        return unknown_results(site, relations, "position")
    return [relation] * site.num_results


def unstack(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Cut a dim into its entries, which must not be the dim of rows, as `q, k, v = x` does from jax
    0.12 on.
    """
    relation = relations[0]
    dim = site.params["axis"]
    if dim in differing_dims(site.operand_shapes()):
        return unknown_results(site, relations)
    if isinstance(relation, Split):
        relation = relation.moved_to(dim_after_removal(relation.dim, [dim]))
    return [relation] * site.num_results


def stack(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Join operands along a new dim."""
    joined = join(site, relations)
    dim = site.params["axis"]
    if isinstance(joined, Split):
        joined = joined.moved_to(joined.dim + (joined.dim >= dim))
    return [joined]
