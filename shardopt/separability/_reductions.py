"""Rules of reductions and of other equations along dims: sums, extremes, sorts, windows, matrix
products, convolutions.
"""

from collections.abc import Callable, Sequence

from shardopt.separability._elementwise import join, not_linear
from shardopt.separability._relations import (
    EquationPair,
    Extreme,
    Relation,
    Same,
    Split,
    Total,
    Unrelated,
    differing_dims,
    dim_after_removal,
    growth,
    is_unscaled,
    scaled,
)

Rule = Callable[[EquationPair, Sequence[Relation]], list[Relation]]


def reduce_sum(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Add entries up.

    Over the split dim, sum_W = r (sum_P0 + ... + sum_Pn-1). Over a dim of equal entries, the sum is
    an entry times the size.
    """
    relation, dims = relations[0], site.params["axes"]
    equal_dims = [
        dim
        for dim in differing_dims(site.operand_shapes())
        if dim in dims and not (isinstance(relation, Split) and dim == relation.dim)
    ]
    factor = growth(site.operand_shapes(), equal_dims)
    if isinstance(relation, Split) and relation.dim in dims:
        return [Total(relation.ratio * factor, site.op)]
    if isinstance(relation, Split):
        return [
            Split(
                dim_after_removal(relation.dim, dims),
                relation.blocks,
                relation.ratio * factor,
            )
        ]
    assert isinstance(relation, Same | Total)
    return [scaled(relation, factor)]


EXTREMES = {"reduce_max": "max", "reduce_or": "max", "reduce_min": "min", "reduce_and": "min"}


def reduce_extreme(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Take the largest or smallest entry.

    Over the split dim, the extreme of the whole batch is the extreme of the pieces' extremes.
    """
    relation, dims = relations[0], site.params["axes"]
    if site.name in ("reduce_or", "reduce_and") and site.dtype != bool:  # of bits
        return reduce_other(site, relations)
    if isinstance(relation, Extreme) and EXTREMES[site.name] == relation.kind:
        return [relation]
    if isinstance(relation, Total | Extreme):
        return [not_linear(site, relation)]
    assert isinstance(relation, Same | Split)
    if not relation.ratio > 0:
        return [site.unknown("count")]
    if isinstance(relation, Split) and relation.dim in dims:
        return [
            (
                Extreme(EXTREMES[site.name], site.op)
                if relation.ratio == 1
                else site.unknown("count")
            )
        ]
    if isinstance(relation, Split):
        return [relation.moved_to(dim_after_removal(relation.dim, dims))]
    return [relation]


def reduce_other(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Reduce dims that have one size in both traces, with any function."""
    dims = site.params["axes"]
    if not site.differing_operand_dims.isdisjoint(dims):
        return [_mixed(site, relations)] * site.num_results
    return _row_by_row(
        site,
        relations,
        lambda split: Split(dim_after_removal(split.dim, dims), split.blocks),
    )


def rule_along(param: str, linear: bool = False) -> Rule:
    """Return the rule of a primitive that works along a dim, which must have one size in both
    traces.

    Args:
      param: the parameter that holds the dim, or a tuple of dims.
      linear: whether the primitive is linear.
    """

    def rule(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
        relation, dims = relations[0], site.params[param]
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        if not site.differing_operand_dims.isdisjoint(dims):
            return [_mixed(site, relations)] * site.num_results
        if linear and isinstance(relation, Same | Split | Total):
            return [relation]
        return _row_by_row(site, relations)

    return rule


def top_k(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Take the largest entries along a dim, which must have one size in both traces."""
    dim = site.params.get("axis", -1) % len(site.operand_shapes()[0])
    if dim in differing_dims(site.operand_shapes()):
        return [_mixed(site, relations)] * site.num_results
    return _row_by_row(site, relations)


def _row_by_row(
    site: EquationPair,
    relations: Sequence[Relation],
    result_of_split: Callable[[Split], Relation] = lambda split: split,
) -> list[Relation]:
    """Return the results of an equation that applies one function to each row.

    Operands must have ratio 1 and one place.

    Args:
      site: the equation.
      relations: the relations of the operands.
      result_of_split: the relation of a result for the common `Split` of the operands; by default
        the same.
    """
    for relation in relations:
        if isinstance(relation, Total):
            return [not_linear(site, relation)] * site.num_results
    if not all(map(is_unscaled, relations)):
        return [site.unknown("count")] * site.num_results
    joined = join(site, relations)
    return [result_of_split(joined) if isinstance(joined, Split) else joined] * site.num_results


def _mixed(site: EquationPair, relations: Sequence[Relation]) -> Unrelated:
    """Return `Unrelated` for an equation along dims of rows.

    If an operand is a total, the message names the sum.
    """
    total = next((relation for relation in relations if isinstance(relation, Total)), None)
    return site.unknown("mixes") if total is None else not_linear(site, total)


def window(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Reduce sliding windows, which must hold one entry along dims of rows."""
    params, dims = (
        site.params,
        {dim for i in range(len(relations)) for dim in differing_dims(site.operand_shapes(i))},
    )

    def has_own_windows(dim: int) -> bool:
        dilations = [
            params[name][dim] for name in ("base_dilation", "window_dilation") if params.get(name)
        ]
        sizes = [params["window_dimensions"][dim], params["window_strides"][dim], *dilations]
        return all(size == 1 for size in sizes) and tuple(params["padding"][dim]) == (0, 0)

    if not all(map(has_own_windows, dims)):
        return [site.unknown("mixes")] * site.num_results
    if site.name == "reduce_window_sum" and isinstance(relations[0], Same | Split | Total):
        return [relations[0]]
    return _row_by_row(site, relations)


def batched(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Decompose matrices.

    The last two dims are the dims of a matrix, all other dims are batch dims.
    """
    min_ndim = min(len(site.operand_shapes(i)[0]) for i in range(len(relations)))
    result_ndims = [len(site.result_shapes(i)[0]) for i in range(site.num_results)]
    num_matrix_dims = 1 if site.name == "lu_pivots_to_permutation" else 2
    if any(
        dim >= len(shapes[0]) - num_matrix_dims
        for i in range(len(relations))
        for shapes in [site.operand_shapes(i)]
        for dim in differing_dims(shapes)
    ):
        return [site.unknown("mixes")] * site.num_results
    if any(
        isinstance(relation, Split) and relation.dim >= min(min_ndim, *result_ndims)
        for relation in relations
    ):
        return [site.unknown("shape")] * site.num_results
    return _row_by_row(site, relations)


def triangular_solve(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Solve triangular systems. Each column of the right side has a solution, which is linear in it."""
    matrix, right_side = relations
    ndim = len(site.operand_shapes()[0])
    mixes = any(dim >= ndim - 2 for dim in differing_dims(site.operand_shapes()))
    if not mixes and matrix == Same():
        return [right_side]
    if not isinstance(right_side, Same | Split):
        return batched(site, relations)
    (solution,) = batched(site, [matrix, scaled(right_side, 1 / right_side.ratio)])
    is_solved = isinstance(solution, Same | Split)
    return [scaled(solution, right_side.ratio) if is_solved else solution]


def fft(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Transform the last dims, which must not be dims of rows. A Fourier transform is linear."""
    shapes = site.operand_shapes()
    first_transformed = len(shapes[0]) - len(site.params["fft_lengths"])
    mixes = any(dim >= first_transformed for dim in differing_dims(shapes))
    return [site.unknown("mixes") if mixes else relations[0]]


def dot_general(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Multiply two arrays and add up over the contracted dims.

    If the split dim is contracted, the result is a sum over rows: both operands are split, or the
    other operand has equal entries along this dim. If the split dim is a batch dim, or a dim of one
    operand only, the result is split.
    """
    contract_dims, batch_dims = site.params["dimension_numbers"]
    left_relation, right_relation = relations
    if isinstance(left_relation, Total) or isinstance(right_relation, Total):
        total, factor_relation = (
            (left_relation, right_relation)
            if isinstance(left_relation, Total)
            else (right_relation, left_relation)
        )
        if not isinstance(factor_relation, Same):
            return [not_linear(site, total)]
    assert isinstance(left_relation, Same | Split | Total)
    assert isinstance(right_relation, Same | Split | Total)
    splits = {
        side: relation for side, relation in enumerate(relations) if isinstance(relation, Split)
    }
    uneven_contract_dims = [
        dim for dim in differing_dims(site.operand_shapes()) if dim in contract_dims[0]
    ]
    ratio = left_relation.ratio * right_relation.ratio
    if not splits:
        operand = left_relation if isinstance(left_relation, Total) else right_relation
        factor = ratio / operand.ratio
        return [scaled(operand, factor * growth(site.operand_shapes(), uneven_contract_dims))]
    places = set()
    for side, relation in splits.items():
        if relation.dim in contract_dims[side]:
            places.add(("sum", contract_dims[side].index(relation.dim), *relation.place[1:]))
        elif relation.dim in batch_dims[side]:
            places.add(("batch", batch_dims[side].index(relation.dim), *relation.place[1:]))
        else:
            places.add(("free", side, *relation.place[1:]))
    if len(places) > 1:
        return [site.unknown("mixes")]
    kind, index = places.pop()[:2]
    relation = next(iter(splits.values()))
    if kind == "sum":
        equal_dims = [dim for dim in uneven_contract_dims if dim != contract_dims[0][index]]
        return [Total(ratio * growth(site.operand_shapes(), equal_dims), site.op)]
    ratio *= growth(site.operand_shapes(), uneven_contract_dims)
    if kind == "batch":
        return [Split(index, relation.blocks, ratio)]
    free_dims = [
        [
            dim
            for dim in range(len(site.operand_shapes(side)[0]))
            if dim not in (*contract_dims[side], *batch_dims[side])
        ]
        for side in (0, 1)
    ]
    result_dim = (
        len(batch_dims[0])
        + (len(free_dims[0]) if index else 0)
        + free_dims[index].index(relation.dim)
    )
    return [Split(result_dim, relation.blocks, ratio)]


def convolution(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Convolve images with a kernel.

    Rows may be the batch dim of the images. Or they are the groups of features, of a convolution
    with one kernel for each row.
    """
    numbers, groups = site.params["dimension_numbers"], site.both_params("feature_group_count")
    image, kernel = relations
    uneven_dims = [differing_dims(site.operand_shapes(i)) for i in (0, 1)]
    if isinstance(image, Total | Split) and isinstance(kernel, Total | Split):
        rows_are_groups = (
            uneven_dims == [(numbers.lhs_spec[1],), (numbers.rhs_spec[0],)]
            and groups[0] == groups[1] * site.num_pieces
            and site.params["batch_group_count"] == 1
            and image == Split(numbers.lhs_spec[1])
            and kernel == Split(numbers.rhs_spec[0])
        )
        return [Split(numbers.out_spec[1]) if rows_are_groups else site.unknown("mixes")]
    if (
        uneven_dims not in ([(), ()], [(numbers.lhs_spec[0],), ()])
        or not isinstance(kernel, Same)
        or site.params["batch_group_count"] != 1
        or groups[0] != groups[1]
    ):
        return [site.unknown("mixes")]
    if isinstance(image, Split):
        image = image.moved_to(numbers.out_spec[0])
    assert isinstance(image, Same | Split | Total)
    return [scaled(image, kernel.ratio)]
