"""What equations that move or join entries do to rows: reshape, transpose, slice, concatenate and their like."""

import math
from collections.abc import Sequence

import numpy as np

from shardopt.separability.arithmetic import const, elementwise, joined
from shardopt.separability.rule_parts import As, linear_in_first, opaque
from shardopt.separability.values import Clean, Const, Degree, Rows, Site, Sum, Value, same, scaled


def rows_of_constant(site: Site, values: Sequence[Value]) -> Sequence[Value] | None:
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


def reshape(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Cut the dims anew."""
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


def broadcast(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Repeat along new dims."""
    value, new = values[0], site.params["broadcast_dimensions"]
    if isinstance(value, Const):
        return [value._replace(values=None, varies=frozenset(new[dim] for dim in value.varies))]
    if isinstance(value, Rows) and value.dim is not None:
        last = new[-1] == len(site.outs()[0]) - 1 and len(site.outs()[0]) > len(new) - 1
        if value.own and not last:
            return [site.mixed("unknown")]
        return [value._replace(dim=new[value.dim])]
    return [value]


def transpose(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Exchange dims."""
    value, order = values[0], site.params["permutation"]
    if isinstance(value, Const):
        return [value._replace(values=None, varies=frozenset(order.index(dim) for dim in value.varies))]
    if isinstance(value, Rows) and value.dim is not None:
        return [site.mixed("unknown") if value.own else value._replace(dim=order.index(value.dim))]
    return [value]


def squeeze(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Leave dims of size 1 out."""
    value, gone = values[0], site.params["dimensions"]
    left = lambda dim: dim - sum(one < dim for one in gone)  # noqa: E731
    if isinstance(value, Const):
        return [value._replace(values=None, varies=frozenset(left(dim) for dim in value.varies))]
    if isinstance(value, Rows) and value.dim is not None:
        return [site.mixed("unknown") if value.own else value._replace(dim=left(value.dim))]
    return [value]


def slice_rows(site: Site, value: Rows) -> Value:
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


def dynamic_slice(site: Site, value: Rows) -> Value:
    """Take a slice whose place is a number."""
    assert value.dim is not None
    whole = all(old[value.dim] == new[value.dim] for old, new in zip(site.ins(), site.outs(), strict=True))
    return value if whole else site.mixed("unknown")


def pad(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Put a constant around."""
    value, padding = values
    if not isinstance(padding, Const):
        return [site.mixed("unknown")]
    if isinstance(value, Const):
        return opaque(site, values)
    if isinstance(value, Sum):
        return [joined(site, [value, padding])]
    if value.dim is not None and any(any(p["padding_config"][value.dim]) for p in (e.params for e in site.eqns)):
        return [site.mixed()]
    joint = elementwise(As(site, "add"), [value, padding])[0]
    return [joint]


def concatenate(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Join along a dim."""
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
    found = elementwise(As(site, "add"), plain)[0]
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
    found = elementwise(As(site, "add"), plain)[0]
    return found._replace(before=before) if isinstance(found, Rows) else found


def split(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Cut along a dim."""
    value = values[0]
    if not isinstance(value, Rows) or value.dim != site.params["axis"]:
        return linear_in_first(lambda site, rows: rows)(site, values)
    if value.own:
        return [site.mixed("unknown")] * site.num_outs
    parts: list[Value] = []
    for lengths in zip(*site.param("sizes"), strict=True):  # of which each may be some of the batch's repetitions
        times = {length / (rows * value.after) for length, rows in zip(lengths, site.num_rows, strict=True)}
        whole = len(times) == 1 and next(iter(times)).is_integer()
        parts.append(value._replace(before=int(times.pop())) if whole else site.mixed())
    return parts


def stack(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Join along a new dim."""
    joint, axis = elementwise(As(site, "add"), values)[0], site.params["axis"]
    if isinstance(joint, Rows) and joint.dim is not None:
        return [joint._replace(dim=joint.dim + (joint.dim >= axis))]
    if isinstance(joint, Const):
        return [joint._replace(varies=frozenset(dim + (dim >= axis) for dim in joint.varies))]
    return [joint]
