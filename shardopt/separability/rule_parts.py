"""What the rules of equations share: constants go through any of them alike, and many are linear in one operand."""

import math
from collections.abc import Callable, Sequence

from shardopt.separability.arithmetic import not_linear
from shardopt.separability.values import Clean, Const, Rows, Site, Sum, Value, same, scaled

Rule = Callable[[Site, Sequence[Clean]], list[Value]]


def opaque(site: Site, values: Sequence[Clean]) -> list[Value]:
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


def uniform(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Return the results, on constants, of an equation that treats every row alike: they vary only if operands do."""
    if any(isinstance(value, Const) and value.varies for value in values):
        return opaque(site, values)
    return [one._replace(varies=frozenset()) if isinstance(one, Const) else one for one in opaque(site, values)]


def on_rows(rule: Rule) -> Rule:
    """Leave constants to `opaque`, where nothing better is known."""
    return lambda site, values: (
        uniform(site, values) if all(isinstance(one, Const) for one in values) else rule(site, values)
    )


def linear_in_first(change: Callable[[Site, Rows], Value]) -> Rule:
    """Make a rule of what becomes of rows, for equations that are linear in operand 0 and in which others are numbers."""

    def rule(site: Site, values: Sequence[Clean]) -> list[Value]:
        value, others = values[0], values[1:]
        if not all(isinstance(one, Const) and (one.anywhere or not one.varies) for one in others):
            return [site.mixed() if isinstance(value, Sum) else site.mixed("unknown")] * site.num_outs
        if isinstance(value, Sum):
            return [value] * site.num_outs
        if isinstance(value, Const):
            return opaque(site, values) if value.varies else [value._replace(values=None)] * site.num_outs
        assert isinstance(value, Rows)
        if value.own or (site.name in NONLINEAR and value.plus):
            return [not_linear(site, values) if value.plus else site.mixed()] * site.num_outs
        return [value if value.loop is not None else change(site, value)] * site.num_outs

    return rule


NONLINEAR = frozenset(["reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin", "sort", "top_k", "cummax", "cummin", "cumprod", "cumlogsumexp", "reduce_xor", "fft"])  # fmt: skip


class As(Site):
    """An equation under the name of one that is linear in the same way."""

    def __init__(self, site: Site, name: str):
        super().__init__(site.eqns, site.num_rows, site.callers)
        self.name = name
