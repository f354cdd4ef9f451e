"""The rules of the derivation: the effect of each local instruction on the pieces that devices
hold.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from shardopt.hlo._hlo_text import numbers, window_dims
from shardopt.hlo.proof._lines import Line, dtype_of, major_to_minor
from shardopt.hlo.proof._lookup import masked, splat
from shardopt.hlo.proof._parts import as_parts
from shardopt.hlo.proof._value import (
    INPUT,
    REDUCTIONS,
    SLICED,
    DerivedValue,
    Dim,
    Factor,
    Hidden,
    HiddenDims,
    Positions,
    RuleError,
    Unproved,
    Wrong,
    added,
    all_multiples,
    classes_of,
    cut_beside,
    determines,
    is_constant_along,
    is_whole,
    merged_hidden,
    mixed,
    multiplied,
    normal,
    partition,
    pending,
    replaced,
    resized,
    same_everywhere,
    scaled,
    split_dims,
    unify,
    used,
    varies,
    whole,
    with_element,
)
from shardopt.trace._primitives import words

Rule = Callable[[Line, Sequence[DerivedValue]], DerivedValue]


def unified_operands(
    values: Sequence[DerivedValue], without: int | None = None
) -> tuple[tuple[Dim, ...], list[DerivedValue]]:
    """Return the dims that operands of equal shape have in common, and the operands without what
    became visible. The dim `without` may differ.
    """
    pairs = [(i, i) for i in values[0].other_dims((without,))]
    common = values[0]
    for value in values[1:]:
        common, _ = unify(common, value, pairs)
    # Twice: the first pass finds the common dims, the second takes them out of each value's hidden
    # dims.
    frame = DerivedValue(common.shape, common.dims)
    return common.dims, [unify(frame, value, pairs)[1] for value in values]


# elementwise


def _elementwise(hidden_of: Callable[[Line, list[DerivedValue]], HiddenDims]) -> Rule:
    """Return the rule of an instruction on single numbers, from the coordinates of its result."""

    def rule(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
        dims, operands = unified_operands(_scalars_broadcast(values, line))
        return DerivedValue(line.dims, dims, hidden_of(line, operands))

    return rule


@_elementwise
def _linear(line: Line, operands: list[DerivedValue]) -> HiddenDims:
    return added(operands, line.order)


@_elementwise
def _same_kind(line: Line, operands: list[DerivedValue]) -> HiddenDims:
    """Maximum of maxima, and so on; other terms are used on their own."""
    reductions = [classes_of(pending(value)) for value in operands]
    kinds = {h.kind for value in operands for h in pending(value)}
    if kinds <= {line.opcode} and all(r == reductions[0] for r in reductions):
        return merged_hidden(value.hidden for value in operands)
    return mixed(operands, line.order)


@_elementwise
def _product(line: Line, operands: list[DerivedValue]) -> HiddenDims:
    _check_blocks(operands)
    return multiplied(operands, line.order)


@_elementwise
def _quotient(line: Line, operands: list[DerivedValue]) -> HiddenDims:
    dividend, divisor = operands
    _check_blocks(operands)
    # Linear in the dividend alone.
    divisor = divisor._replace(hidden=used(divisor.hidden, line.order))
    return multiplied([dividend, divisor], line.order)


@_elementwise
def _nonlinear(line: Line, operands: list[DerivedValue]) -> HiddenDims:
    _check_blocks(operands)
    return mixed(operands, line.order)


def _check_blocks(operands: Sequence[DerivedValue]) -> None:
    """A term of a reduction over the pieces of a dim, used with these pieces: one block per device,
    or a missing reduction.
    """
    for value in operands:
        dims = [i for i, dim in enumerate(value.dims) if is_constant_along(dim)]
        for other in operands:
            _check_pieces(value, ("own", *REDUCTIONS), other, dims)


def _check_pieces(
    value: DerivedValue, kinds: Sequence[str], other: DerivedValue, dims: Sequence[int]
) -> None:
    terms = classes_of(h for h in value.hidden if h.kind in kinds)
    factors = [factor for i in dims for factor in other.dims[i] if factor.size > factor.local]
    if any(partition(factor.at) in terms for factor in factors):
        # Not wrong: a model may use one head or one block on each device. The comparison decides.
        raise Unproved(AMBIGUOUS)


AMBIGUOUS = (
    "each device uses its own part of a reduction with its own piece: either the piece is a head or"
    " a block of its own, or a reduction over devices is missing. The program alone does not tell."
)


def _scalars_broadcast(values: Sequence[DerivedValue], line: Line) -> list[DerivedValue]:
    """`clamp` and `select` take scalars next to arrays."""
    return [
        (
            value._replace(
                shape=line.dims,
                dims=tuple(same_everywhere(size, line.devices) for size in line.dims),
                data=None,
            )
            if value.shape != line.dims and not value.shape
            else value
        )
        for value in values
    ]


def _select(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    # A select that masks rows of other devices makes a term of a sum.
    return masked(line, values) or _of_one_device(line, values) or _chosen(line, values)


def _of_one_device(line: Line, values: Sequence[DerivedValue]) -> DerivedValue | None:
    """Return whole numbers that one device keeps while the others have zeros: a term of a sum over
    all devices. So XLA adds the sum of earlier steps once.
    """
    predicate, value, other = values
    taken = splat(predicate, line.devices)
    if taken is None or line.devices == 1:
        return None
    if value.zero:
        value, other, taken = other, value, 1 - taken
    if taken.sum() != 1 or not other.zero or value.hidden or not all(map(is_whole, value.dims)):
        return None
    term = Hidden("add", Positions.of(np.arange(line.devices)), line.devices, line.order)
    return DerivedValue(line.dims, value.dims, (term,))


@_elementwise
def _chosen(line: Line, operands: list[DerivedValue]) -> HiddenDims:
    """The product of the predicate of a select and its branches."""
    predicate, first, second = operands
    branches = first._replace(hidden=added([first, second], line.order))
    predicate = predicate._replace(hidden=used(predicate.hidden, line.order))
    return multiplied([branches, predicate], line.order)


def _passed(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Copies, conversions between floats, optimisation barriers."""
    value = values[0]
    rounds = line.opcode == "convert" and dtype_of(line.shape)[0] not in "fbc"
    hidden = used(value.hidden, line.order) if rounds else value.hidden
    return DerivedValue(line.dims, value.dims, hidden, fill=value.fill)


# shapes


def _broadcast(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    value = values[0]
    mapping = line.integers("dimensions")
    dims = [same_everywhere(size, line.devices) for size in line.dims]
    for source, target in enumerate(mapping):
        if value.shape[source] == line.dims[target]:
            dims[target] = value.dims[source]
    added_elements = math.prod(line.dims) != math.prod(value.shape)
    hidden = tuple(h._replace(minor=-1) for h in value.hidden) if added_elements else value.hidden
    return DerivedValue(line.dims, tuple(dims), hidden, fill=value.fill)


def reshaped(value: DerivedValue, shape: tuple[int, ...]) -> DerivedValue:
    """Return a value in another shape."""
    factors = [factor for dim in value.dims for factor in dim]
    return DerivedValue(
        shape, split_dims(factors, shape), placed(value).hidden, value.constant, fill=value.fill
    )


def _bitcast(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """A bitcast between two shapes with layouts is a transpose, a reshape and a transpose."""
    (value,) = values
    source = line.operand_shapes[0]
    target = line.shape
    shape = line.dims
    if dtype_of(source) != dtype_of(target) and math.prod(shape) != math.prod(value.shape):
        raise Unproved("the bitcast changes the number of elements.")
    order = major_to_minor(source)
    new_order = major_to_minor(target)
    stored = transposed(value, order) if order != tuple(range(len(order))) else value
    result = reshaped(stored, tuple(shape[dim] for dim in new_order))
    if new_order == tuple(range(len(new_order))):
        return result
    return transposed(result, tuple(map(new_order.index, range(len(new_order)))))


def transposed(value: DerivedValue, permutation: tuple[int, ...]) -> DerivedValue:
    """Return a value with its dims permuted."""
    value = placed(value)
    moved = [dim for dim in permutation if value.shape[dim] != 1]
    # A hidden element keeps its place if the dims to its right stay to its right, in any order.
    tails = [moved[i:] for i in range(len(moved) + 1) if sorted(moved[i:]) == sorted(moved)[i:]]
    minors = [math.prod(value.shape[dim] for dim in tail) for tail in tails]
    return value._replace(
        shape=tuple(value.shape[dim] for dim in permutation),
        dims=tuple(value.dims[dim] for dim in permutation),
        hidden=tuple(h if h.minor in minors else h._replace(minor=-1) for h in value.hidden),
        data=None,
    )


def placed(value: DerivedValue) -> DerivedValue:
    """Return a value whose one element of a dim of the arguments is at its only dim of one element."""
    elements = [h for h in value.hidden if h.kind == "dim"]
    if (
        value.shape.count(1) != 1
        or len(elements) != 1
        or elements[0].origin != INPUT
        or elements[0].minor >= 0
    ):
        return value
    minor = math.prod(value.shape[value.shape.index(1) :])
    return value._replace(
        hidden=tuple(h._replace(minor=minor) if h in elements else h for h in value.hidden)
    )


def _reverse(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    for dim in line.integers("dimensions"):
        _check_whole(values[0], dim, "reverses")
    return values[0].changed(fill=values[0].fill)


def _check_whole(value: DerivedValue, dim: int, verb: str) -> None:
    if not is_whole(value.dims[dim]):
        raise Unproved(f"it {verb} dim {dim}, of which each device holds a piece.")


def _slice(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    value = values[0]
    dims = list(value.dims)
    for dim, ((start, stop, stride), size) in enumerate(zip(line.bounds, value.shape, strict=True)):
        count = len(range(start, stop, stride))
        if count != size:
            dims[dim] = sliced_dim(value.dims[dim], size, count, start, stride)
    result, hidden = elements_to_hidden(dims, cut_beside(value, line.dims))
    return DerivedValue(line.dims, result, hidden, fill=value.fill)


def sliced_dim(dim: Dim, size: int, count: int, start: int, stride: int) -> Dim:
    """Return the dim after every device takes the same `count` of its `size` elements."""
    if is_constant_along(dim):
        return resized(dim, count)
    if is_whole(dim):
        return (Factor(count, count, scaled(dim[0].at, 0)),)
    if (
        len(dim) == 1
        and dim[0].size > 0
        and dim[0].size % size == 0
        and all_multiples(dim[0].at, size)
    ):
        (factor,) = dim
        return (Factor(count, factor.size // size * count, scaled(factor.at, count, size)),)
    minor = math.prod(factor.local for factor in dim[1:])
    if (
        stride == 1
        and start % minor == 0
        and count % minor == 0
        and dim[0].size in (0, dim[0].local)
    ):
        return normal(
            (dim[0]._replace(local=count // minor, size=dim[0].size and count // minor), *dim[1:])
        )
    raise Unproved("it slices a dim that is made of several pieces.")


def elements_to_hidden(
    dims: Sequence[Dim], hidden: HiddenDims, order: int = SLICED
) -> tuple[tuple[Dim, ...], HiddenDims]:
    """Make factors with one element hidden."""
    for factor in (factor for dim in dims for factor in dim):
        if factor.local == 1 and factor.size > 1 and varies(factor.at):
            hidden = with_element(hidden, Hidden("dim", factor.at, factor.size, order))
    remaining = tuple(normal(tuple(f for f in dim if f.local != 1)) for dim in dims)
    return remaining, merged_hidden([hidden])


def _pad(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    value, padding = values
    if pending(value) and not padding.zero:
        # Each device pads, so the sum over devices would have the padding several times.
        raise Wrong("it pads a partial sum with numbers that are not 0.")
    dims = list(value.dims)
    for dim, part in enumerate(line.attributes["padding"].split("x")):
        if any(numbers(part)):
            _check_whole(value, dim, "pads")
            dims[dim] = whole(line.dims[dim], line.devices)
    hidden = merged_hidden([value.hidden, padding.hidden])
    return DerivedValue(
        line.dims, tuple(dims), hidden, fill=0 if value.zero and padding.zero else None
    )


def _concatenate(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the concatenation of values along a dim; as parts, if their pieces differ."""
    (dim,) = line.integers("dimensions")
    try:
        common, operands = unified_operands(values, without=dim)
        hidden = added(operands, line.order)
        joined_dim = _joined_dim(operands, dim, line.devices)
        kinds = [{(h.at, h.count) for h in value.hidden} for value in operands if not value.zero]
        if any(kind != kinds[0] for kind in kinds):
            raise Unproved("")
    except RuleError:
        return as_parts(values, dim, line)
    fills = {value.fill for value in values}
    fill = fills.pop() if len(fills) == 1 else None
    return DerivedValue(line.dims, replaced(common, dim, joined_dim), hidden, fill=fill)


def _joined_dim(values: Sequence[DerivedValue], dim: int, devices: int) -> Dim:
    dims = [value.dims[dim] for value in values]
    sizes = [value.shape[dim] for value in values]
    total = sum(sizes)
    if all(is_constant_along(joined) or is_whole(joined) for joined in dims):
        return whole(total, devices)
    first = dims[0]
    if len(first) != 1 or first[0].size <= 0 or not all_multiples(first[0].at, sizes[0]):
        raise Unproved("")
    count = first[0].size // sizes[0]
    at = scaled(first[0].at, 1, sizes[0])
    for joined, size in zip(dims, sizes, strict=True):
        if [(f.size, f.at) for f in joined] != [(count * size, scaled(at, size))]:
            raise Unproved("")
    return (Factor(total, count * total, scaled(at, total)),)


# reductions and products


def reduced(value: DerivedValue, removed: Sequence[int], kind: str, line: Line) -> HiddenDims:
    """Return the coordinates after a local reduction: the rest of each reduced dim is pending."""
    hidden = list(value.hidden)
    for dim in removed:
        for factor in value.dims[dim]:
            if factor.size > factor.local:
                if factor.size % factor.local or not all_multiples(factor.at, factor.local):
                    raise Unproved("it reduces a dim whose pieces overlap.")
                # The devices' sums over their pieces are terms: `count` of them, and a later
                # all-reduce adds them.
                count = factor.size // factor.local
                at = scaled(factor.at, 1, factor.local)
                count, at = _within_elements(value.hidden, count, at)
                if count > 1:
                    hidden.append(Hidden(kind, at, count, line.order))
            elif factor.size == -1:
                raise Unproved("it reduces positions.")
    return merged_hidden([tuple(hidden)])


def _within_elements(hidden: HiddenDims, count: int, at: Positions) -> tuple[int, Positions]:
    """Return the pieces to sum for each element of the hidden dims that follow from the piece.

    Every device may hold one element of a dim, and the pieces of a replica's rows may meet that
    replica's element only. Then the sum is over the pieces that meet the element.
    """
    for h in hidden:
        if h.kind == "dim" and count % h.count == 0 and determines([at], h.at):
            members = [
                np.unique(at.array[h.at.array == element]) for element in np.unique(h.at.array)
            ]
            if len(members) == h.count and all(
                len(pieces) == count // h.count for pieces in members
            ):
                rank = {int(piece): i for pieces in members for i, piece in enumerate(pieces)}
                at = Positions.of(np.array([rank[int(piece)] for piece in at.array]))
                count //= h.count
    return count, at


def reduce(line: Line, value: DerivedValue, initial: DerivedValue, kind: str) -> DerivedValue:
    """Return a reduction of one array."""
    removed = line.integers("dimensions")
    if kind != "add":
        value = value._replace(hidden=used(value.hidden, line.order, linear=kind))
    hidden = reduced(value, removed, kind, line)
    sums = [h for h in hidden if h.kind == "add"]
    if kind == "add" and sums and not initial.zero:
        raise Unproved("it starts a partial sum at a number that is not 0.")
    dims = tuple(dim for i, dim in enumerate(value.dims) if i not in removed)
    return DerivedValue(line.dims, dims, hidden, fill=0 if value.zero and initial.zero else None)


def _reduce_window(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of cumulative sums and pooling: a dim with a window must be whole."""
    value, _ = values
    dims = list(value.dims)
    for dim, window in enumerate(window_dims(line.attributes)):
        if window.size != 1 or line.dims[dim] != value.shape[dim]:
            _check_whole(value, dim, "reduces windows of")
            dims[dim] = whole(line.dims[dim], line.devices)
    return DerivedValue(line.dims, tuple(dims), used(value.hidden, line.order))


def product(
    line: Line,
    lhs: DerivedValue,
    rhs: DerivedValue,
    batch: list[tuple[int, int]],
    contracting: list[tuple[int, int]],
) -> DerivedValue:
    """Return a dot product: dims in the order batch, lhs, rhs."""
    lhs, rhs = unify(lhs, rhs, [*batch, *contracting])
    batched = [i for i, _ in batch]
    contracted = [i for i, _ in contracting]
    free_left = lhs.other_dims([*batched, *contracted])
    free_right = rhs.other_dims([j for _, j in (*batch, *contracting)])
    # one head per device, or a missing sum
    _check_pieces(lhs, ("own", "add"), rhs, free_right)
    _check_pieces(rhs, ("own", "add"), lhs, free_left)
    terms = multiplied([lhs, rhs], line.order)
    hidden = reduced(DerivedValue(lhs.shape, lhs.dims, terms), contracted, "add", line)
    sums = [h for h in hidden if h.kind == "add" and h.origin == line.order]
    # One all-reduce over these devices would complete two sums at once, which is no product of
    # sums.
    if classes_of(sums) & classes_of(h for h in terms if h.kind in ("own", *REDUCTIONS)):
        raise Unproved("it contracts a dim over the same devices as a sum that is not complete.")
    places = [(lhs, i) for i in (*batched, *free_left)] + [(rhs, j) for j in free_right]
    shape = tuple(value.shape[i] for value, i in places)
    dims = tuple(value.dims[i] for value, i in places)
    return DerivedValue(shape, dims, hidden, fill=0 if 0 in (lhs.fill, rhs.fill) else None)


_NONLINEAR = words(
    "exponential exponential-minus-one log log-plus-one tanh logistic sqrt rsqrt cbrt power sine"
    " cosine tan abs sign floor ceil round-nearest-even round-nearest-afz is-finite not xor compare"
    " atan2 remainder shift-left shift-right-logical shift-right-arithmetic popcnt clz erf clamp"
    " mulhi stochastic-convert bitcast-convert"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_NONLINEAR, _nonlinear),
    **dict.fromkeys(words("add subtract complex"), _linear),
    **dict.fromkeys(words("maximum minimum and or"), _same_kind),
    **dict.fromkeys(
        words("copy convert negate reduce-precision real imag optimization-barrier"), _passed
    ),
    "multiply": _product,
    "divide": _quotient,
    "select": _select,
    "bitcast": _bitcast,
    "broadcast": _broadcast,
    "reshape": lambda line, values: reshaped(values[0], line.dims),
    "transpose": lambda line, values: transposed(values[0], line.integers("dimensions")),
    "reverse": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "dot": lambda line, values: product(line, values[0], values[1], *line.dot_dims),
    "reduce-window": _reduce_window,
}
