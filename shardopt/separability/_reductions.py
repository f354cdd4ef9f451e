"""Rules of reductions and of other equations along dims: sums, extremes, sorts, windows, matrix
products, convolutions.
"""

from collections.abc import Callable, Sequence

from shardopt.separability._elementwise import join, not_linear, unknown_results
from shardopt.separability._relations import (
    EquationPair,
    Extreme,
    Relation,
    Same,
    Split,
    Total,
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
    relation = relations[0]
    dims = site.params["axes"]
    equal_dims = [
        dim
        for dim in differing_dims(site.operand_shapes())
        if dim in dims and not (isinstance(relation, Split) and dim == relation.dim)
    ]
    assert isinstance(relation, Same | Split | Total)
    added = scaled(relation, growth(site.operand_shapes(), equal_dims))
    if isinstance(added, Split) and added.dim in dims:
        return [Total(added.ratio, site.op)]
    if isinstance(added, Split):
        return [added.moved_to(dim_after_removal(added.dim, dims))]
    return [added]


EXTREMES = {"reduce_max": "max", "reduce_or": "max", "reduce_min": "min", "reduce_and": "min"}


def reduce_extreme(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Take the largest or smallest entry.

    Over the split dim, the extreme of the whole batch is the extreme of the pieces' extremes.
    """
    relation = relations[0]
    dims = site.params["axes"]
    if site.name in ("reduce_or", "reduce_and") and site.dtype != bool:  # of bits
        return reduce_other(site, relations)
    if isinstance(relation, Extreme) and EXTREMES[site.name] == relation.kind:
        return [relation]
    if isinstance(relation, Total | Extreme):
        return [not_linear(site, relation)]
    assert isinstance(relation, Same | Split)
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
    return _along(site, relations, site.params["axes"], removed_dims=site.params["axes"])


def rule_along(param: str, linear: bool = False) -> Rule:
    """Return the rule of a primitive that works along a dim, which must have one size in both
    traces.

    Args:
      param: the parameter that holds the dim.
      linear: whether the primitive is linear.
    """

    def rule(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
        # of top_k it is the last dim, in releases of jax that have no parameter for it
        dim = site.params.get(param, -1) % len(site.operand_shapes()[0])
        if linear and dim not in differing_dims(site.operand_shapes()):
            return list(relations)
        return _along(site, relations, [dim])

    return rule


def _along(
    site: EquationPair,
    relations: Sequence[Relation],
    dims: Sequence[int],
    removed_dims: Sequence[int] = (),
) -> list[Relation]:
    """Return the results of an equation that works along dims with any function.

    If rows lie along one of them and an operand is a total, the message names the sum.
    """
    if not site.differing_operand_dims.isdisjoint(dims):
        totals = [relation for relation in relations if isinstance(relation, Total)]
        culprit = totals[0] if totals else relations[0]
        return [not_linear(site, culprit)] * site.num_results
    return _row_by_row(site, relations, removed_dims)


def _row_by_row(
    site: EquationPair, relations: Sequence[Relation], removed_dims: Sequence[int] = ()
) -> list[Relation]:
    """Return the results of an equation that applies one function to each row.

    Operands must have ratio 1 and one place.

    Args:
      site: the equation.
      relations: the relations of the operands.
      removed_dims: the dims of the operands that the results do not have.
    """
    if not all(map(is_unscaled, relations)):
        return unknown_results(site, relations, "count")
    joined = join(site, relations)
    if isinstance(joined, Split):
        joined = joined.moved_to(dim_after_removal(joined.dim, removed_dims))
    return [joined] * site.num_results


def window(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Reduce sliding windows, which must hold one entry along dims of rows."""
    params = site.params

    def has_own_windows(dim: int) -> bool:
        dilations = [
            params[name][dim] for name in ("base_dilation", "window_dilation") if params.get(name)
        ]
        sizes = [params["window_dimensions"][dim], params["window_strides"][dim], *dilations]
        return all(size == 1 for size in sizes) and tuple(params["padding"][dim]) == (0, 0)

    if not all(map(has_own_windows, site.differing_operand_dims)):
        return unknown_results(site, relations)
    if site.name == "reduce_window_sum" and isinstance(relations[0], Same | Split | Total):
        return [relations[0]]
    return _row_by_row(site, relations)


def batched(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Decompose matrices.

    The last two dims are the dims of a matrix, all other dims are batch dims.
    """
    num_matrix_dims = 1 if site.name == "lu_pivots_to_permutation" else 2
    ndim = len(site.operand_shapes()[0])
    return _along(site, relations, range(ndim - num_matrix_dims, ndim))


def triangular_solve(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Solve triangular systems. The solution is linear in the right side."""
    matrix, right_side = relations
    if matrix == Same() and not differing_dims(site.operand_shapes()):
        return [right_side]
    assert isinstance(right_side, Same | Split | Total)
    (solution,) = batched(site, [matrix, scaled(right_side, 1 / right_side.ratio)])
    return [scaled(solution, right_side.ratio) if isinstance(solution, Same | Split) else solution]


def dot_general(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Multiply two arrays and add up over the contracted dims.

    If the split dim is contracted, the result is a sum over rows: both operands are split, or the
    other operand has equal entries along this dim. If the split dim is a batch dim, or a dim of one
    operand only, the result is split.
    """
    total = next((relation for relation in relations if isinstance(relation, Total)), None)
    if total is not None and not any(isinstance(relation, Same) for relation in relations):
        return [not_linear(site, total)]
    places = {
        _place_in_product(site, side, relation)
        for side, relation in enumerate(relations)
        if isinstance(relation, Split)
    }
    if len(places) > 1:
        return [site.unknown("mixes")]
    summed_dims = site.params["dimension_numbers"][0][0]
    row_dims = [summed_dims[number] for is_summed, number, _ in places if is_summed]
    equal_dims = [
        dim
        for dim in differing_dims(site.operand_shapes())
        if dim in summed_dims and dim not in row_dims
    ]
    ratio = growth(site.operand_shapes(), equal_dims)
    for relation in relations:
        assert isinstance(relation, Same | Split | Total)
        ratio *= relation.ratio
    if row_dims:
        return [Total(ratio, site.op)]
    for _, result_dim, blocks in places:
        return [Split(result_dim, blocks, ratio)]
    return [Same(ratio) if total is None else Total(ratio, total.op)]


def _place_in_product(site: EquationPair, side: int, relation: Split) -> tuple[bool, int, int]:
    """Return whether the product adds rows up; the number of their dim among the contracted dims,
    or else their dim of the result; and the number of blocks.
    """
    contract_dims, batch_dims = (dims[side] for dims in site.params["dimension_numbers"])
    if relation.dim in contract_dims:
        return True, contract_dims.index(relation.dim), relation.blocks
    if relation.dim in batch_dims:
        return False, batch_dims.index(relation.dim), relation.blocks
    ndim = len(site.operand_shapes(side)[0])
    free_dims = [dim for dim in range(ndim) if dim not in (*contract_dims, *batch_dims)]
    first = len(batch_dims) if side == 0 else len(site.result_shapes()[0]) - len(free_dims)
    return False, first + free_dims.index(relation.dim), relation.blocks


def convolution(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Convolve images with a kernel.

    Rows may be the batch dim of the images. Or they are the groups of features, of a convolution
    with one kernel for each row.
    """
    numbers = site.params["dimension_numbers"]
    groups = site.both_params("feature_group_count")
    image, kernel = relations
    uneven_dims = [differing_dims(site.operand_shapes(i)) for i in (0, 1)]
    image_dim, group_dim, kernel_dim = *numbers.lhs_spec[:2], numbers.rhs_spec[0]
    if site.params["batch_group_count"] != 1:
        return [site.unknown("mixes")]
    if uneven_dims == [(group_dim,), (kernel_dim,)]:
        rows_are_groups = groups[0] == groups[1] * site.num_pieces
        rows_are_groups &= list(relations) == [Split(group_dim), Split(kernel_dim)]
        return [Split(numbers.out_spec[1]) if rows_are_groups else site.unknown("mixes")]
    rows_are_images = groups[0] == groups[1] and uneven_dims in ([(), ()], [(image_dim,), ()])
    if not rows_are_images or not isinstance(kernel, Same):
        return [site.unknown("mixes")]
    if isinstance(image, Split):
        image = image.moved_to(numbers.out_spec[0])
    assert isinstance(image, Same | Split | Total)
    return [scaled(image, kernel.ratio)]
