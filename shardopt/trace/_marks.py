"""Marks that layers leave in a trace for the analyses: jitted functions of a known kind, and named
values.

A layer calls a marked function, `marked(EXPERTS, f, top_k=2)(x)`. An analysis asks each equation
for its `mark_of`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from shardopt.trace._jaxprs import equations

T = TypeVar("T")


class Kind(str):
    """The kind of a marked function.

    It is also the name of the function in a trace. A function of this name that a user wrote has no
    mark: jax keeps the `Kind` itself as the name.
    """

    __slots__ = ()


POSITIONS = Kind("shardopt_positions")
"""The positions of a device's piece in its sequences."""
ATTENTION = Kind("shardopt_attention")
"""Attention over the positions of all devices along context. Its operands begin with query, key and
value.
"""
ROW_MAXIMUM = Kind("shardopt_row_maximum")
"""The largest absolute numbers over positions, of all devices along context."""
EXPERTS = Kind("shardopt_experts")
"""Experts of all devices, so that results are complete. `top_k` is the number of experts of a
token.
"""
GROUPED_PRODUCT = Kind("shardopt_grouped_product")
"""Each row times the matrix of its group. The rows come first among its operands."""
LOSS = Kind("shardopt_value_fn")
"""An evaluation of the loss in an optimizer's update; the loss is sharded already."""
_DATA = {
    POSITIONS: (),
    ATTENTION: (),
    ROW_MAXIMUM: (),
    EXPERTS: ("top_k",),
    GROUPED_PRODUCT: (),
    LOSS: (),
}
"""Kind -> the names of its data, sorted."""

OPENED = "shardopt_opened"
"""Named values: the arrays of a rounded weight where a product in 8 bits reads them."""
BLOCK_INPUT = "shardopt_block_input"
"""Named values: the input of a block."""
LOOKED_UP = "embedding"
"""Named values: the rows that `so.nn.embedding` looked up."""


class Mark(NamedTuple):
    """A marked function that an equation calls.

    Attributes:
      kind: its kind, one of the names above.
      operands: its operands.
      data: its data by name; empty after a transformation, such as a gradient, which drops numbers
        that nothing reads.
    """

    kind: str
    operands: Sequence[Var | Literal]
    data: dict[str, int]


def marked(kind: Kind, f: Callable[..., T], **data: int) -> Callable[..., T]:
    """Return `f` as a jitted function with a mark.

    In a trace, the data are literals among its operands.
    """
    assert tuple(sorted(data)) == _DATA[kind], (kind, data)

    def run(_: dict[str, int], *args: Any) -> T:
        return f(*args)

    run.__name__ = kind
    return functools.partial(jax.jit(run), data)


def mark_of(eqn: JaxprEqn) -> Mark | None:
    """Return the mark of the function that an equation calls.

    None if it calls none, or one without a mark.
    """
    kind = eqn.params.get("name")
    if not isinstance(kind, Kind) or eqn.primitive.name not in ("jit", "pjit"):
        return None
    names = _DATA[kind]
    values = [atom.val for atom in eqn.invars[: len(names)] if isinstance(atom, Literal)]
    if len(values) < len(names):
        return Mark(kind, eqn.invars, {})
    return Mark(
        kind,
        eqn.invars[len(names) :],
        {name: int(value) for name, value in zip(names, values, strict=True)},
    )


def has_mark(eqn: JaxprEqn, kind: str | None) -> bool:
    """Return whether an equation calls a function with a mark of this kind."""
    mark = mark_of(eqn)
    return mark is not None and mark.kind == kind


def marks_in(jaxpr: ClosedJaxpr | Jaxpr, kind: str) -> list[Mark]:
    """Return the marks of one kind in a trace, in order; calls inside of calls are included."""
    return [
        mark for eqn in equations(jaxpr) if (mark := mark_of(eqn)) is not None and mark.kind == kind
    ]


def value_name(primitive: Primitive, params: Mapping[str, Any]) -> str | None:
    """Return the name that `checkpoint_name` gives to a value; None for any other primitive."""
    return params["name"] if primitive.name == "name" else None


def named_values(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, list[ShapedArray]]:
    """Return name -> named values, in the order of the trace.

    Values in called jaxprs are included.
    """
    values_by_name: dict[str, list[ShapedArray]] = {}
    for eqn in equations(jaxpr):
        name = value_name(eqn.primitive, eqn.params)
        if name is not None:
            values_by_name.setdefault(name, []).append(eqn.outvars[0].aval)  # pyright: ignore[reportArgumentType]
    return values_by_name
