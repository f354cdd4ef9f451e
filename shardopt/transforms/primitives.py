"""What one primitive makes of elements: labels of its operands, in two traces, to the label of its result.

What is not listed here is not known to act element by element.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from shardopt.core.primitives import ELEMENTWISE, IDENTITIES

SAME, ELEMENT, SUM, MAX, MIXED = "same", "element", "sum", "max", "mixed"
SHAPE = "shape"
"""Stands among primitives for what the traces compute differently."""


class Label(NamedTuple):
    """What is known of a value that both traces have.

    Attributes:
      kind: SAME: the same value in both. ELEMENT: elements in the order of their leaf, each made of what is at its
        place. SUM, MAX: one number, of the elements that are there. MIXED: none of these.
      by: the primitives that made a SUM, a MAX or what is MIXED.
      pad: its value wherever the inputs are 0, where that is known: 0 is what padding and untouched rows hold.
      positive: whether it is known to be at least 0.
      lead: of an ELEMENT, how many dims stand before those of the leaf; None if all its elements are equal.
    """

    kind: str
    by: frozenset[str] = frozenset()
    pad: float | None = None
    positive: bool = False
    lead: int | None = 0


class Scope(NamedTuple):
    """What the parts are.

    Attributes:
      names: the mesh axes over which leaves are sharded, flat.
      rows: whether parts are some rows (dim 0) of a leaf instead: what happens within a row is then free, and the
        inputs of rows that are not there are 0.
    """

    names: frozenset[str] = frozenset()
    rows: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = ELEMENTWISE - {"bitcast_convert_type"}
"""Of equal elements bits of another width are not equal. Bits of counters (`threefry2x32`) are drawn, which is refused."""
PSUM = _names("psum psum2 psum_invariant")
OVER_AXES = PSUM | {"pmax", "pmin"}
_REDUCTIONS = _names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
_COPIES = IDENTITIES | {"convert_element_type"}
_KEEPS_SUM = _COPIES | _names("add add_any sub neg reshape squeeze broadcast_in_dim concatenate stack reduce_sum")
_KEEPS_MAX = _COPIES | _names("max reshape squeeze broadcast_in_dim concatenate stack reduce_max")
_KEEPS_ZERO = _COPIES | _names(
    "abs asin atan cbrt ceil conj erf expm1 floor imag integer_pow log1p neg real reduce_precision round sign sin sinh "
    "sqrt square tan tanh"
)
_KEEPS_SIGN = _COPIES | {"max"}


def mixed(*names: str, of: Sequence[Label] = ()) -> Label:
    """Return the label of what is made of these by primitives that do not act element by element."""
    known = frozenset[str]().union(*(label.by for label in of))
    return Label(MIXED, known or frozenset(names))


def join(a: Label, b: Label) -> Label:
    """Return the label of a value that is one of these, both traces choosing alike."""
    pad, positive = a.pad if a.pad == b.pad else None, a.positive and b.positive
    if MIXED in (a.kind, b.kind):
        return Label(MIXED, a.by | b.by)
    if a.kind == b.kind == SAME or (a.kind == b.kind and a.kind in (SUM, MAX)):
        return Label(a.kind, a.by | b.by, pad, positive)
    if {a.kind, b.kind} <= {SAME, ELEMENT}:
        leads = _leads([a, b])
        if len(leads) <= 1:
            return Label(ELEMENT, pad=pad, positive=positive, lead=max(leads, default=None))
    return mixed("cond", of=[a, b])


def _leads(labels: Sequence[Label]) -> set[int]:
    return {label.lead for label in labels if label.kind == ELEMENT and label.lead is not None}


def result_of(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label:
    """Return the label of what one primitive makes of known operands."""
    name, kinds = a.primitive.name, {label.kind for label in labels}
    if (name in _MOVES and ELEMENT in kinds) or (name == "broadcast_in_dim" and kinds == {SAME}):
        found = _MOVES[name](a, b, labels, scope)
        return mixed(name, of=labels) if found is None else found
    if MIXED in kinds or not same_params(a, b):
        return mixed(name, of=labels)
    if kinds & {SUM, MAX}:
        return _partial(a, labels)
    if ELEMENT not in kinds:
        is_same = _shapes(a.invars) == _shapes(b.invars) and _shapes(a.outvars) == _shapes(b.outvars)
        pad = _pad(a, labels) if name in _ELEMENTWISE else None
        return Label(SAME, pad=pad, positive=_positive(a, labels)) if is_same else mixed(name)
    return _elementwise(a, b, labels, scope) if name in _ELEMENTWISE else mixed(name)


def _elementwise(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label:
    name, leads = a.primitive.name, _leads(labels)
    in_place = [_in_place(x, i, label, scope) for x in (a, b) for i, label in enumerate(labels)]
    if len(leads) > 1 or not all(in_place):
        return mixed(name)
    return Label(ELEMENT, pad=_pad(a, labels), positive=_positive(a, labels), lead=max(leads, default=None))


def _in_place(a: JaxprEqn, i: int, label: Label, scope: Scope) -> bool:
    """Return whether an operand gives to each place of the result what is at this place, or the same to all."""
    shape, result = shape_of(a.invars[i]), shape_of(a.outvars[0])
    if label.kind == SAME:
        # as large as the result in both traces: the part is then all of the leaf
        return math.prod(shape) == 1 or shape == result or (scope.rows and shape[0] == 1)
    return label.lead is None or shape == result or (scope.rows and shape[:1] == result[:1])


def _partial(a: JaxprEqn, labels: list[Label]) -> Label:
    """Return the label of what is made of a sum, or the largest, of what is there: it may still be completed."""
    name = a.primitive.name
    found = next(label for label in labels if label.kind in (SUM, MAX))
    labels = [_of_one(x, label, found.kind) for x, label in zip(a.invars, labels, strict=True)]
    by = frozenset[str]().union(*(label.by for label in labels))
    others = [label for label in labels if label.kind != found.kind]
    if any(label.kind != SAME for label in others):
        return Label(MIXED, by)
    if found.kind == MAX:
        return Label(MAX if name in _KEEPS_MAX else MIXED, by)
    if name in ("mul", "div"):
        return Label(SUM if len(others) == 1 and (name == "mul" or labels[0].kind == SUM) else MIXED, by)
    # integers would be rounded one by one
    is_sum = name in _KEEPS_SUM and _is_inexact(a.outvars[0]) and all(label.pad == 0 for label in others)
    return Label(SUM if is_sum else MIXED, by)


def _of_one(x: Var | Literal, label: Label, kind: str) -> Label:
    """Return the label of an operand; an only element, 0 on all shards but one, is its own sum."""
    is_own = label.kind == ELEMENT and _size(x) == 1 and label.pad == 0 and (kind == SUM or label.positive)
    return Label(kind, frozenset(["reduce_sum" if kind == SUM else "reduce_max"])) if is_own else label


def over_axes(a: JaxprEqn, x: Var | Literal, label: Label, scope: Scope) -> Label:
    """Return the label of what a sum, maximum or minimum over mesh axes makes of a value."""
    name, axes = a.primitive.name, axes_of(a)
    if axes & scope.names and name in (*PSUM, "pmax"):
        label = _of_one(x, label, SUM if name in PSUM else MAX)
    matches = (label.kind == SUM and name in PSUM) or (label.kind == MAX and name == "pmax")
    if not axes & scope.names:  # element by element
        is_known = matches or label.kind in (SAME, ELEMENT)
        pad = 0.0 if label.pad == 0 else None
        return label._replace(pad=pad) if is_known else mixed(name, of=[label])
    is_all = axes >= scope.names and a.params.get("axis_index_groups") is None
    return Label(SAME, positive=label.kind == MAX) if matches and is_all else mixed(name, of=[label])


# What moves or joins elements: given both equations and the labels of operands, the label of the result or None.


def _broadcast(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    label, dims = labels[0], a.params["broadcast_dimensions"]
    before, after = shape_of(a.invars[0]), shape_of(a.outvars[0])
    if dims != b.params["broadcast_dimensions"]:
        return None
    if label.kind == SAME:
        if after == shape_of(b.outvars[0]) and before == shape_of(b.invars[0]):
            return label
        if before == ():
            return label._replace(kind=ELEMENT, lead=None)
        by_row = scope.rows and 0 not in dims and after[1:] == shape_of(b.outvars[0])[1:]
        return label._replace(kind=ELEMENT) if by_row else None
    if label.lead is None:
        return label
    if scope.rows:
        return label if dims[:1] == (0,) and after[:1] == before[:1] else None
    is_flat = label.lead == 0 and all(_size(x.invars[0]) == _size(x.outvars[0]) for x in (a, b))
    return label if is_flat else None


def _reshape(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    if labels[0].lead is None:
        return labels[0]
    keeps_rows = all(shape_of(x.invars[0])[:1] == shape_of(x.outvars[0])[:1] for x in (a, b))
    is_flat = labels[0].lead == 0 and a.params["dimensions"] is None
    return labels[0] if is_flat and (keeps_rows or not scope.rows) else None


def _squeeze(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    label, dims = labels[0], a.params["dimensions"]
    if dims != b.params["dimensions"]:
        return None
    if label.lead is None or (label.lead == 0 and not (scope.rows and 0 in dims)):
        return label
    return label._replace(lead=label.lead - len(dims)) if all(dim < label.lead for dim in dims) else None


def _reduce(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    label, name, axes = labels[0], a.primitive.name, a.params["axes"]
    if not same_params(a, b) or label.lead not in (0, None):
        return None
    pad = 0.0 if label.pad == 0 and not name.startswith("arg") else None
    if axes == () or (scope.rows and 0 not in axes):
        return label._replace(pad=pad, positive=label.positive and not name.startswith("arg"))
    if label.pad != 0 or name not in ("reduce_sum", "reduce_max") or (name == "reduce_max" and not label.positive):
        return None  # what is not there would count, or padding would
    if scope.rows:
        return Label(SAME, positive=label.positive)
    return Label(SUM if name == "reduce_sum" else MAX, frozenset([name])) if shape_of(a.outvars[0]) == () else None


def _product(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    """A product of leaves that is summed over all elements, such as a squared norm."""
    is_sum = all(shape_of(x.outvars[0]) == () and shape_of(x.invars[0]) == shape_of(x.invars[1]) for x in (a, b))
    (left, right), _ = a.params["dimension_numbers"]
    are_flat = all(label.kind == ELEMENT and label.lead in (0, None) for label in labels)
    if not is_sum or left != right or not are_flat or all(label.pad != 0 for label in labels):
        return None
    return Label(SAME) if scope.rows else Label(SUM, frozenset(["dot_general"]))


def _slot(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    """`ring[slot]`: along leading dims only. Where all of a dim is taken, its start does not matter."""
    label, sizes = labels[0], a.params["slice_sizes"]
    if label.kind == ELEMENT and label.lead is None:
        return label
    lead = label.lead if label.kind == ELEMENT else len(sizes)
    takes_all = all(
        shape_of(x.invars[0])[lead:] == x.params["slice_sizes"][lead:]
        and x.params["slice_sizes"][:lead] == sizes[:lead]
        for x in (a, b)
    )
    is_same = all(start.kind == SAME for start in labels[1 : 1 + (lead or 0)])
    return label if label.kind in (SAME, ELEMENT) and takes_all and is_same else None


def _set_slot(a: JaxprEqn, b: JaxprEqn, labels: list[Label], scope: Scope) -> Label | None:
    """`ring.at[slot].set(x)`, along leading dims only."""
    ring, where, new = labels
    if ring.kind not in (SAME, ELEMENT):
        return None
    numbers, ndim = a.params["dimension_numbers"], len(shape_of(a.invars[2]))
    lead = len(shape_of(a.invars[0])) - ndim
    leading = tuple(range(lead))
    in_place = (
        numbers == b.params["dimension_numbers"]
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == leading
        and numbers.update_window_dims == tuple(range(ndim))
        and shape_of(a.invars[0])[lead:] == shape_of(a.invars[2])
        and shape_of(b.invars[0])[lead:] == shape_of(b.invars[2])
    )
    fits = (ring.kind == SAME or ring.lead in (lead, None)) and new.kind == ELEMENT and new.lead in (0, None)
    pad = ring.pad if ring.pad == new.pad else None
    return Label(ELEMENT, pad=pad, lead=lead) if in_place and fits and where.kind == SAME else None


_MOVES: dict[str, Callable[[JaxprEqn, JaxprEqn, list[Label], Scope], Label | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _product,
    "dynamic_slice": _slot,
    "scatter": _set_slot,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}


def _pad(a: JaxprEqn, labels: Sequence[Label]) -> float | None:
    """Return what a primitive makes of the values at padding, where that is known."""
    name, pads = a.primitive.name, [label.pad for label in labels]
    if name in _COPIES and _is_inexact(a.outvars[0]):
        return pads[0]
    if (name in ("mul", "and") and 0 in pads) or (name in ("div", "rem") and pads[0] == 0):
        return 0.0
    if name == "select_n":
        return pads[1] if len(set(pads[1:])) == 1 else None
    known = [pad for pad in pads if pad is not None]
    if len(known) < len(pads):
        return None
    if name in ("max", "min"):
        return max(known) if name == "max" else min(known)
    keeps = name in _KEEPS_ZERO or name in ("add", "add_any", "sub", "or", "xor", "complex", "atan2")
    return 0.0 if keeps and not any(known) else None


def _positive(a: JaxprEqn, labels: Sequence[Label]) -> bool:
    name = a.primitive.name
    if name in ("abs", "square", "sqrt", "exp") or (name == "integer_pow" and a.params["y"] % 2 == 0):
        return True
    return name in _KEEPS_SIGN and all(label.positive for label in labels)


# Reading equations.


def axes_of(a: JaxprEqn) -> frozenset[str]:
    """Return the mesh axes that a primitive names."""
    found: list[object] = []
    for key in ("axes", "axis_name"):
        value = a.params.get(key, ())
        found += value if isinstance(value, tuple | list) else [value]
    return frozenset(name for name in found if isinstance(name, str))


def same_params(a: JaxprEqn, b: JaxprEqn) -> bool:
    """Return whether both are the same primitive with the same parameters."""
    if a.params.keys() != b.params.keys() or any(body.consts for x in (a, b) for body in bodies_of(x.params)):
        return False
    return all(value is b.params[key] or str(value) == str(b.params[key]) for key, value in a.params.items())


def bodies_of(params: dict[str, object]) -> list[ClosedJaxpr]:
    """Return the functions among a primitive's parameters."""
    return [value for value in params.values() if isinstance(value, ClosedJaxpr)]


def shape_of(x: Var | Literal) -> tuple[int, ...]:
    """Return the shape of an operand or a result."""
    return tuple(getattr(x.aval, "shape", ()))


def _is_inexact(x: Var | Literal) -> bool:
    return jnp.issubdtype(getattr(x.aval, "dtype", jnp.float32), jnp.inexact)


def _size(x: Var | Literal) -> int:
    return math.prod(shape_of(x))


def _shapes(operands: Sequence[Var | Literal]) -> list[tuple[int, ...]]:
    return [shape_of(x) for x in operands]
