"""Rules of equations that fold a dim: sums, extremes, sorts, windows, products of matrices and convolutions."""

from collections.abc import Callable, Sequence

from shardopt.separability.elementwise import join, not_linear
from shardopt.separability.relations import (
    Extreme,
    Same,
    Site,
    Split,
    Total,
    Unknown,
    Value,
    differing,
    growth,
)

Rule = Callable[[Site, Sequence[Value]], list[Value]]


def left(dim: int, gone: Sequence[int]) -> int:
    """Return which dim a dim is once others are gone."""
    return dim - sum(one < dim for one in gone)


def reduce_sum(site: Site, values: Sequence[Value]) -> list[Value]:
    """Add entries up.

    Over the split dim, sum_W = r (sum_P0 + ... + sum_Pn-1). Over a dim of equal entries a sum is their number times one.
    """
    value, axes = values[0], site.params["axes"]
    if site.dtype.kind in "iu" and site.dtype.itemsize < 4:
        return [site.unknown("count")]  # sums of few bits overflow, in the whole at another number than in a piece
    repeated = [
        dim for dim in differing(site.operand()) if dim in axes and not (isinstance(value, Split) and dim == value.dim)
    ]
    factor = growth(site.operand(), repeated)
    if isinstance(value, Split) and value.dim in axes:
        return [Total(value.ratio * factor, site.op)]
    if isinstance(value, Split):
        return [Split(left(value.dim, axes), value.blocks, value.ratio * factor, value.order)]
    assert isinstance(value, Same | Total)
    return [value.scaled(factor)]


KINDS = {"reduce_max": "max", "reduce_or": "max", "reduce_min": "min", "reduce_and": "min"}


def reduce_extreme(site: Site, values: Sequence[Value]) -> list[Value]:
    """Take the largest or smallest entry: of equal ones it is each, over the split dim it is that of the pieces' ones."""
    value, axes = values[0], site.params["axes"]
    if isinstance(value, Extreme) and KINDS.get(site.name) == value.kind:
        return [value]
    if isinstance(value, Total | Extreme):
        return [not_linear(site, value)]
    assert isinstance(value, Same | Split)
    if not value.ratio > 0:
        return [site.unknown("count")]
    if isinstance(value, Split) and value.dim in axes:
        return [Extreme(KINDS[site.name], site.op) if value.ratio == 1.0 else site.unknown("count")]
    if isinstance(value, Split):
        return [value.at(left(value.dim, axes))]
    return [value]


def reduce_other(site: Site, values: Sequence[Value]) -> list[Value]:
    """Fold dims along which whole and pieces are equally long, in any way that is the same in both."""
    axes = site.params["axes"]
    if any(dim in axes for i in range(len(values)) for dim in differing(site.operand(i))):
        return [_mixing(site, values)] * site.num_results
    return _apart(site, values, lambda split: Split(left(split.dim, axes), split.blocks, 1.0, split.order))


def argmax(site: Site, values: Sequence[Value]) -> list[Value]:
    """Find the largest entry; a positive ratio does not move it."""
    value = values[0]
    if isinstance(value, Same | Split) and value.ratio > 0:
        value = value.scaled(1 / value.ratio)
    return reduce_other(site, [value])


def along(name: str, linear: bool = False) -> Rule:
    """Return the rule of what runs along a dim: it must be one along which whole and pieces are equally long."""

    def rule(site: Site, values: Sequence[Value]) -> list[Value]:
        value, dims = values[0], site.params[name]
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        if any(dim % len(site.operand(i)[0]) in dims for i in range(len(values)) for dim in differing(site.operand(i))):
            return [_mixing(site, values)] * site.num_results
        if linear and isinstance(value, Same | Split | Total):
            return [value]
        return _apart(site, values, lambda split: split)

    return rule


def top_k(site: Site, values: Sequence[Value]) -> list[Value]:
    """Take the largest entries along a dim along which whole and pieces are equally long."""
    dim = site.params.get("axis", -1) % len(site.operand()[0])
    if dim in differing(site.operand()):
        return [_mixing(site, values)] * site.num_results
    return _apart(site, values, lambda split: split)


def _apart(site: Site, values: Sequence[Value], change: Callable[[Split], Value]) -> list[Value]:
    """Return the results of the same function of each entry along the dims that differ: operands of ratio 1, split alike."""
    for value in values:
        if isinstance(value, Total):
            return [not_linear(site, value)] * site.num_results
    if not all(isinstance(value, Same | Split) and site.equal(value.ratio, 1.0) for value in values):
        return [site.unknown("count")] * site.num_results
    joined = join(site, values)
    return [change(joined) if isinstance(joined, Split) else joined] * site.num_results


def _mixing(site: Site, values: Sequence[Value]) -> Unknown:
    total = next((value for value in values if isinstance(value, Total)), None)
    return site.unknown("mixes") if total is None else not_linear(site, total)


def window(site: Site, values: Sequence[Value]) -> list[Value]:
    """Slide windows over other dims than those of rows."""
    params, dims = site.params, {dim for i in range(len(values)) for dim in differing(site.operand(i))}

    def alone(dim: int) -> bool:
        spread = [params[name][dim] for name in ("base_dilation", "window_dilation") if params.get(name)]
        sizes = [params["window_dimensions"][dim], params["window_strides"][dim], *spread]
        return all(size == 1 for size in sizes) and tuple(params["padding"][dim]) == (0, 0)

    if not all(map(alone, dims)):
        return [site.unknown("mixes")] * site.num_results
    if site.name == "reduce_window_sum" and isinstance(values[0], Same | Split | Total):
        return [values[0]]
    return _apart(site, values, lambda split: split)


def batched(site: Site, values: Sequence[Value]) -> list[Value]:
    """Decompose matrices, which the last two dims hold: all other dims count them."""
    fewest = min(len(site.operand(i)[0]) for i in range(len(values)))
    results = [len(site.result(i)[0]) for i in range(site.num_results)]
    matrix = 1 if site.name == "lu_pivots_to_permutation" else 2
    if any(
        dim >= len(shapes[0]) - matrix
        for i in range(len(values))
        for shapes in [site.operand(i)]
        for dim in differing(shapes)
    ):
        return [site.unknown("mixes")] * site.num_results
    if any(isinstance(value, Split) and value.dim >= min(fewest, *results) for value in values):
        return [site.unknown("shape")] * site.num_results
    return _apart(site, values, lambda split: split)


def fft(site: Site, values: Sequence[Value]) -> list[Value]:
    """Transform the last dims, which is linear."""
    value, transformed = values[0], len(site.params["fft_lengths"])
    if any(dim >= len(site.operand()[0]) - transformed for dim in differing(site.operand())):
        return [site.unknown("mixes")]
    return [value]


def dot_general(site: Site, values: Sequence[Value]) -> list[Value]:
    """Multiply and add up.

    A dim of one operand alone stays where it is. Over the split dims of both operands, or that of one and equal entries of
    the other, the sum of the whole is that of the pieces' sums.
    """
    contract, batch = site.params["dimension_numbers"]
    left_value, right_value = values
    if isinstance(left_value, Total) or isinstance(right_value, Total):
        total, other = (left_value, right_value) if isinstance(left_value, Total) else (right_value, left_value)
        if not isinstance(other, Same):
            return [not_linear(site, total)]
    assert isinstance(left_value, Same | Split | Total) and isinstance(right_value, Same | Split | Total)  # noqa: PT018
    splits = {side: value for side, value in enumerate(values) if isinstance(value, Split)}
    summed = [dim for dim in differing(site.operand()) if dim in contract[0]]
    ratio = left_value.ratio * right_value.ratio
    if not splits:
        scaled = left_value if isinstance(left_value, Total) else right_value
        factor = ratio / scaled.ratio if scaled.ratio else 0.0
        drawn = any(isinstance(value, Same) and value.drawn for value in values)
        product = scaled.scaled(factor * growth(site.operand(), summed))
        return [Same(product.ratio, drawn) if isinstance(product, Same) else product]
    places = set()
    for side, value in splits.items():
        if value.dim in contract[side]:
            places.add(("sum", contract[side].index(value.dim), *value.place[1:]))
        elif value.dim in batch[side]:
            places.add(("batch", batch[side].index(value.dim), *value.place[1:]))
        else:
            places.add(("free", side, *value.place[1:]))
    if len(places) > 1:
        return [site.unknown("mixes")]
    kind, index = places.pop()[:2]
    value = next(iter(splits.values()))
    if kind == "sum":
        repeated = [dim for dim in summed if dim != contract[0][index]]
        return [Total(ratio * growth(site.operand(), repeated), site.op)]
    ratio *= growth(site.operand(), summed)
    if kind == "batch":
        return [Split(index, value.blocks, ratio, value.order)]
    free = [
        [dim for dim in range(len(site.operand(side)[0])) if dim not in (*contract[side], *batch[side])]
        for side in (0, 1)
    ]
    at = len(batch[0]) + (len(free[0]) if index else 0) + free[index].index(value.dim)
    return [Split(at, value.blocks, ratio, value.order)]


def convolution(site: Site, values: Sequence[Value]) -> list[Value]:
    """Convolve: images are rows along their own dim; over the features of both it is a sum, as for a kernel's gradient."""
    numbers, params = site.params["dimension_numbers"], site.params
    image, kernel = values
    assert isinstance(image, Same | Split | Total) and isinstance(kernel, Same | Split | Total)  # noqa: PT018
    ratio = image.ratio * kernel.ratio
    differ = differing(site.operand(0)), differing(site.operand(1))
    ungrouped = params["batch_group_count"] == params["feature_group_count"] == 1
    if differ == ((), ()):
        if isinstance(image, Total) != isinstance(kernel, Total):
            total, other = (image, kernel) if isinstance(image, Total) else (kernel, image)
            return [total.scaled(other.ratio)]
        return [
            Same(ratio, image.drawn or kernel.drawn)
            if isinstance(image, Same) and isinstance(kernel, Same)
            else site.unknown("mixes")
        ]
    if differ == ((numbers.lhs_spec[0],), ()) and params["batch_group_count"] == 1 and isinstance(kernel, Same):
        if isinstance(image, Split):
            return [Split(numbers.out_spec[0], image.blocks, ratio, image.order)]
        return [image.scaled(kernel.ratio)]
    if not (isinstance(image, Split) and isinstance(kernel, Split) and image.place[1:] == kernel.place[1:]):
        return [site.unknown("mixes")]
    if differ == ((numbers.lhs_spec[1],), (numbers.rhs_spec[1],)) and ungrouped:
        return [Total(ratio, site.op)]
    return [site.unknown("mixes")]
