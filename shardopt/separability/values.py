"""What is known of a value inside a loss: how it depends on the rows of the batch, and on how many there are.

A loss is traced twice, the second time on twice the rows (and half the devices, for what asks for the rows of all). The
traces are the same equations at other sizes. A dim that differs in size has rows in it, and a number that differs is a
function of their number: `degree` says with which power it grows, so 1/B has degree -1, and the mean is a sum of degree -1.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

Shape = tuple[int, ...]
Degree = tuple[float, ...]
"""Of each further trace: log2 of how much larger a value is there than in the first one; NaN if that is no power."""


class Op(NamedTuple):
    """An equation of the loss, to be named in a message.

    Attributes:
      eqn: the equation.
      callers: the calls that it is in, from outside: traces that jax keeps of its own functions do not say who called.
    """

    eqn: JaxprEqn
    callers: tuple[JaxprEqn, ...] = ()


class Const(NamedTuple):
    """Depends on no row: parameters, numbers, keys.

    Attributes:
      degree: how it grows with the number of rows.
      varies: dims of the size of rows along which it is not the same everywhere: a row's position would matter.
      anywhere: it may vary along rows: drawn from the key that each device has for itself, or gathered from all devices.
      values: the numbers in each trace where they follow from the trace alone; dims along which they are equal have size 1.
      op: what made it vary.
    """

    degree: Degree
    varies: frozenset[int] = frozenset()
    anywhere: bool = False
    values: tuple[np.ndarray, ...] | None = None
    op: Op | None = None

    @property
    def zero(self) -> bool:
        """Whether it is known to be 0."""
        return self.values is not None and not any(np.any(value) for value in self.values)


class Sum(NamedTuple):
    """B^degree times a sum over rows, of what follows from one row each, or the same plus a constant of the same size.

    Attributes:
      degree: -1 for a mean.
      op: what sums over rows.
      loop: of a sum under way: the loop over rows that makes it.
    """

    degree: Degree
    op: Op
    loop: object = None


class Rows(NamedTuple):
    """Entry i along a dim of size before * B * after follows from row i alone, in the same way for every i.

    Attributes:
      dim: which dim; None inside a loop over rows, of the row whose turn it is.
      degree: how it grows with the number of rows.
      before: how many times all rows come one after the other (two batches concatenated: 2).
      after: how many entries each row has there (tokens, merged with rows: their number).
      plus: a sum over rows that is added to every entry: still linear, as `x - mean(x)` before it is squared.
      own: which entries along the last dim are row numbers, as `indices` of `x[arange(B), labels]`.
      loop: the loop over rows, where dim is None.
    """

    dim: int | None
    degree: Degree
    before: int = 1
    after: int = 1
    plus: Sum | None = None
    own: frozenset[int] = frozenset()
    loop: object = None

    @property
    def place(self) -> tuple[Any, ...]:
        """What must be the same of values that are combined entry by entry."""
        return self.dim, self.before, self.after, self.loop


class Mixed(NamedTuple):
    """Several rows went into it in another way than a sum; or nobody can tell.

    Attributes:
      op: what mixes rows.
      use: what was done with a sum over rows that is not linear, if `op` is that sum.
      why: "mixes", "position", "count" (depends on the number of rows), "backward" (in a rule of `jax.custom_vjp`) or "unknown".
    """

    op: Op
    use: Op | None = None
    why: str = "mixes"


Clean = Const | Sum | Rows
Value = Clean | Mixed


class Site:
    """One equation, in every trace."""

    def __init__(self, eqns: Sequence[JaxprEqn], num_rows: Sequence[int], callers: tuple[JaxprEqn, ...] = ()):
        self.eqns, self.num_rows, self.callers = eqns, num_rows, callers
        self.name, self.params, self.op = eqns[0].primitive.name, eqns[0].params, Op(eqns[0], callers)

    def ins(self, i: int = 0) -> list[Shape]:
        """Return the shape of an operand in every trace."""
        return [_shape(eqn.invars[i].aval) for eqn in self.eqns]

    def outs(self, i: int = 0) -> list[Shape]:
        """Return the shape of a result in every trace."""
        return [_shape(eqn.outvars[i].aval) for eqn in self.eqns]

    @property
    def num_outs(self) -> int:
        """How many results it has."""
        return len(self.eqns[0].outvars)

    @property
    def none(self) -> Degree:
        """Growth of what does not grow."""
        return (0.0,) * (len(self.eqns) - 1)

    def mixed(self, why: str = "mixes") -> Mixed:
        """Return that rows are mixed here."""
        return Mixed(self.op, why=why)

    def param(self, name: str) -> list[Any]:
        """Return a parameter of the equation in every trace."""
        return [eqn.params[name] for eqn in self.eqns]


def _shape(aval: Any) -> Shape:
    return tuple(aval.shape) if hasattr(aval, "shape") else ()  # tokens have none


def scaled(shapes: Sequence[Shape]) -> frozenset[int]:
    """Return the dims that have rows in them: those of another size in another trace."""
    return frozenset(dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)


def growth(shapes: Sequence[Shape], dims: Sequence[int]) -> Degree:
    """Return how the number of entries along dims grows."""
    sizes = [math.prod(shape[dim] for dim in dims) for shape in shapes]
    return tuple(math.log2(size / sizes[0]) if size and sizes[0] else 0.0 for size in sizes[1:])


def degree_of(values: Sequence[np.ndarray], length: int) -> Degree:
    """Return how numbers grow; NaN where one grows more than another, or they change sign."""
    first = np.asarray(values[0])
    if first.dtype.kind not in "iufc":
        same = all(np.array_equal(first, value) for value in values[1:])
        return (0.0 if same else math.nan,) * length
    found = []
    for value in values[1:]:
        if np.array_equal(first, value, equal_nan=first.dtype.kind in "fc"):
            found.append(0.0)
            continue
        nonzero = np.broadcast_to(first != 0, np.broadcast_shapes(first.shape, value.shape))
        with np.errstate(all="ignore"):
            ratio = np.real((value / np.where(first == 0, 1, first))[nonzero])
        fine = np.array_equal(value != 0, nonzero) and ratio.size and ratio.min() > 0
        fine = fine and ratio.max() - ratio.min() < 1e-4 * ratio.max()
        found.append(math.log2(ratio.flat[0]) if fine else math.nan)
    return tuple(found)


def add(*degrees: Degree) -> Degree:
    """Return the growth of a product."""
    return tuple(sum(parts) for parts in zip(*degrees, strict=True))


def times(degree: Degree, factor: float) -> Degree:
    """Return the growth of a power."""
    return tuple(part * factor for part in degree)


def same(*degrees: Degree) -> bool:
    """Return whether values grow alike."""
    return all(abs(one - parts[0]) < 1e-3 for parts in zip(*degrees, strict=True) for one in parts)


def odd(degree: Degree) -> bool:
    """Return whether a value depends on the number of rows in a way that is no power."""
    return any(math.isnan(part) for part in degree)


def first_mixed(values: Sequence[Value]) -> Mixed | None:
    """Return the first mixed value, one that is sure if there is one."""
    mixed = sorted((value for value in values if isinstance(value, Mixed)), key=lambda one: one.why == "unknown")
    return mixed[0] if mixed else None
