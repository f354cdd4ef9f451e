"""What equations that fold a dim do to rows: sums, extremes, sorts, windows, products and convolutions."""

import math
from collections.abc import Sequence

from shardopt.separability.arithmetic import elementwise, not_linear, summed
from shardopt.separability.rule_parts import As, Rule, linear_in_first, opaque, uniform
from shardopt.separability.values import Clean, Const, Degree, Mixed, Rows, Site, Sum, Value, add, growth, scaled


def reduce_sum(site: Site, values: Sequence[Clean]) -> list[Value]:
    """A sum over dims."""
    return [summed(site, values[0], site.params["axes"])]


def reduce(site: Site, values: Sequence[Clean]) -> list[Value]:
    """The largest, the smallest, a product and their like, over dims."""
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


def along(name: str) -> Rule:
    """Make a rule for what runs along one dim: fine unless that is the dim of rows."""

    def rule(site: Site, values: Sequence[Clean]) -> list[Value]:
        along = site.params[name]
        dims = set(along) if isinstance(along, tuple) else {along}
        linear = site.name in ("cumsum", "rev")
        if all(isinstance(value, Const) for value in values):
            return opaque(site, values)
        if any(isinstance(value, Sum) or (isinstance(value, Rows) and value.plus) for value in values):
            keeps = linear and isinstance(values[0], Sum)
            return [values[0] if keeps else not_linear(site, values)] * site.num_outs
        joint = elementwise(As(site, "select_all"), values)[0] if len(values) > 1 else values[0]
        if isinstance(joint, Rows) and (joint.dim in dims or joint.own):
            joint = site.mixed()
        return [joint] * site.num_outs

    return rule


def top_k(site: Site, values: Sequence[Clean]) -> list[Value]:
    """The largest entries along a dim."""
    value = values[0]
    along = site.params.get("axis", -1) % len(site.ins()[0])
    if isinstance(value, Sum) or (isinstance(value, Rows) and value.plus):
        return [not_linear(site, values)] * site.num_outs
    if isinstance(value, Const):
        return uniform(site, values)
    return [site.mixed() if value.dim == along or value.own else value] * site.num_outs


def window(site: Site, values: Sequence[Clean]) -> list[Value]:
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
        return linear_in_first(change)(site, rows[:1])
    return linear_in_first(change)(site, values)


def dot_general(site: Site, values: Sequence[Clean]) -> list[Value]:
    """A product of matrices: over the rows' dim it is a sum over rows."""
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


def conv(site: Site, values: Sequence[Clean]) -> list[Value]:
    """A convolution; rows lie in its batch dim, or are summed over in the gradient of a kernel."""
    numbers, params = site.params["dimension_numbers"], site.params
    left, right = values
    degree = add(left.degree, right.degree)
    if isinstance(left, Const) and isinstance(right, Const):
        return uniform(site, values)
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
