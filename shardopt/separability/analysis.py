"""Follow rows through the trace of a loss: an abstract interpretation of its jaxpr, with those of `values`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardopt.core.jaxprs import CHECKPOINTS, scan_carry
from shardopt.separability.arithmetic import as_sum, joined, not_linear
from shardopt.separability.backward import cotangents, mixing, trace_backward
from shardopt.separability.folding import as_number
from shardopt.separability.rules import apply
from shardopt.separability.values import (
    Const,
    Mixed,
    Rows,
    Site,
    Sum,
    Value,
    degree_of,
    first_mixed,
    odd,
    same,
    scaled,
)

REMEDIES = ("shardopt_gather_batch", "shardopt_batch_mean", "shardopt_batch_sum")
"""Names of jitted functions whose results are equal on all devices."""
POSITIONS, ATTENTION = "shardopt_positions", "shardopt_attention"
"""Names of jitted functions that know where in a sequence the positions of a device are, and mix them as on one device."""

_CALLS = frozenset(
    [
        "pjit",
        "jit",
        "closed_call",
        "core_call",
        "remat",
        *CHECKPOINTS,
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "named_call",
        "custom_lin",
        "shard_map",
    ]
)
_COLLECTIVES = frozenset(
    [
        "psum",
        "psum2",
        "psum_invariant",
        "pmax",
        "pmin",
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "reduce_scatter",
        "psum_scatter",
        "all_to_all",
        "ppermute",
        "pgather",
        "unreduced_psum",
    ]
)
_MOST_ROUNDS = 8


class DifferentTracesError(Exception):
    """The loss does other things on another number of rows, so that its traces cannot be compared."""

    def __init__(self, eqn: JaxprEqn | None):
        super().__init__()
        self.eqn = eqn


@dataclasses.dataclass(frozen=True)
class Scope:
    """What holds in a whole analysis.

    Attributes:
      num_rows: the rows that the loss is given in each trace.
      row_axes: mesh axes that split rows, for collectives that the loss itself calls.
      sequence: whether the "rows" that are followed are the positions of sequences.
      backward: whether the loss is differentiated, so that backward rules of `jax.custom_vjp` count.
      callers: the calls that are being followed.
      rules: traces of backward rules, by the equation's id, since loops are followed several times.
    """

    num_rows: tuple[int, ...]
    row_axes: frozenset[str] = frozenset()
    sequence: bool = False
    backward: bool = False
    callers: tuple[JaxprEqn, ...] = ()
    rules: dict[int, list[ClosedJaxpr] | None] = dataclasses.field(default_factory=dict)

    def within(self, site: Site) -> "Scope":
        """Return the scope of what an equation calls."""
        return dataclasses.replace(self, callers=(*self.callers, site.eqns[0]))


def follow(scope: Scope, jaxprs: Sequence[Any], values: Sequence[Value]) -> list[Value]:
    """Return what is known of the results of a jaxpr, of which there is one a trace.

    Raises:
      DifferentTracesError: if the traces are not the same equations.
    """
    opened = [_opened(one) for one in jaxprs]
    env: dict[Any, Value] = dict(zip(opened[0].invars, values, strict=True))
    all_consts = [_consts(one) for one in jaxprs]
    if len({len(one) for one in all_consts}) > 1:
        raise DifferentTracesError(None)
    for var, *consts in zip(opened[0].constvars, *all_consts, strict=True):
        env[var] = _closed_over(scope, consts)
    if len({len(one.eqns) for one in opened}) > 1:
        pairs = zip(*(one.eqns for one in opened), strict=False)
        raise DifferentTracesError(next((eqns[0] for eqns in pairs if not _alike(eqns)), None))

    def read(atoms: Sequence[Any]) -> Value:
        if any(isinstance(atom, Literal) for atom in atoms):
            if not all(isinstance(atom, Literal) for atom in atoms):
                raise DifferentTracesError(None)
            return _closed_over(scope, [atom.val for atom in atoms])
        return env[atoms[0]]

    for eqns in zip(*(one.eqns for one in opened), strict=True):
        if not _alike(eqns):
            raise DifferentTracesError(eqns[0])
        site = Site(eqns, scope.num_rows, scope.callers)
        given = [read(atoms) for atoms in zip(*(eqn.invars for eqn in eqns), strict=True)]
        found = _results(scope, site, given)
        env.update(zip(eqns[0].outvars, found, strict=True))
    return [read(atoms) for atoms in zip(*(one.outvars for one in opened), strict=True)]


def _opened(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _consts(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if hasattr(jaxpr, "consts") else ()


def _alike(eqns: Sequence[JaxprEqn]) -> bool:
    kinds = {(eqn.primitive.name, len(eqn.invars), len(eqn.outvars)) for eqn in eqns}
    ndims = {tuple(len(getattr(var.aval, "shape", ())) for var in eqn.outvars) for eqn in eqns}
    return len(kinds) == 1 and len(ndims) == 1


def _closed_over(scope: Scope, consts: Sequence[Any]) -> Const:
    """Return a constant of the trace; large ones are looked at only where they differ in shape."""
    none = (0.0,) * (len(scope.num_rows) - 1)
    shapes = [tuple(np.shape(one)) if not hasattr(one, "shape") else tuple(one.shape) for one in consts]
    if any(one is not consts[0] for one in consts) or shapes[0] == ():
        local = all(not isinstance(one, jax.Array) or one.is_fully_addressable for one in consts)
        numbers = [as_number(one) for one in consts] if local else [None]
        if all(one is not None for one in numbers):
            known = tuple(one for one in numbers if one is not None)
            if not (varies := scaled(shapes)):
                return Const(degree_of(known, len(none)), values=known)
            return Const(none, varies, values=known)
    return Const(none, scaled(shapes))


def _results(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    if site.name == "scan":
        return _scan(scope, site, values)
    if site.name == "while":
        return _while(scope, site, values)
    if site.name == "cond":
        return _cond(scope, site, values)
    if site.name in _COLLECTIVES or site.name == "axis_index":
        return _collective(scope, site, values)
    if site.name == "custom_linear_solve":
        lengths, solve = site.params["const_lengths"], [one.solve for one in site.param("jaxprs")]
        start = lengths.matvec + lengths.vecmat
        given = [*values[start : start + lengths.solve], *values[sum(lengths) :]]
        return follow(scope.within(site), solve, given)
    if site.name in _CALLS:
        if site.params.get("name") in REMEDIES:
            return [_of_all_devices(site, value) for value in values]
        if scope.sequence and site.params.get("name") == POSITIONS:
            return [Const(site.none, anywhere=True)]
        if scope.sequence and site.params.get("name") == ATTENTION:
            return [_attention(site, values)]
        key = next((key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in site.params), None)
        if key is not None and len(_opened(site.params[key]).invars) == len(values):
            found = follow(scope.within(site), site.param(key), values)
            mixed = _backward(scope, site, values, found) if scope.backward and site.name == "custom_vjp_call" else None
            return found if mixed is None else [mixed] * len(found)
    return apply(site, values)


def _backward(scope: Scope, site: Site, values: Sequence[Value], results: Sequence[Value]) -> Mixed | None:
    """Return where the backward rule of a `jax.custom_vjp` mixes rows, as far as it can be followed."""
    sent = cotangents(site, results)
    if sent is None or all(isinstance(value, Const) and value.anywhere for value in values):
        return None
    if (at := id(site.eqns[0])) not in scope.rules:
        try:
            asks = any(name in str(site.params["call_jaxpr"]) for name in REMEDIES)  # the rule would, without a context
            scope.rules[at] = None if asks else [trace_backward(eqn) for eqn in site.eqns]
        except Exception:  # a rule that only works inside the loss: it closes over its tracers, or names mesh axes
            scope.rules[at] = None
    rules = scope.rules[at]
    if rules is None:
        return None
    try:
        return mixing(site, values, follow(scope.within(site), rules, [*values, *sent]))
    except DifferentTracesError:
        return None


def _of_all_devices(site: Site, value: Value) -> Value:
    """Return what `gather_batch`, `batch_mean` and `batch_sum` give: the same on all devices, so it acts as a constant.

    The traces have the same number of rows on all devices together, so a sum over these grows with nothing.
    """
    if isinstance(value, Mixed):
        return value
    if isinstance(value, Sum) or (isinstance(value, Rows) and value.plus):
        return not_linear(site, [value])
    if isinstance(value, Rows) and (value.dim != 0 or value.own):
        return site.mixed("unknown")
    return Const(value.degree, anywhere=True)


def _attention(site: Site, values: Sequence[Value]) -> Value:
    """Return what `so.nn.attention` gives of query, key, value [B, T, ...] and numbers of positions [B, T] or [T]."""
    if mixed := first_mixed(values):
        return mixed
    for i, value in enumerate(values):  # queries without positions would be taken for parts of a sequence
        positions = Rows(min(1, len(site.ins(i)[0]) - 1), site.none)  # [B, T, ...], or [T]
        fits = isinstance(value, Rows) and value._replace(degree=site.none) == positions
        if not fits and not (i > 2 and isinstance(value, Const)):
            return site.mixed("unknown")
    return Rows(1, site.none)


def _collective(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """The loss itself speaks to other devices: what all of them get is a constant of the step."""
    if mixed := first_mixed(values):
        return [mixed] * site.num_outs
    named = site.params.get("axes", site.params.get("axis_name", ()))
    axes = set(named) if isinstance(named, tuple | list | frozenset) else {named}
    if site.name == "axis_index" or (scope.row_axes and axes >= scope.row_axes):
        return [Const(site.none, anywhere=True)] * site.num_outs
    if not axes & scope.row_axes and site.name in ("psum", "psum2", "psum_invariant"):
        return values
    return [site.mixed("unknown")] * site.num_outs


# --- control flow -----------------------------------------------------------------------------------------------------


def _join(site: Site, a: Value, b: Value) -> Value:
    """Return what holds of a value that is one or the other."""
    if mixed := first_mixed([a, b]):
        return mixed
    if isinstance(a, Const) and isinstance(b, Const):
        if a is b:
            return a
        degree = b.degree if a.zero else a.degree if b.zero or same(a.degree, b.degree) else (math.nan,) * len(a.degree)
        anywhere = a.anywhere or b.anywhere
        equal = a.values is not None and b.values is not None and a.varies == b.varies
        equal = equal and all(np.array_equal(*pair) for pair in zip(a.values or (), b.values or (), strict=True))
        return Const(degree, a.varies | b.varies, anywhere, a.values if equal else None, a.op or b.op)
    if isinstance(a, Rows) and isinstance(b, Rows):
        alike = a.place == b.place and same(a.degree, b.degree) and a.own == b.own
        return a._replace(plus=a.plus or b.plus) if alike else site.mixed("unknown")
    if isinstance(a, Sum) and isinstance(b, Sum):
        return joined(site, [a, b])
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Const) and isinstance(other, Sum):
            return joined(site, [one, other])
        if isinstance(one, Const) and isinstance(other, Rows):
            if one.varies and not one.anywhere:
                return Mixed(one.op or site.op, why="position")
            return other if one.zero or same(one.degree, other.degree) else site.mixed("count")
    return site.mixed("unknown")


def _stable(a: Value, b: Value) -> bool:
    """Whether nothing new is known."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mixed):
        return True
    if isinstance(a, Const) and isinstance(b, Const):
        values = a.values is b.values or (a.values is not None and b.values is not None)
        return values and a.varies == b.varies and a.anywhere == b.anywhere and _equal_degrees(a, b)
    if isinstance(a, Rows) and isinstance(b, Rows):
        return a.place == b.place and a.own == b.own and bool(a.plus) == bool(b.plus) and _equal_degrees(a, b)
    return isinstance(a, Sum) and isinstance(b, Sum) and a.loop is b.loop and _equal_degrees(a, b)


def _equal_degrees(a: Any, b: Any) -> bool:
    return np.array_equal(a.degree, b.degree, equal_nan=True)


def _fixed_point(scope: Scope, site: Site, bodies: Sequence[Any], given: list[Value], carry: list[Value], xs: list[Value],
                 loop: object = None, *, counted: bool = False) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Return what holds of the carry before every turn of a loop, and of the other results of a turn.

    Where the number of turns grows with the rows (`counted`), so may every constant that a turn changes.
    """
    for _ in range(_MOST_ROUNDS):
        found = follow(scope.within(site), bodies, [*given, *carry, *xs])
        new, rest = found[: len(carry)], found[len(carry) :]
        after = []
        for before, now in zip(carry, new, strict=True):
            if loop is not None and isinstance(before, Const) and isinstance(now, Rows) and now.loop is loop:
                start = as_sum(site, before)  # each turn adds something of its row, or so it is hoped
                total = Sum(now.degree, site.op, loop)
                fits = start is None or same(start.degree, total.degree)
                after.append(total if fits else Mixed(site.op, why="count"))
            elif counted and isinstance(before, Const) and isinstance(now, Const) and before is not now:
                after.append(before._replace(degree=(math.nan,) * len(before.degree), values=None))
            else:
                after.append(_join(site, before, now))
        if all(_stable(a, b) for a, b in zip(carry, after, strict=True)):
            return after, rest
        carry = after
    return [site.mixed("unknown")] * len(carry), [site.mixed("unknown")] * (site.num_outs - len(carry))


def _scan(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    bodies = site.param("jaxpr")
    inner = _opened(bodies[0])
    num_carry, first = scan_carry(site.eqns[0], inner)
    given, carry, xs = values[:first], values[first : first + num_carry], values[first + num_carry :]
    counted = len(set(site.param("length"))) > 1
    loop, place, turns = None, (1, 1), []
    for x in xs:
        if isinstance(x, Const):
            if 0 in x.varies and not x.anywhere:
                turns.append(Mixed(x.op or site.op, why="unknown"))
                continue
            few = x.values if x.values is not None and all(one.shape[0] == 1 for one in x.values) else None
            squeezed = None if few is None else tuple(one[0] for one in few)
            turns.append(x._replace(varies=frozenset(dim - 1 for dim in x.varies), values=squeezed))
        elif isinstance(x, Rows) and x.dim == 0 and not x.own:
            if loop is not None and place != (x.before, x.after):
                turns.append(site.mixed())
                continue
            loop, place = loop or object(), (x.before, x.after)
            turns.append(x._replace(dim=None, before=1, after=1, loop=loop))
        elif isinstance(x, Rows) and x.dim is not None:
            turns.append(x._replace(dim=x.dim - 1))
        else:
            turns.append(x)
    carry, ys = _fixed_point(scope, site, bodies, given, carry, turns, loop, counted=counted)
    found: list[Value] = []
    for one in carry:
        if isinstance(one, Sum) and one.loop is loop:
            one = one._replace(loop=None)
        found.append(site.mixed() if isinstance(one, Rows) and loop is not None and one.loop is loop else one)
    for y in ys:
        if isinstance(y, Const):
            y = y._replace(varies=frozenset(dim + 1 for dim in y.varies), values=None)
        elif isinstance(y, Rows) and y.dim is not None:
            y = y._replace(dim=y.dim + 1)
        elif isinstance(y, Rows) and loop is not None and y.loop is loop:
            y = y._replace(dim=0, before=place[0], after=place[1], loop=None)
        elif isinstance(y, Sum) and loop is not None and y.loop is loop:
            y = site.mixed()
        found.append(y)
    return found


def _while(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    in_cond, in_body = site.params["cond_nconsts"], site.params["body_nconsts"]
    of_cond, of_body, start = values[:in_cond], values[in_cond : in_cond + in_body], values[in_cond + in_body :]
    conds, bodies = site.param("cond_jaxpr"), site.param("body_jaxpr")
    carry, _ = _fixed_point(scope, site, bodies, of_body, start, [])
    (goes_on,) = follow(scope.within(site), conds, [*of_cond, *carry])
    if isinstance(goes_on, Const) and not odd(goes_on.degree) and same(goes_on.degree, site.none):
        return carry
    if (
        isinstance(goes_on, Rows) and not goes_on.plus
    ):  # by a row: in a loop over rows, or in one that was mapped over them
        of_row = goes_on._replace(degree=site.none)
        moved = [a is not b for a, b in zip(start, carry, strict=True)]
        return [_join(site, one, of_row) if changed else one for one, changed in zip(carry, moved, strict=True)]
    why = Mixed(goes_on.op, site.op, "unknown") if isinstance(goes_on, Mixed) else site.mixed("unknown")
    return [first_mixed([one]) or why for one in carry]


def _cond(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    which, given = values[0], values[1:]
    branches = list(zip(*site.param("branches"), strict=True))
    if isinstance(which, Const) and which.values is not None and len({int(one) for one in which.values}) == 1:
        return follow(scope.within(site), branches[int(np.clip(which.values[0], 0, len(branches) - 1))], given)
    found = [follow(scope.within(site), branch, given) for branch in branches]
    results: list[Value] = []
    for outs in zip(*found, strict=True):
        one = outs[0]
        for other in outs[1:]:
            one = _join(site, one, other)
        results.append(one)
    if isinstance(which, Const):
        fine = same(which.degree, site.none) and not odd(which.degree)
        return results if fine else [site.mixed("count")] * len(results)
    if isinstance(which, Rows) and which.loop is not None:
        return [_join(site, one, which._replace(degree=site.none)) for one in results]
    why = which if isinstance(which, Mixed) else not_linear(site, values)
    return [first_mixed([one]) or why for one in results]
