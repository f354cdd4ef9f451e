"""Rules that derive the label of a primitive's result from the labels of its operands.

A label describes a value that two traces have in common. A primitive without a rule is not known to
act element by element.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from shardopt.trace._jaxprs import SUMS, axes_of, shape_of
from shardopt.trace._primitives import ELEMENTWISE, IDENTITIES, words

SAME, ELEMENT, SUM, MAX, MIXED = "same", "element", "sum", "max", "mixed"
SHAPE = "shape"
"""Used instead of the name of a primitive where the two traces differ."""


class Label(NamedTuple):
    """The known facts about a value that both traces have, one for the whole leaf and one for a
    part of it.

    Attributes:
      kind: one of

        - SAME: the value is equal in both traces;
        - ELEMENT: an array with the elements in the order of the leaf. Each element depends only on
          the inputs at its index;
        - SUM, MAX: one number, the sum or the largest of the elements in the trace;
        - MIXED: none of these.
      primitives: the primitives that made a SUM, a MAX or a MIXED value.
      pad_value: the value wherever the inputs are 0, as they are in padding and in untouched rows;
        None if unknown.
      nonnegative: whether the value is known to be at least 0.
      leading_dims: for an ELEMENT, the number of dims before the dims of the leaf; None if all its
        elements are equal.
    """

    kind: str
    primitives: frozenset[str] = frozenset()
    pad_value: float | None = None
    nonnegative: bool = False
    leading_dims: int | None = 0

    def join(self, other: "Label") -> "Label":
        """Return the label of a value that is one of two values, if both traces choose the same
        one.
        """
        pad_value = self.pad_value if self.pad_value == other.pad_value else None
        nonnegative = self.nonnegative and other.nonnegative
        if MIXED in (self.kind, other.kind):
            return Label(MIXED, self.primitives | other.primitives)
        if self.kind == other.kind == SAME or (self.kind == other.kind and self.kind in (SUM, MAX)):
            return Label(self.kind, self.primitives | other.primitives, pad_value, nonnegative)
        if {self.kind, other.kind} <= {SAME, ELEMENT}:
            counts = _known_leading_dims([self, other])
            if len(counts) <= 1:
                return Label(
                    ELEMENT,
                    pad_value=pad_value,
                    nonnegative=nonnegative,
                    leading_dims=max(counts, default=None),
                )
        return mixed("cond", of=[self, other])


class LeafSplit(NamedTuple):
    """How a part was cut from its leaf: it is a shard over mesh axes, or it is some rows.

    Attributes:
      axis_names: the mesh axes over which leaves are flattened and sharded.
      by_rows: whether a part is some rows (dim 0) of a leaf instead. Operations within a row are
        then allowed. The inputs of rows outside the part are 0.
    """

    axis_names: frozenset[str] = frozenset()
    by_rows: bool = False


_ELEMENTWISE = ELEMENTWISE - {"bitcast_convert_type"}
"""Elementwise primitives, except casts of bits: cast to another width, equal elements become
elements that differ.

`threefry2x32` on counters draws random numbers, which `check_elementwise` refuses.
"""
OVER_AXES = SUMS | {"pmax", "pmin"}
_REDUCTIONS = words(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"
)
_COPIES = IDENTITIES | {"convert_element_type"}
_KEEPS_SUM = _COPIES | words(
    "add add_any sub neg reshape squeeze broadcast_in_dim concatenate stack reduce_sum"
)
_KEEPS_MAX = _COPIES | words("max reshape squeeze broadcast_in_dim concatenate stack reduce_max")
_KEEPS_ZERO = _COPIES | words(
    "abs asin atan cbrt ceil conj erf expm1 floor imag integer_pow log1p neg real reduce_precision"
    " round sign sin sinh sqrt square tan tanh"
)
_KEEPS_SIGN = _COPIES | {"max"}


def mixed(*names: str, of: Sequence[Label] = ()) -> Label:
    """Return the label MIXED, for a result of primitives that do not act element by element.

    Args:
      names: the primitives, used if no operand has primitives in its label.
      of: the labels of the operands.
    """
    primitives = frozenset[str]().union(*(label.primitives for label in of))
    return Label(MIXED, primitives or frozenset(names))


def _known_leading_dims(labels: Sequence[Label]) -> set[int]:
    """Return the numbers of leading dims in the labels of ELEMENTs, where they are known."""
    return {
        label.leading_dims
        for label in labels
        if label.kind == ELEMENT and label.leading_dims is not None
    }


def result_of(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label:
    """Return the label of the result of one primitive, given the labels of its operands."""
    name, kinds = whole_eqn.primitive.name, {label.kind for label in labels}
    if (name in _MOVES and ELEMENT in kinds) or (name == "broadcast_in_dim" and kinds == {SAME}):
        result = _MOVES[name](whole_eqn, part_eqn, labels, split)
        return mixed(name, of=labels) if result is None else result
    if MIXED in kinds or not same_params(whole_eqn, part_eqn):
        return mixed(name, of=labels)
    if kinds & {SUM, MAX}:
        return _of_partial(whole_eqn, labels)
    if ELEMENT not in kinds:
        is_same = _shapes(whole_eqn.invars) == _shapes(part_eqn.invars) and _shapes(
            whole_eqn.outvars
        ) == _shapes(part_eqn.outvars)
        pad_value = _pad_value(whole_eqn, labels) if name in _ELEMENTWISE else None
        return (
            Label(SAME, pad_value=pad_value, nonnegative=_is_nonnegative(whole_eqn, labels))
            if is_same
            else mixed(name)
        )
    return _elementwise(whole_eqn, part_eqn, labels, split) if name in _ELEMENTWISE else mixed(name)


def _elementwise(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label:
    name, counts = whole_eqn.primitive.name, _known_leading_dims(labels)
    in_place = [
        _is_in_place(eqn, i, label, split)
        for eqn in (whole_eqn, part_eqn)
        for i, label in enumerate(labels)
    ]
    if len(counts) > 1 or not all(in_place):
        return mixed(name)
    return Label(
        ELEMENT,
        pad_value=_pad_value(whole_eqn, labels),
        nonnegative=_is_nonnegative(whole_eqn, labels),
        leading_dims=max(counts, default=None),
    )


def _is_in_place(eqn: JaxprEqn, i: int, label: Label, split: LeafSplit) -> bool:
    """Return whether each element of the result depends only on the element of operand i at its
    index.

    An operand with the same value for all elements counts too.
    """
    shape, result = shape_of(eqn.invars[i]), shape_of(eqn.outvars[0])
    if label.kind == SAME:
        # If it is as large as the result in both traces, the part is the whole leaf.
        return math.prod(shape) == 1 or shape == result or (split.by_rows and shape[0] == 1)
    return (
        label.leading_dims is None or shape == result or (split.by_rows and shape[:1] == result[:1])
    )


def _of_partial(eqn: JaxprEqn, labels: list[Label]) -> Label:
    """Return the label of a result that depends on a partial sum or maximum.

    The result is again a SUM or MAX if a collective can still complete it.
    """
    name = eqn.primitive.name
    partial = next(label for label in labels if label.kind in (SUM, MAX))
    labels = [
        _single_element_as(atom, label, partial.kind)
        for atom, label in zip(eqn.invars, labels, strict=True)
    ]
    primitives = frozenset[str]().union(*(label.primitives for label in labels))
    other_labels = [label for label in labels if label.kind != partial.kind]
    if any(label.kind != SAME for label in other_labels):
        return Label(MIXED, primitives)
    if partial.kind == MAX:
        return Label(MAX if name in _KEEPS_MAX else MIXED, primitives)
    if name in ("mul", "div"):
        return Label(
            SUM if len(other_labels) == 1 and (name == "mul" or labels[0].kind == SUM) else MIXED,
            primitives,
        )
    # A cast to integers rounds each partial sum, not the total.
    is_sum = (
        name in _KEEPS_SUM
        and _is_inexact(eqn.outvars[0])
        and all(label.pad_value == 0 for label in other_labels)
    )
    return Label(SUM if is_sum else MIXED, primitives)


def _single_element_as(atom: Var | Literal, label: Label, kind: str) -> Label:
    """Return the label `kind` (SUM or MAX) for a single element, and any other label unchanged.

    A leaf with a single element is 0 on all shards except one, so the element is its own partial
    sum.
    """
    is_single = (
        label.kind == ELEMENT
        and _size(atom) == 1
        and label.pad_value == 0
        and (kind == SUM or label.nonnegative)
    )
    return (
        Label(kind, frozenset(["reduce_sum" if kind == SUM else "reduce_max"]))
        if is_single
        else label
    )


def over_axes(eqn: JaxprEqn, atom: Var | Literal, label: Label, split: LeafSplit) -> Label:
    """Return the label of the result of a sum, maximum or minimum over mesh axes."""
    name, axes = eqn.primitive.name, axes_of(eqn)
    if axes & split.axis_names and name in (*SUMS, "pmax"):
        label = _single_element_as(atom, label, SUM if name in SUMS else MAX)
    matches = (label.kind == SUM and name in SUMS) or (label.kind == MAX and name == "pmax")
    if not axes & split.axis_names:  # a collective over other axes acts element by element
        is_known = matches or label.kind in (SAME, ELEMENT)
        pad_value = 0.0 if label.pad_value == 0 else None
        return label._replace(pad_value=pad_value) if is_known else mixed(name, of=[label])
    covers_all_axes = axes >= split.axis_names and eqn.params.get("axis_index_groups") is None
    return (
        Label(SAME, nonnegative=label.kind == MAX)
        if matches and covers_all_axes
        else mixed(name, of=[label])
    )


# Rules of primitives that move or join elements. A rule takes the equations of both traces and the
# labels of the operands, and returns the label of the result; None for MIXED.


def _broadcast(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    label, dims = labels[0], whole_eqn.params["broadcast_dimensions"]
    old_shape, new_shape = shape_of(whole_eqn.invars[0]), shape_of(whole_eqn.outvars[0])
    if dims != part_eqn.params["broadcast_dimensions"]:
        return None
    if label.kind == SAME:
        if new_shape == shape_of(part_eqn.outvars[0]) and old_shape == shape_of(part_eqn.invars[0]):
            return label
        if old_shape == ():
            return label._replace(kind=ELEMENT, leading_dims=None)
        by_row = (
            split.by_rows and 0 not in dims and new_shape[1:] == shape_of(part_eqn.outvars[0])[1:]
        )
        return label._replace(kind=ELEMENT) if by_row else None
    if label.leading_dims is None:
        return label
    if split.by_rows:
        return label if dims[:1] == (0,) and new_shape[:1] == old_shape[:1] else None
    is_flat = label.leading_dims == 0 and all(
        _size(eqn.invars[0]) == _size(eqn.outvars[0]) for eqn in (whole_eqn, part_eqn)
    )
    return label if is_flat else None


def _reshape(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    if labels[0].leading_dims is None:
        return labels[0]
    keeps_rows = all(
        shape_of(eqn.invars[0])[:1] == shape_of(eqn.outvars[0])[:1] for eqn in (whole_eqn, part_eqn)
    )
    is_flat = labels[0].leading_dims == 0 and whole_eqn.params["dimensions"] is None
    return labels[0] if is_flat and (keeps_rows or not split.by_rows) else None


def _squeeze(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    label, dims = labels[0], whole_eqn.params["dimensions"]
    if dims != part_eqn.params["dimensions"]:
        return None
    if label.leading_dims is None or (
        label.leading_dims == 0 and not (split.by_rows and 0 in dims)
    ):
        return label
    if not all(dim < label.leading_dims for dim in dims):
        return None
    return label._replace(leading_dims=label.leading_dims - len(dims))


def _reduce(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    label, name, axes = labels[0], whole_eqn.primitive.name, whole_eqn.params["axes"]
    if not same_params(whole_eqn, part_eqn) or label.leading_dims not in (0, None):
        return None
    pad_value = 0.0 if label.pad_value == 0 and not name.startswith("arg") else None
    if axes == () or (split.by_rows and 0 not in axes):
        return label._replace(
            pad_value=pad_value, nonnegative=label.nonnegative and not name.startswith("arg")
        )
    if (
        label.pad_value != 0
        or name not in ("reduce_sum", "reduce_max")
        or (name == "reduce_max" and not label.nonnegative)
    ):
        return None  # padding, or missing rows, would change the result
    if split.by_rows:
        return Label(SAME, nonnegative=label.nonnegative)
    return (
        Label(SUM if name == "reduce_sum" else MAX, frozenset([name]))
        if shape_of(whole_eqn.outvars[0]) == ()
        else None
    )


def _product(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    """Apply to `dot_general` if it sums the product of two leaves over all elements, as a squared
    norm does.
    """
    is_sum = all(
        shape_of(eqn.outvars[0]) == () and shape_of(eqn.invars[0]) == shape_of(eqn.invars[1])
        for eqn in (whole_eqn, part_eqn)
    )
    (left_dims, right_dims), _ = whole_eqn.params["dimension_numbers"]
    are_flat = all(label.kind == ELEMENT and label.leading_dims in (0, None) for label in labels)
    if (
        not is_sum
        or left_dims != right_dims
        or not are_flat
        or all(label.pad_value != 0 for label in labels)
    ):
        return None
    return Label(SAME) if split.by_rows else Label(SUM, frozenset(["dot_general"]))


def _read_slot(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    """Apply to `ring[slot]`, a slice along leading dims only.

    The other dims are taken completely, so their start indices do not matter.
    """
    label, sizes = labels[0], whole_eqn.params["slice_sizes"]
    if label.kind == ELEMENT and label.leading_dims is None:
        return label
    num_leading = label.leading_dims if label.kind == ELEMENT else len(sizes)
    takes_all = all(
        shape_of(eqn.invars[0])[num_leading:] == eqn.params["slice_sizes"][num_leading:]
        and eqn.params["slice_sizes"][:num_leading] == sizes[:num_leading]
        for eqn in (whole_eqn, part_eqn)
    )
    is_same = all(start.kind == SAME for start in labels[1 : 1 + (num_leading or 0)])
    return label if label.kind in (SAME, ELEMENT) and takes_all and is_same else None


def _write_slot(
    whole_eqn: JaxprEqn, part_eqn: JaxprEqn, labels: list[Label], split: LeafSplit
) -> Label | None:
    """Apply to `ring.at[slot].set(x)`, along leading dims only."""
    ring, slot, new_elements = labels
    if ring.kind not in (SAME, ELEMENT):
        return None
    numbers, ndim = whole_eqn.params["dimension_numbers"], len(shape_of(whole_eqn.invars[2]))
    num_leading = len(shape_of(whole_eqn.invars[0])) - ndim
    leading_dims = tuple(range(num_leading))
    in_place = (
        numbers == part_eqn.params["dimension_numbers"]
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == leading_dims
        and numbers.update_window_dims == tuple(range(ndim))
        and shape_of(whole_eqn.invars[0])[num_leading:] == shape_of(whole_eqn.invars[2])
        and shape_of(part_eqn.invars[0])[num_leading:] == shape_of(part_eqn.invars[2])
    )
    fits = (
        (ring.kind == SAME or ring.leading_dims in (num_leading, None))
        and new_elements.kind == ELEMENT
        and new_elements.leading_dims in (0, None)
    )
    if not (in_place and fits and slot.kind == SAME):
        return None
    pad_value = ring.pad_value if ring.pad_value == new_elements.pad_value else None
    return Label(ELEMENT, pad_value=pad_value, leading_dims=num_leading)


_MOVES: dict[str, Callable[[JaxprEqn, JaxprEqn, list[Label], LeafSplit], Label | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _product,
    "dynamic_slice": _read_slot,
    "scatter": _write_slot,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}


def _pad_value(eqn: JaxprEqn, labels: Sequence[Label]) -> float | None:
    """Return the value of a primitive's result at padding; None if it is unknown."""
    name, pad_values = eqn.primitive.name, [label.pad_value for label in labels]
    if name in _COPIES and _is_inexact(eqn.outvars[0]):
        return pad_values[0]
    if (name in ("mul", "and") and 0 in pad_values) or (
        name in ("div", "rem") and pad_values[0] == 0
    ):
        return 0.0
    if name == "select_n":
        return pad_values[1] if len(set(pad_values[1:])) == 1 else None
    known = [pad_value for pad_value in pad_values if pad_value is not None]
    if len(known) < len(pad_values):
        return None
    if name in ("max", "min"):
        return max(known) if name == "max" else min(known)
    keeps_zero = name in _KEEPS_ZERO or name in (
        "add",
        "add_any",
        "sub",
        "or",
        "xor",
        "complex",
        "atan2",
    )
    return 0.0 if keeps_zero and not any(known) else None


def _is_nonnegative(eqn: JaxprEqn, labels: Sequence[Label]) -> bool:
    name = eqn.primitive.name
    if name in ("abs", "square", "sqrt", "exp") or (
        name == "integer_pow" and eqn.params["y"] % 2 == 0
    ):
        return True
    return name in _KEEPS_SIGN and all(label.nonnegative for label in labels)


# Functions that read equations.


def same_params(whole_eqn: JaxprEqn, part_eqn: JaxprEqn) -> bool:
    """Return whether two equations of one primitive have the same parameters."""
    if whole_eqn.params.keys() != part_eqn.params.keys() or any(
        body.consts for eqn in (whole_eqn, part_eqn) for body in bodies_of(eqn.params)
    ):
        return False
    return all(
        value is part_eqn.params[key] or str(value) == str(part_eqn.params[key])
        for key, value in whole_eqn.params.items()
    )


def bodies_of(params: dict[str, object]) -> list[ClosedJaxpr]:
    """Return the jaxprs among the parameters of a primitive."""
    return [value for value in params.values() if isinstance(value, ClosedJaxpr)]


def _is_inexact(atom: Var | Literal) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", jnp.float32), jnp.inexact)


def _size(atom: Var | Literal) -> int:
    return math.prod(shape_of(atom))


def _shapes(atoms: Sequence[Var | Literal]) -> list[tuple[int, ...]]:
    return [shape_of(atom) for atom in atoms]
