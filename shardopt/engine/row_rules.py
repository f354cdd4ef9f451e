"""What equations that move, join, contract or look up entries do to rows, by primitive."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardopt.engine.row_arithmetic import ELEMENTWISE, const, elementwise, joined, known, not_linear, summed
from shardopt.engine.row_folding import fold
from shardopt.engine.row_values import (
    Clean,
    Const,
    Degree,
    Mixed,
    Rows,
    Site,
    Sum,
    Value,
    add,
    first_mixed,
    growth,
    same,
    scaled,
)

Rule = Callable[[Site, Sequence[Clean]], list[Value]]


def apply(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return what is known of the results of an equation, from what is known of its operands."""
    if (rows := _rows_of_constant(site, values)) is not None:
        values = rows
    elif site.num_outs == 1 and (numbers := fold(site, values)) is not None:
        return [known(site, numbers, next((one.op for one in values if isinstance(one, Const) and one.varies), None))]
    if site.name in ELEMENTWISE:
        return elementwise(site, values)
    if mixed := first_mixed(values):
        return [mixed] * site.num_outs
    clean = [value for value in values if not isinstance(value, Mixed)]
    rule = RULES.get(site.name)
    if rule is not None:
        return [
            site.mixed("count") if isinstance(one, Rows) and math.isnan(sum(one.degree)) else one
            for one in rule(site, clean)
        ]
    if all(isinstance(value, Const) for value in clean):
        return _opaque(site, clean)
    return [site.mixed("unknown")] * site.num_outs


def _opaque(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Return the results of any equation on constants: they may vary wherever they have the size of rows."""
    consts = [value for value in values if isinstance(value, Const)]
    fine = all(same(one.degree, site.none) for one in consts)
    degree = site.none if fine else (math.nan,) * len(site.none)
    anywhere = any(one.anywhere for one in consts)
    op = next((one.op for one in consts if one.varies and one.op), site.op)
    return [
        Const(degree, frozenset() if anywhere else scaled(site.outs(i)), anywhere, None, op)
        for i in range(site.num_outs)
    ]


def _uniform(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Return the results, on constants, of an equation that treats every row alike: they vary only if operands do."""
    if any(isinstance(value, Const) and value.varies for value in values):
        return _opaque(site, values)
    return [one._replace(varies=frozenset()) if isinstance(one, Const) else one for one in _opaque(site, values)]


def _consts(rule: Rule) -> Rule:
    """Leave constants to `_opaque`, where nothing better is known."""
    return lambda site, values: (
        _uniform(site, values) if all(isinstance(one, Const) for one in values) else rule(site, values)
    )


def _first(change: Callable[[Site, Rows], Value]) -> Rule:
    """Make a rule of what becomes of rows, for equations that are linear in operand 0 and in which others are numbers."""

    def rule(site: Site, values: Sequence[Clean]) -> list[Value]:
        value, others = values[0], values[1:]
        if not all(isinstance(one, Const) and (one.anywhere or not one.varies) for one in others):
            return [site.mixed() if isinstance(value, Sum) else site.mixed("unknown")] * site.num_outs
        if isinstance(value, Sum):
            return [value] * site.num_outs
        if isinstance(value, Const):
            return _opaque(site, values) if value.varies else [value._replace(values=None)] * site.num_outs
        assert isinstance(value, Rows)
        if value.own or (site.name in NONLINEAR and value.plus):
            return [not_linear(site, values) if value.plus else site.mixed()] * site.num_outs
        return [value if value.loop is not None else change(site, value)] * site.num_outs

    return rule


NONLINEAR = frozenset(["reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin", "sort", "top_k", "cummax", "cummin", "cumprod", "cumlogsumexp", "reduce_xor", "fft"])  # fmt: skip


# --- moving entries ---------------------------------------------------------------------------------------------------


def _rows_of_constant(site: Site, values: Sequence[Value]) -> Sequence[Value] | None:
    """Return a constant that is the same for every row as such rows, where reshape merges them with what differs."""
    value = values[0] if values else None
    if site.name != "reshape" or not isinstance(value, Const) or value.varies or value.anywhere:
        return None
    dims = sorted(scaled(site.ins()))
    if len(dims) != 1 or (value.values is not None and all(one.size == 1 for one in value.values)):
        return None
    times = {shape[dims[0]] / rows for shape, rows in zip(site.ins(), site.num_rows, strict=True)}
    if len(times) > 1 or times != {int(next(iter(times)))}:
        return None
    rows = Rows(dims[0], value.degree, before=int(times.pop()))
    moved = _reshaped(site, rows)
    uniform = isinstance(moved, Rows) and moved.after == 1 and moved.before == rows.before
    return None if uniform else [rows]


def _reshape(site: Site, values: Sequence[Clean]) -> list[Value]:
    value = values[0]
    if isinstance(value, Sum):
        return [value]
    if isinstance(value, Const):
        return [value._replace(values=None, varies=scaled(site.outs()) if value.varies else frozenset())]
    assert isinstance(value, Rows)
    if value.own:
        return [site.mixed("unknown")]
    return [value if value.loop is not None else _reshaped(site, value)]


def _reshaped(site: Site, value: Rows) -> Value:
    """Find the dim that the rows come to lie in: as many entries before and after them as there were."""
    ins, outs = site.ins(), site.outs()
    assert value.dim is not None
    for dim in range(len(outs[0])):
        places = set()
        for old, new, rows in zip(ins, outs, site.num_rows, strict=True):
            before, after = math.prod(old[: value.dim]) * value.before, math.prod(old[value.dim + 1 :]) * value.after
            outer, inner = math.prod(new[:dim]), math.prod(new[dim + 1 :])
            fits = outer and inner and before % outer == 0 and after % inner == 0
            fits = fits and new[dim] == (before // outer) * rows * (after // inner)
            places.add((before // outer, after // inner) if fits else None)
        if len(places) == 1 and None not in places:
            before, after = places.pop()  # pyright: ignore[reportGeneralTypeIssues]
            return value._replace(dim=dim, before=before, after=after)
    return site.mixed("unknown")


def _broadcast(site: Site, values: Sequence[Clean]) -> list[Value]:
    value, new = values[0], site.params["broadcast_dimensions"]
    if isinstance(value, Const):
        return [value._replace(values=None, varies=frozenset(new[dim] for dim in value.varies))]
    if isinstance(value, Rows) and value.dim is not None:
        last = new[-1] == len(site.outs()[0]) - 1 and len(site.outs()[0]) > len(new) - 1
        if value.own and not last:
            return [site.mixed("unknown")]
        return [value._replace(dim=new[value.dim])]
    return [value]


def _transpose(site: Site, values: Sequence[Clean]) -> list[Value]:
    value, order = values[0], site.params["permutation"]
    if isinstance(value, Const):
        return [value._replace(values=None, varies=frozenset(order.index(dim) for dim in value.varies))]
    if isinstance(value, Rows) and value.dim is not None:
        return [site.mixed("unknown") if value.own else value._replace(dim=order.index(value.dim))]
    return [value]


def _squeeze(site: Site, values: Sequence[Clean]) -> list[Value]:
    value, gone = values[0], site.params["dimensions"]
    left = lambda dim: dim - sum(one < dim for one in gone)  # noqa: E731
    if isinstance(value, Const):
        return [value._replace(values=None, varies=frozenset(left(dim) for dim in value.varies))]
    if isinstance(value, Rows) and value.dim is not None:
        return [site.mixed("unknown") if value.own else value._replace(dim=left(value.dim))]
    return [value]


def _slice(site: Site, value: Rows) -> Value:
    """Return rows of which part of the batch's repetitions are taken; other slices of rows go by position."""
    dim, taken = value.dim, set()
    assert dim is not None
    for k, shape in enumerate(site.ins()):
        params = site.eqns[k].params
        start, stop, strides = params["start_indices"][dim], params["limit_indices"][dim], params["strides"]
        unit = site.num_rows[k] * value.after
        if (strides is not None and strides[dim] != 1) or start % unit or stop % unit or start == stop:
            whole = (start, stop) == (0, shape[dim]) and (strides is None or strides[dim] == 1)
            taken.add(value.before if whole else None)
        else:
            taken.add((stop - start) // unit)
    before = taken.pop()
    return site.mixed() if taken or before is None else value._replace(before=before)


def _dynamic_slice(site: Site, value: Rows) -> Value:
    assert value.dim is not None
    whole = all(old[value.dim] == new[value.dim] for old, new in zip(site.ins(), site.outs(), strict=True))
    return value if whole else site.mixed("unknown")


def _pad(site: Site, values: Sequence[Clean]) -> list[Value]:
    value, padding = values
    if not isinstance(padding, Const):
        return [site.mixed("unknown")]
    if isinstance(value, Const):
        return _opaque(site, values)
    if isinstance(value, Sum):
        return [joined(site, [value, padding])]
    if value.dim is not None and any(any(p["padding_config"][value.dim]) for p in (e.params for e in site.eqns)):
        return [site.mixed()]
    joint = elementwise(_As(site, "add"), [value, padding])[0]
    return [joint]


class _As(Site):
    """An equation under the name of one that is linear in the same way."""

    def __init__(self, site: Site, name: str):
        super().__init__(site.eqns, site.num_rows, site.callers)
        self.name = name


def _concatenate(site: Site, values: Sequence[Clean]) -> list[Value]:
    along = site.params["dimension"]
    rows = [value for value in values if isinstance(value, Rows)]
    if not rows:
        if any(isinstance(value, Sum) for value in values):
            return [joined(site, values)]
        consts = [value for value in values if isinstance(value, Const)]
        varies = frozenset[int]().union(*(one.varies for one in consts))
        lengths = {shape[along] for i in range(len(values)) for shape in site.ins(i)}
        differs = along in scaled(site.outs()) and len(lengths) > 0
        found = const(site, consts, _alike(site, consts))
        return [found if found.anywhere else found._replace(varies=varies | ({along} if differs else set()))]
    if rows[0].dim == along:
        return [_one_after_the_other(site, values, along)]
    last, own = along == len(site.outs()[0]) - 1, set()
    start, plain = 0, []
    for i, value in enumerate(values):
        width = site.ins(i)[0][along]
        if last and isinstance(value, Const) and rows[0].dim is not None and _row_numbers(site, i, value, rows[0].dim):
            own |= set(range(start, start + width))
        elif isinstance(value, Rows) and value.own:
            own |= {start + one for one in value.own} if last else {-1}
            plain.append(value._replace(own=frozenset()))
        else:
            plain.append(value)
        start += width
    found = elementwise(_As(site, "add"), plain)[0]
    return [found._replace(own=frozenset(own)) if isinstance(found, Rows) else found]


def _alike(site: Site, values: Sequence[Const]) -> Degree:
    degrees = [one.degree for one in values if not one.zero]
    return (degrees[0] if same(*degrees) else (math.nan,) * len(site.none)) if degrees else site.none


def _row_numbers(site: Site, operand: int, value: Const, dim: int) -> bool:
    """Whether a constant is 0, 1, 2, ... along a dim."""
    if value.values is None or value.varies != {dim}:
        return False
    for shape, numbers in zip(site.ins(operand), value.values, strict=True):
        if numbers.size != shape[dim] or not np.array_equal(numbers.reshape(-1), np.arange(shape[dim])):
            return False
    return True


def _one_after_the_other(site: Site, values: Sequence[Clean], along: int) -> Value:
    before, plain = 0, []
    after = next(value.after for value in values if isinstance(value, Rows))
    for i, value in enumerate(values):
        sizes = {shape[along] / (rows * after) for shape, rows in zip(site.ins(i), site.num_rows, strict=True)}
        if len(sizes) > 1 or not (size := sizes.pop()).is_integer() or isinstance(value, Sum):
            return site.mixed()
        if isinstance(value, Rows) and (value.dim, value.after) != (along, after):
            return site.mixed()
        before += int(size)
        plain.append(value._replace(before=1) if isinstance(value, Rows) else value)
    found = elementwise(_As(site, "add"), plain)[0]
    return found._replace(before=before) if isinstance(found, Rows) else found


def _split(site: Site, values: Sequence[Clean]) -> list[Value]:
    value = values[0]
    if not isinstance(value, Rows) or value.dim != site.params["axis"]:
        return _first(lambda site, rows: rows)(site, values)
    if value.own:
        return [site.mixed("unknown")] * site.num_outs
    parts: list[Value] = []
    for lengths in zip(*site.param("sizes"), strict=True):  # of which each may be some of the batch's repetitions
        times = {length / (rows * value.after) for length, rows in zip(lengths, site.num_rows, strict=True)}
        whole = len(times) == 1 and next(iter(times)).is_integer()
        parts.append(value._replace(before=int(times.pop())) if whole else site.mixed())
    return parts


def _stack(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Join along a new dim."""
    joint, axis = elementwise(_As(site, "add"), values)[0], site.params["axis"]
    if isinstance(joint, Rows) and joint.dim is not None:
        return [joint._replace(dim=joint.dim + (joint.dim >= axis))]
    if isinstance(joint, Const):
        return [joint._replace(varies=frozenset(dim + (dim >= axis) for dim in joint.varies))]
    return [joint]


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduce_sum(site: Site, values: Sequence[Clean]) -> list[Value]:
    return [summed(site, values[0], site.params["axes"])]


def _reduce(site: Site, values: Sequence[Clean]) -> list[Value]:
    axes, value = site.params["axes"], values[0]
    if isinstance(value, Const):
        left = {dim: dim - sum(one < dim for one in axes) for dim in value.varies if dim not in axes}
        return [value._replace(values=None, varies=frozenset(left.values()))] * site.num_outs
    if isinstance(value, Sum) or value.plus:
        return [not_linear(site, values)] * site.num_outs
    if value.dim in axes or value.own:
        return [site.mixed()] * site.num_outs
    dim = None if value.dim is None else value.dim - sum(one < value.dim for one in axes)
    return [value._replace(dim=dim)] * site.num_outs


def _along(name: str) -> Rule:
    """Make a rule for what runs along one dim: fine unless that is the dim of rows."""

    def rule(site: Site, values: Sequence[Clean]) -> list[Value]:
        along = site.params[name]
        dims = set(along) if isinstance(along, tuple) else {along}
        linear = site.name in ("cumsum", "rev")
        if all(isinstance(value, Const) for value in values):
            return _opaque(site, values)
        if any(isinstance(value, Sum) or (isinstance(value, Rows) and value.plus) for value in values):
            keeps = linear and isinstance(values[0], Sum)
            return [values[0] if keeps else not_linear(site, values)] * site.num_outs
        joint = elementwise(_As(site, "select_all"), values)[0] if len(values) > 1 else values[0]
        if isinstance(joint, Rows) and (joint.dim in dims or joint.own):
            joint = site.mixed()
        return [joint] * site.num_outs

    return rule


def _top_k(site: Site, values: Sequence[Clean]) -> list[Value]:
    value = values[0]
    along = site.params.get("axis", -1) % len(site.ins()[0])
    if isinstance(value, Sum) or (isinstance(value, Rows) and value.plus):
        return [not_linear(site, values)] * site.num_outs
    if isinstance(value, Const):
        return _uniform(site, values)
    return [site.mixed() if value.dim == along or value.own else value] * site.num_outs


def _window(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Windows that slide over other dims than rows."""
    params = site.params

    def change(site: Site, value: Rows) -> Value:
        dim = value.dim
        assert dim is not None
        alone = params["window_dimensions"][dim] == 1 and params["window_strides"][dim] == 1
        alone = alone and tuple(params["padding"][dim]) == (0, 0)
        return value if alone and not value.plus else site.mixed()

    rows = [value for value in values if isinstance(value, Rows)]
    if len(rows) == 2 and rows[0].place == rows[1].place:  # the gradient of a max pool
        return _first(change)(site, rows[:1])
    return _first(change)(site, values)


# --- products ---------------------------------------------------------------------------------------------------------


def _dot_general(site: Site, values: Sequence[Clean]) -> list[Value]:
    (left_sum, right_sum), (left_batch, right_batch) = site.params["dimension_numbers"]
    ndims = len(site.ins(0)[0]), len(site.ins(1)[0])
    free = [
        [dim for dim in range(ndim) if dim not in (*sums, *batch)]
        for ndim, sums, batch in ((ndims[0], left_sum, left_batch), (ndims[1], right_sum, right_batch))
    ]
    sums, batches = (left_sum, right_sum), (left_batch, right_batch)

    def out(side: int, dim: int) -> int:
        if dim in batches[side]:
            return batches[side].index(dim)
        return len(left_batch) + (len(free[0]) if side else 0) + free[side].index(dim)

    contracted = [dim for dim in left_sum if dim in scaled(site.ins(0))]
    degree = add(values[0].degree, values[1].degree)

    def grown(but: int | None = None) -> Degree:
        return add(degree, growth(site.ins(0), [dim for dim in contracted if dim != but]))

    if all(isinstance(value, Const) for value in values):
        consts = [value for value in values if isinstance(value, Const)]
        varies = {out(side, dim) for side in (0, 1) for dim in consts[side].varies if dim not in sums[side]}
        positional = any(dim in consts[side].varies for side in (0, 1) for dim in sums[side])
        anywhere = any(one.anywhere for one in consts)
        op = next((one.op for one in consts if one.varies), site.op)
        degree = (math.nan,) * len(degree) if positional and not anywhere else grown()
        return [Const(degree, frozenset() if anywhere else frozenset(varies), anywhere, None, op)]
    if any(isinstance(value, Sum) or (isinstance(value, Rows) and value.plus) for value in values):
        consts = [value for value in values if isinstance(value, Const)]
        total = next((value for value in values if isinstance(value, Sum)), None)
        return [total._replace(degree=grown()) if total and consts else not_linear(site, values)]
    for value in values:
        if isinstance(value, Rows) and value.own:
            return [site.mixed()]
        if isinstance(value, Const) and value.varies and not value.anywhere:
            return [Mixed(value.op or site.op, why="position")]
    rows = [(side, value) for side, value in enumerate(values) if isinstance(value, Rows)]
    if len(rows) == 2:
        left, right = rows[0][1], rows[1][1]
        if left.loop is not None or right.loop is not None:
            return [left._replace(degree=grown()) if left.place == right.place else site.mixed()]
        if (left.before, left.after) != (right.before, right.after):
            return [site.mixed()]
        for mine, other, total in ((left_sum, right_sum, True), (left_batch, right_batch, False)):
            if left.dim in mine and right.dim in other and mine.index(left.dim) == other.index(right.dim):
                if total:
                    return [Sum(grown(left.dim), site.op)]
                return [left._replace(dim=out(0, left.dim), degree=grown())]
        return [site.mixed()]
    side, value = rows[0]
    if value.dim is None:
        return [value._replace(degree=grown())]
    if value.dim in sums[side]:
        return [Sum(grown(left_sum[sums[side].index(value.dim)]), site.op)]
    return [value._replace(dim=out(side, value.dim), degree=grown())]


def _conv(site: Site, values: Sequence[Clean]) -> list[Value]:
    numbers, params = site.params["dimension_numbers"], site.params
    left, right = values
    degree = add(left.degree, right.degree)
    if isinstance(left, Const) and isinstance(right, Const):
        return _uniform(site, values)
    if isinstance(left, Sum) and isinstance(right, Const):
        return [left._replace(degree=degree)]
    if isinstance(left, Rows) and isinstance(right, Const) and not left.plus and (right.anywhere or not right.varies):
        if left.dim is None:
            return [left._replace(degree=degree)]
        if left.dim == numbers.lhs_spec[0] and params["batch_group_count"] == 1:
            return [left._replace(dim=numbers.out_spec[0], degree=degree)]
    elif isinstance(left, Rows) and isinstance(right, Rows) and not (left.plus or right.plus):
        groups = params["batch_group_count"] == params["feature_group_count"] == 1
        alike = (left.before, left.after, left.loop) == (right.before, right.after, right.loop)
        if left.dim is None and right.dim is None and alike:
            return [left._replace(degree=degree)]
        if (left.dim, right.dim) == (numbers.lhs_spec[1], numbers.rhs_spec[1]) and groups and alike:
            return [Sum(degree, site.op)]  # the gradient of a kernel
    return [site.mixed("unknown")]


# --- looking up, and adding at indices --------------------------------------------------------------------------------


def _gather(site: Site, values: Sequence[Clean]) -> list[Value]:
    operand, indices = values
    numbers, sizes = site.params["dimension_numbers"], site.params["slice_sizes"]
    shape = site.outs()[0]
    if isinstance(operand, Const) and isinstance(indices, Const):
        return _uniform(site, values)
    if isinstance(indices, Sum) or (isinstance(indices, Rows) and indices.plus):
        return [not_linear(site, values)]
    if isinstance(operand, Sum):
        return [operand if isinstance(indices, Const) else site.mixed("unknown")]
    last = len(site.ins(1)[0]) - 1
    batch = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    kept = [
        dim
        for dim in range(len(sizes))
        if dim not in numbers.collapsed_slice_dims and dim not in numbers.operand_batching_dims
    ]

    if isinstance(operand, Const):
        assert isinstance(indices, Rows)
        if operand.varies and not operand.anywhere:
            return [Mixed(operand.op or site.op, why="position")]
        if indices.own or indices.dim == last:
            return [site.mixed("unknown")]
        dim = None if indices.dim is None else batch[indices.dim]
        return [indices._replace(dim=dim, degree=operand.degree)]

    assert isinstance(operand, Rows)
    if operand.own:
        return [site.mixed()]
    if operand.dim is None:
        fine = isinstance(indices, Const) or indices.place == operand.place
        return [operand if fine else site.mixed()]
    own = indices.own if isinstance(indices, Rows) else _own_columns(site, indices)
    by_number = {numbers.start_index_map[column]: column for column in own if column >= 0}
    if operand.dim in by_number and operand.dim in numbers.collapsed_slice_dims and set(by_number) == {operand.dim}:
        where = indices.dim if isinstance(indices, Rows) else _varying(indices)
        if where is None or (isinstance(indices, Rows) and indices.place[1:] != operand.place[1:]):
            return [site.mixed("unknown")]
        return [operand._replace(dim=batch[where])]
    if isinstance(indices, Rows):
        if operand.dim in numbers.operand_batching_dims and not indices.own:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
            if (paired, *operand.place[1:]) == indices.place:
                return [operand._replace(dim=batch[paired])]
        return [site.mixed()]
    if operand.dim in kept and all(
        eqn.params["slice_sizes"][operand.dim] == old[operand.dim]
        for eqn, old in zip(site.eqns, site.ins(), strict=True)
    ):
        if indices.varies and not indices.anywhere:
            return [Mixed(indices.op or site.op, why="position")]
        return [operand._replace(dim=numbers.offset_dims[kept.index(operand.dim)])]
    if operand.dim in numbers.operand_batching_dims and (indices.anywhere or not indices.varies):
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand.dim)]
        return [operand._replace(dim=batch[paired])]
    return [site.mixed()]


def _varying(indices: Const) -> int | None:
    return next(iter(indices.varies)) if len(indices.varies) == 1 else None


def _own_columns(site: Site, indices: Const) -> frozenset[int]:
    """Return which columns of constant indices are row numbers; none if any other varies along rows."""
    dim = _varying(indices)
    last = len(site.ins(1)[0]) - 1
    if dim is None or indices.values is None or dim == last:
        return frozenset()
    own = set()
    for column in range(site.ins(1)[0][last]):
        numbers = [value.take([min(column, value.shape[last] - 1)], last) for value in indices.values]
        if all(value.size == 1 for value in numbers):
            continue
        shapes = [(*shape[:last], 1) for shape in site.ins(1)]
        right = all(
            value.size == shape[dim] and np.array_equal(value.reshape(-1), np.arange(shape[dim]))
            for value, shape in zip(numbers, shapes, strict=True)
        )
        if not right and any(len(np.unique(value)) > 1 and value.shape[dim] > 1 for value in numbers):
            return frozenset()
        if right:
            own.add(column)
    return frozenset(own)


def _scatter(site: Site, values: Sequence[Clean]) -> list[Value]:
    operand, indices, updates = values
    numbers, adds = site.params["dimension_numbers"], site.name in ("scatter-add", "scatter_add", "scatter_sub")
    if all(isinstance(value, Const) for value in values):
        return _uniform(site, values) if _scatters_whole_rows(site) else _opaque(site, values)
    if isinstance(indices, Sum) or any(isinstance(value, Rows) and value.plus for value in values):
        return [not_linear(site, values)]
    if isinstance(operand, Sum) or isinstance(updates, Sum):
        if not isinstance(indices, Const) or isinstance(operand, Rows) or isinstance(updates, Rows):
            return [not_linear(site, values)]
        return [joined(site, [operand, updates])]
    ndim = len(site.ins(2)[0])
    batch = [dim for dim in range(ndim) if dim not in numbers.update_window_dims]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(len(site.ins(0)[0])) if dim not in inserted]
    rows = [value for value in (operand, indices, updates) if isinstance(value, Rows)]
    if any(row.loop is not None for row in rows):
        return [rows[0] if len({row.place for row in rows}) == 1 else site.mixed("unknown")]
    own = (
        indices.own if isinstance(indices, Rows) else _own_columns(site, indices) if isinstance(indices, Const) else ()
    )
    home = _home(operand, indices, own, numbers)
    if home is None and not isinstance(operand, Rows):  # rows are added up, wherever their indices say
        where = indices.dim if isinstance(indices, Rows) else None
        if isinstance(updates, Rows):
            expected = updates.dim in batch and where in (None, batch.index(updates.dim))
        else:
            expected = where is not None and not (isinstance(updates, Const) and updates.varies)
        same_rows = len({row.place[1:] for row in rows}) == 1
        if not (adds and expected and same_rows and not own) or (where is None and _position(indices)):
            return [site.mixed() if not adds else site.mixed("unknown")]
        total = Sum(updates.degree, site.op)
        return [joined(site, [total, operand])]
    dim = operand.dim if isinstance(operand, Rows) else home
    assert dim is not None
    windowed = dim in windows and dim not in numbers.scatter_dims_to_operand_dims
    if dim in windows:
        full = [s[dim] == u[numbers.update_window_dims[windows.index(dim)]]
                for s, u in zip(site.ins(0), site.ins(2), strict=True)]  # fmt: skip
        windowed = windowed or all(full)
    if windowed:
        at = numbers.update_window_dims[windows.index(dim)]
        fine = isinstance(indices, Const) and not _position(indices)
        place = at
    elif dim in numbers.operand_batching_dims:
        at = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
        fine, place = not own, batch[at]
        fine = fine and (not isinstance(indices, Rows) or indices.dim == at)
    else:
        columns = {numbers.scatter_dims_to_operand_dims[one] for one in own}
        at = indices.dim if isinstance(indices, Rows) else _varying(indices) if isinstance(indices, Const) else None
        fine = columns == {dim} and at is not None
        place = batch[at] if fine and at is not None else -1
    fine = fine and (not isinstance(updates, Rows) or updates.dim == place)
    fine = (
        fine and len({row.place[1:] for row in rows}) == 1 and not (isinstance(updates, Const) and _position(updates))
    )
    if not fine:
        return [site.mixed() if windowed or isinstance(operand, Rows) else site.mixed("unknown")]
    parts = [operand, updates._replace(dim=dim) if isinstance(updates, Rows) else updates]
    joint = elementwise(_As(site, "add"), [*parts])[0]
    if isinstance(joint, Const):
        assert isinstance(indices, Rows)
        joint = indices._replace(dim=dim, own=frozenset(), degree=joint.degree)
    return [joint]


def _scatters_whole_rows(site: Site) -> bool:
    """Return whether a scatter writes alike into every row: its windows are whole in the dims of rows, and start at none."""
    numbers = site.params["dimension_numbers"]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(len(site.ins(0)[0])) if dim not in inserted]
    return all(
        dim in windows
        and dim not in numbers.scatter_dims_to_operand_dims
        and all(
            s[dim] == u[numbers.update_window_dims[windows.index(dim)]]
            for s, u in zip(site.ins(0), site.ins(2), strict=True)
        )
        for dim in scaled(site.ins(0))
    )


def _position(value: Value) -> bool:
    return isinstance(value, Const) and bool(value.varies) and not value.anywhere


def _home(operand: Clean, indices: Clean, own: Sequence[int] | frozenset[int], numbers: Any) -> int | None:
    """Return the dim of the operand in which each row has a place of its own; None if rows meet there."""
    if isinstance(operand, Rows):
        return operand.dim
    if isinstance(indices, Rows) and indices.dim in numbers.scatter_indices_batching_dims:
        return numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(indices.dim)]
    columns = {numbers.scatter_dims_to_operand_dims[one] for one in own}
    return columns.pop() if len(columns) == 1 else None


def _dynamic_update_slice(site: Site, values: Sequence[Clean]) -> list[Value]:
    operand, update, *starts = values
    if not all(isinstance(one, Const) for one in starts):
        loops = [one for one in values if isinstance(one, Rows) and one.loop is not None]
        alike = loops and all(isinstance(one, Const) or one in loops for one in values)
        return [loops[0] if alike else site.mixed("unknown")]
    if isinstance(operand, Const) and isinstance(update, Const):
        return _opaque(site, values)
    if isinstance(operand, Rows) or isinstance(update, Rows):
        dim = next(one.dim for one in (operand, update) if isinstance(one, Rows))
        if dim is not None and any(old[dim] != new[dim] for old, new in zip(site.ins(0), site.ins(1), strict=True)):
            return [site.mixed("unknown")]
    return elementwise(_As(site, "add"), [operand, update])


# --- random numbers, linear algebra -----------------------------------------------------------------------------------


def _random(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Random numbers of a key for each row belong to that row; those of one key differ by position."""
    value = values[0]
    if isinstance(value, Rows):
        return [value] * site.num_outs
    return _opaque(site, values)


def _batched(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Linear algebra on the last two dims."""
    rows = [value for value in values if isinstance(value, Rows)]
    if any(isinstance(value, Sum) or (isinstance(value, Rows) and value.plus) for value in values):
        return [not_linear(site, values)] * site.num_outs
    if not rows:
        return _uniform(site, values)
    joint = elementwise(_As(site, "select_all"), values)[0]
    if isinstance(joint, Rows) and joint.dim is not None:
        leading = min(len(site.ins(i)[0]) for i in range(len(values))) - 2
        if joint.dim >= leading and not (site.name == "lu_pivots_to_permutation" and joint.dim == 0):
            return [site.mixed()] * site.num_outs
    return [joint] * site.num_outs


def _fft(site: Site, values: Sequence[Clean]) -> list[Value]:
    value = values[0]
    if isinstance(value, Rows):
        transformed = len(site.params["fft_lengths"])
        if value.plus or (value.dim is not None and value.dim >= len(site.ins()[0]) - transformed):
            return [site.mixed()]
    return [value] if not isinstance(value, Const) else _uniform(site, values)


def _keep(site: Site, values: Sequence[Clean]) -> list[Value]:
    """An identity of each operand."""
    return list(values)


def _iota(site: Site, values: Sequence[Clean]) -> list[Value]:
    return _opaque(site, values)


RULES: dict[str, Rule] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _first(_slice),
    "dynamic_slice": _first(_dynamic_slice),
    "pad": _pad,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "reduce_sum": _reduce_sum,
    **dict.fromkeys(["reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"], _reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along("axis")),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "top_k": _top_k,
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_scatter_add", "select_and_gather_add"], _consts(_window)),
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "gather": _gather,
    **dict.fromkeys(["scatter", "scatter-add", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max"], _scatter),
    "dynamic_update_slice": _dynamic_update_slice,
    **dict.fromkeys(["random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed", "random_clone"], _random),
    **dict.fromkeys(["cholesky", "eigh", "qr", "svd", "lu", "triangular_solve", "householder_product", "geqrf", "lu_pivots_to_permutation", "tridiagonal_solve", "eig", "schur"], _batched),
    "fft": _fft,
    "optimization_barrier": _keep,
    "iota": _iota,
}  # fmt: skip
