"""What each local instruction does to the pieces that devices hold: the rules of the derivation."""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from shardopt.hlo.proof._lines import Line, dtype_of, major_to_minor, numbers
from shardopt.hlo.proof._lookup import masked
from shardopt.hlo.proof._numbers import evaluate, known
from shardopt.hlo.proof._value import (
    INPUT,
    REDUCTIONS,
    Dim,
    Factor,
    Hidden,
    Positions,
    Unproved,
    Value,
    Wrong,
    added,
    all_multiples,
    cut_beside,
    determines,
    is_constant_along,
    is_whole,
    merged_hidden,
    multiplied,
    normal,
    partition,
    pending,
    same_everywhere,
    scaled,
    split_dims,
    unify,
    used,
    varies,
    whole,
    with_element,
    without_known_devices,
)

Rule = Callable[[Line, Sequence[Value], int], Value]


def apply(line: Line, values: Sequence[Value], devices: int) -> Value:
    """Return the value of a local instruction with one array as its result."""
    if (data := evaluate(line, values, devices)) is not None:
        return known(data, devices, line.order)
    if any(value.parts for value in values):
        return _by_parts(line, values, devices)
    rule = _RULES.get(line.opcode)
    if rule is None:
        raise Unproved(f"no rule covers {line.opcode}.")
    value = rule(line, values, devices)
    constant = all(operand.constant for operand in values)
    return without_known_devices(value._replace(constant=constant))


def _by_parts(line: Line, values: Sequence[Value], devices: int) -> Value:
    """Apply an instruction to each piece of a concatenation."""
    from shardopt.hlo.proof._parts import by_parts

    return by_parts(line, values, devices, apply)


def unified_operands(values: Sequence[Value]) -> tuple[tuple[Dim, ...], list[Value]]:
    """Return the dims that operands of equal shape have in common, and the operands without what
    became visible.
    """
    pairs = [(i, i) for i in range(len(values[0].shape))]
    common = values[0]
    for value in values[1:]:
        dims, common, _ = unify(common, value, pairs)
        common = common._replace(dims=tuple(dims[i] for i, _ in pairs))
    frame = Value(common.shape, common.dims)
    return common.dims, [unify(frame, value, pairs)[2] for value in values]


# elementwise


def _linear(line: Line, values: Sequence[Value], devices: int) -> Value:
    dims, operands = unified_operands(values)
    return Value(line.dims, dims, added(operands, line.order))


def _same_kind(line: Line, values: Sequence[Value], devices: int) -> Value:
    """Maximum of maxima, and so on; other terms are used on their own."""
    dims, operands = unified_operands(values)
    if all({h.kind for h in pending(value)} <= {line.opcode} for value in operands):
        reductions = [{partition(h.at) for h in pending(value)} for value in operands]
        if all(r == reductions[0] for r in reductions):
            return Value(line.dims, dims, merged_hidden(value.hidden for value in operands))
    return Value(
        line.dims, dims, merged_hidden(used(value.hidden, line.order) for value in operands)
    )


def _product(line: Line, values: Sequence[Value], devices: int) -> Value:
    dims, operands = unified_operands(values)
    _check_blocks(operands)
    return Value(line.dims, dims, multiplied(operands, line.order))


def _quotient(line: Line, values: Sequence[Value], devices: int) -> Value:
    dims, (dividend, divisor) = unified_operands(values)
    _check_blocks([dividend, divisor])
    divisor = divisor._replace(hidden=used(divisor.hidden, line.order))
    return Value(line.dims, dims, multiplied([dividend, divisor], line.order))


def _nonlinear(line: Line, values: Sequence[Value], devices: int) -> Value:
    if not values:
        return Value(line.dims, tuple(whole(size, devices) for size in line.dims))
    dims, operands = unified_operands(_scalars_broadcast(values, line))
    _check_blocks(operands)
    return Value(
        line.dims, dims, merged_hidden(used(value.hidden, line.order) for value in operands)
    )


def _check_blocks(operands: Sequence[Value]) -> None:
    """A term of a reduction over the pieces of a dim, used with these pieces: one block per device,
    or a missing reduction.
    """
    for value in operands:
        for h in value.hidden:
            if h.kind not in ("own", *REDUCTIONS):
                continue
            for other in operands:
                for i, dim in enumerate(other.dims):
                    for factor in dim:
                        if (
                            factor.size > factor.local
                            and partition(factor.at) is partition(h.at)
                            and is_constant_along(value.dims[i])
                        ):
                            raise Unproved(AMBIGUOUS)


AMBIGUOUS = (
    "each device uses its own part of a reduction with its own piece: either the piece is a head or"
    " a block of its own, or a reduction over devices is missing. The program alone does not tell."
)


def _scalars_broadcast(values: Sequence[Value], line: Line) -> list[Value]:
    """`clamp` and `select` take scalars next to arrays."""
    return [
        (
            value._replace(
                shape=line.dims,
                dims=tuple(_constant_dim(size, value) for size in line.dims),
                data=None,
            )
            if value.shape != line.dims and not value.shape
            else value
        )
        for value in values
    ]


def _constant_dim(size: int, like: Value) -> Dim:
    return (Factor(size, 0, _zero_of(like)),) if size != 1 else ()


def _zero_of(value: Value) -> Positions:
    for dim in value.dims:
        for factor in dim:
            return scaled(factor.at, 0)
    for hidden in value.hidden:
        return scaled(hidden.at, 0)
    return _ZERO[0]


_ZERO: list[Positions] = []
"""Position 0 on all devices of the program that is being read; `set_devices` sets it."""


def set_devices(devices: int) -> None:
    """Set the number of devices of the program."""
    _ZERO[:] = [Positions.of(np.zeros(devices, np.int64))]


def _select(line: Line, values: Sequence[Value], devices: int) -> Value:
    if (term := masked(line, values)) is not None:
        return term
    dims, (predicate, first, second) = unified_operands(_scalars_broadcast(values, line))
    branches = Value(line.dims, dims, added([first, second], line.order))
    predicate = predicate._replace(hidden=used(predicate.hidden, line.order))
    return Value(line.dims, dims, multiplied([branches, predicate], line.order))


def _passed(line: Line, values: Sequence[Value], devices: int) -> Value:
    """Copies, conversions between floats, optimisation barriers."""
    value = values[0]
    source_is_float = True
    if line.opcode == "convert":
        source_is_float = dtype_of(line.shape)[0] in "fbc" or not pending(value)
    hidden = value.hidden if source_is_float else used(value.hidden, line.order)
    return Value(line.dims, value.dims, hidden, fill=value.fill)


# shapes


def _broadcast(line: Line, values: Sequence[Value], devices: int) -> Value:
    value, mapping = values[0], line.integers("dimensions")
    dims = [same_everywhere(size, devices) for size in line.dims]
    for source, target in enumerate(mapping):
        if value.shape[source] == line.dims[target]:
            dims[target] = value.dims[source]
    added_elements = math.prod(line.dims) != math.prod(value.shape)
    hidden = tuple(h._replace(minor=-1) for h in value.hidden) if added_elements else value.hidden
    return Value(line.dims, tuple(dims), hidden, fill=value.fill)


def _reshape(line: Line, values: Sequence[Value], devices: int) -> Value:
    return reshaped(values[0], line.dims)


def reshaped(value: Value, shape: tuple[int, ...]) -> Value:
    """Return a value in another shape."""
    factors = [factor for dim in value.dims for factor in dim]
    return Value(
        shape, split_dims(factors, shape), placed(value).hidden, value.constant, fill=value.fill
    )


def bitcast(value: Value, source: str, target: str, shape: tuple[int, ...]) -> Value:
    """Return the value of a bitcast between two shapes with layouts: a transpose, a reshape and a
    transpose.
    """
    if dtype_of(source) != dtype_of(target) and math.prod(shape) != math.prod(value.shape):
        raise Unproved("the bitcast changes the number of elements.")
    order, new_order = major_to_minor(source), major_to_minor(target)
    stored = transposed(value, order) if order != tuple(range(len(order))) else value
    result = reshaped(stored, tuple(shape[dim] for dim in new_order))
    if new_order == tuple(range(len(new_order))):
        return result
    return transposed(result, tuple(new_order.index(dim) for dim in range(len(new_order))))


def _transpose(line: Line, values: Sequence[Value], devices: int) -> Value:
    return transposed(values[0], line.integers("dimensions"))


def transposed(value: Value, permutation: tuple[int, ...]) -> Value:
    """Return a value with its dims permuted."""
    value = placed(value)
    moved = [dim for dim in permutation if value.shape[dim] != 1]
    tails = [moved[i:] for i in range(len(moved) + 1) if sorted(moved[i:]) == sorted(moved)[i:]]
    minors = [math.prod(value.shape[dim] for dim in tail) for tail in tails]
    return value._replace(
        shape=tuple(value.shape[dim] for dim in permutation),
        dims=tuple(value.dims[dim] for dim in permutation),
        hidden=tuple(h if h.minor in minors else h._replace(minor=-1) for h in value.hidden),
        data=None,
    )


def placed(value: Value) -> Value:
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


def _reverse(line: Line, values: Sequence[Value], devices: int) -> Value:
    for dim in line.integers("dimensions"):
        _check_whole(values[0], dim, "reverses")
    return values[0].changed(fill=values[0].fill)


def _check_whole(value: Value, dim: int, verb: str) -> None:
    if not is_whole(value.dims[dim]):
        raise Unproved(f"it {verb} dim {dim}, of which each device holds a piece.")


def _slice(line: Line, values: Sequence[Value], devices: int) -> Value:
    value = values[0]
    dims = list(value.dims)
    for dim, ((start, stop, stride), size) in enumerate(zip(line.bounds, value.shape, strict=True)):
        count = len(range(start, stop, stride))
        if count != size:
            dims[dim] = _sliced(value.dims[dim], size, count, start, stride)
    result, hidden = _elements_to_hidden(dims, cut_beside(value, line.dims), devices)
    return Value(line.dims, result, hidden, fill=value.fill)


def _sliced(dim: Dim, size: int, count: int, start: int, stride: int) -> Dim:
    """Return the dim of which every device takes the same `count` of its `size` elements."""
    if is_constant_along(dim):
        return tuple(factor._replace(local=count) for factor in dim[:1])
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


def _elements_to_hidden(
    dims: Sequence[Dim], hidden: tuple[Hidden, ...], devices: int
) -> tuple[tuple[Dim, ...], tuple[Hidden, ...]]:
    """Make factors with one element hidden."""
    found = hidden
    remaining = []
    for dim in dims:
        for factor in dim:
            if factor.local == 1 and factor.size > 1 and varies(factor.at):
                found = with_element(found, Hidden("dim", factor.at, factor.size, SLICED))
        remaining.append(normal(tuple(factor for factor in dim if factor.local != 1)))
    return tuple(remaining), merged_hidden([found])


SLICED = -3
"""The origin of dims of which a slice leaves one element on each device."""


def _pad(line: Line, values: Sequence[Value], devices: int) -> Value:
    value, padding = values
    if pending(value) and not padding.zero:
        raise Wrong("it pads a partial sum with numbers that are not 0.")
    dims = list(value.dims)
    for dim, size in enumerate(line.dims):
        if size != value.shape[dim]:
            _check_whole(value, dim, "pads")
            dims[dim] = whole(size, devices)
    for dim, part in enumerate(line.attributes["padding"].split("x")):
        if value.shape[dim] == line.dims[dim] and any(numbers(part)):
            _check_whole(value, dim, "pads")
    hidden = merged_hidden([value.hidden, padding.hidden])
    return Value(line.dims, tuple(dims), hidden, fill=0 if value.zero and padding.zero else None)


def _concatenate(line: Line, values: Sequence[Value], devices: int) -> Value:
    (dim,) = line.integers("dimensions")
    return concatenated(values, dim, line, devices)


def concatenated(values: Sequence[Value], dim: int, line: Line, devices: int) -> Value:
    """Return the concatenation of values along a dim; as parts, if their pieces differ."""
    from shardopt.hlo.proof._parts import as_parts

    others = [i for i in range(len(line.dims)) if i != dim]
    try:
        common, hidden = values[0], []
        for value in values[1:]:
            dims, common, _ = unify(common, value, [(i, i) for i in others])
            common = common._replace(
                dims=tuple(dims.get(i, common.dims[i]) for i in range(len(line.dims)))
            )
        frame = Value(common.shape, common.dims)
        operands = [unify(frame, value, [(i, i) for i in others])[2] for value in values]
        hidden = added(operands, line.order)
        kinds = [
            {(h.at, h.count) for h in operand.hidden} for operand in operands if not operand.zero
        ]
        joined_dim = _joined_dim(
            [operand.dims[dim] for operand in operands], [v.shape[dim] for v in values], devices
        )
        if any(kind != kinds[0] for kind in kinds):
            raise Unproved("")
    except (Wrong, Unproved):
        return as_parts(values, dim, line)
    result = tuple(joined_dim if i == dim else common.dims[i] for i in range(len(line.dims)))
    fills = {value.fill for value in values}
    return Value(line.dims, result, hidden, fill=fills.pop() if len(fills) == 1 else None)


def _joined_dim(dims: Sequence[Dim], sizes: Sequence[int], devices: int) -> Dim:
    total = sum(sizes)
    if all(is_constant_along(dim) or is_whole(dim) for dim in dims):
        return whole(total, devices)
    if len(dims[0]) != 1 or dims[0][0].size <= 0 or not all_multiples(dims[0][0].at, sizes[0]):
        raise Unproved("")
    blocks = dims[0][0].size // sizes[0], scaled(dims[0][0].at, 1, sizes[0])
    for dim, size in zip(dims, sizes, strict=True):
        if (
            len(dim) != 1
            or dim[0].size != blocks[0] * size
            or dim[0].at is not scaled(blocks[1], size)
        ):
            raise Unproved("")
    return (Factor(total, blocks[0] * total, scaled(blocks[1], total)),)


# reductions and products


def reduced(value: Value, removed: Sequence[int], kind: str, line: Line) -> tuple[Hidden, ...]:
    """Return the coordinates after a local reduction: the rest of each reduced dim is pending."""
    hidden = list(value.hidden)
    for dim in removed:
        for factor in value.dims[dim]:
            if factor.size > factor.local:
                if factor.size % factor.local or not all_multiples(factor.at, factor.local):
                    raise Unproved("it reduces a dim whose pieces overlap.")
                count, at = factor.size // factor.local, scaled(factor.at, 1, factor.local)
                count, at = _within_elements(value.hidden, count, at)
                if count > 1:
                    hidden.append(Hidden(kind, at, count, line.order))
            elif factor.size == -1:
                raise Unproved("it reduces positions.")
    return merged_hidden([tuple(hidden)])


def _within_elements(
    hidden: tuple[Hidden, ...], count: int, at: Positions
) -> tuple[int, Positions]:
    """Return the pieces to sum for each element of the hidden dims that follow from the piece.

    If every device holds one element of a dim, and the pieces of a replica's rows meet that
    replica's element only, then the sum is over the pieces that meet the element.
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


def reduce(line: Line, value: Value, initial: Value, kind: str) -> Value:
    """Return a reduction of one array."""
    removed = line.integers("dimensions")
    if kind != "add":
        value = value._replace(
            hidden=tuple(
                (
                    h
                    if h.kind not in REDUCTIONS or h.kind == kind
                    else h._replace(kind="own", origin=line.order)
                )
                for h in value.hidden
            )
        )
    hidden = reduced(value, removed, kind, line)
    sums = [h for h in hidden if h.kind == "add"]
    if kind == "add" and sums and not initial.zero:
        raise Unproved("it starts a partial sum at a number that is not 0.")
    dims = tuple(dim for i, dim in enumerate(value.dims) if i not in removed)
    return Value(line.dims, dims, hidden, fill=0 if value.zero and initial.zero else None)


def _reduce_window(line: Line, values: Sequence[Value], devices: int) -> Value:
    """Return the rule of cumulative sums and pooling: a dim with a window must be whole."""
    value, _ = values
    window = dict(re.findall(r"(\w+)=(\S+)", line.attributes["window"].strip("{}")))
    dims = list(value.dims)
    for dim, size in enumerate(window["size"].split("x")):
        if int(size) != 1 or line.dims[dim] != value.shape[dim]:
            _check_whole(value, dim, "reduces windows of")
            dims[dim] = whole(line.dims[dim], devices)
    return Value(line.dims, tuple(dims), used(value.hidden, line.order))


def _dot(line: Line, values: Sequence[Value], devices: int) -> Value:
    left, right = values
    contracting = list(
        zip(
            line.integers("lhs_contracting_dims"),
            line.integers("rhs_contracting_dims"),
            strict=True,
        )
    )
    batch = list(zip(line.integers("lhs_batch_dims"), line.integers("rhs_batch_dims"), strict=True))
    return product(line, left, right, batch, contracting)


def product(
    line: Line,
    left: Value,
    right: Value,
    batch: list[tuple[int, int]],
    contracting: list[tuple[int, int]],
) -> Value:
    """Return a dot product: dims in the order batch, left, right."""
    common, left, right = unify(left, right, [*batch, *contracting])
    _check_heads(left, right, [j for _, j in [*batch, *contracting]])
    _check_heads(right, left, [i for i, _ in [*batch, *contracting]])
    summed = left._replace(dims=tuple(common.get(i, dim) for i, dim in enumerate(left.dims)))
    hidden = multiplied([left, right], line.order)
    pieces = Value(left.shape, summed.dims, hidden)
    hidden = reduced(pieces, [i for i, _ in contracting], "add", line)
    before = {
        (partition(h.at))
        for h in multiplied([left, right], line.order)
        if h.kind in ("own", *REDUCTIONS)
    }
    for h in hidden:
        if h.kind == "add" and h.origin == line.order and partition(h.at) in before:
            raise Unproved(
                "it contracts a dim over the same devices as a sum that is not complete."
            )
    taken_left, taken_right = (
        {i for i, _ in [*batch, *contracting]},
        {j for _, j in [*batch, *contracting]},
    )
    dims = [common[i] for i, _ in batch]
    dims += [dim for i, dim in enumerate(left.dims) if i not in taken_left]
    dims += [dim for j, dim in enumerate(right.dims) if j not in taken_right]
    shape = [left.shape[i] for i, _ in batch]
    shape += [size for i, size in enumerate(left.shape) if i not in taken_left]
    shape += [size for j, size in enumerate(right.shape) if j not in taken_right]
    return Value(tuple(shape), tuple(dims), hidden, fill=0 if left.zero or right.zero else None)


def _check_heads(value: Value, other: Value, common: Sequence[int]) -> None:
    """A sum over the pieces of a dim, used on its own with these pieces: one head per device, or a
    missing sum.
    """
    for h in value.hidden:
        if h.kind not in ("own", "add"):
            continue
        for i, dim in enumerate(other.dims):
            for factor in dim:
                if (
                    i not in common
                    and factor.size > factor.local
                    and partition(factor.at) is partition(h.at)
                ):
                    raise Unproved(AMBIGUOUS)


_ELEMENTWISE = (
    "exponential",
    "exponential-minus-one",
    "log",
    "log-plus-one",
    "tanh",
    "logistic",
    "sqrt",
    "rsqrt",
)
_ELEMENTWISE += (
    "cbrt",
    "power",
    "sine",
    "cosine",
    "tan",
    "abs",
    "sign",
    "floor",
    "ceil",
    "round-nearest-even",
)
_ELEMENTWISE += (
    "round-nearest-afz",
    "is-finite",
    "not",
    "xor",
    "compare",
    "atan2",
    "remainder",
    "shift-left",
)
_ELEMENTWISE += (
    "shift-right-logical",
    "shift-right-arithmetic",
    "popcnt",
    "clz",
    "erf",
    "clamp",
    "mulhi",
)
_ELEMENTWISE += ("stochastic-convert", "bitcast-convert")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _nonlinear),
    **dict.fromkeys(["add", "subtract", "complex"], _linear),
    **dict.fromkeys(["maximum", "minimum", "and", "or"], _same_kind),
    **dict.fromkeys(
        ["copy", "convert", "negate", "reduce-precision", "real", "imag", "optimization-barrier"],
        _passed,
    ),
    "multiply": _product,
    "divide": _quotient,
    "select": _select,
    "broadcast": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "reverse": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "dot": _dot,
    "reduce-window": _reduce_window,
}
