"""How a value of the whole batch is made of the values of its pieces: the lattice of the proof.

A loss is traced on the whole batch and on one of n equal pieces of it. The two traces are the same equations at other
sizes. For each variable, W is its value in the whole trace and P_i its value in the trace of piece i. A relation says how W
follows from P_0, ..., P_{n-1}, for all parameters and all rows:

    Same(r)       W = r P_i for every i
    Split(d, k)   W = r concat(P_0, ..., P_{n-1}) along dim d (k times, for each of k blocks)
    Total(c)      W = c (P_0 + ... + P_{n-1})
    Shifted       W = r concat(Q_0, ..., Q_{n-1}) + c (T_0 + ... + T_{n-1}) where P_i = Q_i + T_i
    Extreme(max)  W = max(P_0, ..., P_{n-1})
    Known         the numbers of W and P_i are computed in the trace itself: no row and no parameter goes into them
    Columns       the entries along the last dim have a relation each
    Unknown       nothing is known

One rule holds for all of them but Known: **along a dim that differs in size between W and P, other than the split one, all
entries are equal.** So a broadcast number is the Same for any number of rows.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape]
"""Of a value in the whole, and in a piece."""


class Op(NamedTuple):
    """An equation of the loss, to be named in a message.

    Attributes:
      eqn: the equation.
      callers: the calls around it, from outside: traces that jax keeps of its own functions do not say who called.
    """

    eqn: JaxprEqn
    callers: tuple[JaxprEqn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Same:
    """W = ratio * P_i, for every piece.

    Attributes:
      ratio: how much larger the whole's value is.
      drawn: whether it follows from the random key, of which each piece has its own.
    """

    ratio: float = 1.0
    drawn: bool = False

    def scaled(self, factor: float) -> "Same":
        """Return the relation of the value times a number that is `factor` larger in the whole."""
        return dataclasses.replace(self, ratio=self.ratio * factor)


@dataclasses.dataclass(frozen=True)
class Split:
    """W = ratio * the concatenation of all P_i.

    Attributes:
      dim: the dim along which they are concatenated.
      blocks: how many blocks this dim has, each a concatenation of its own: entry [block, j] of P_i is [block, i, j] of W.
      ratio: how much larger the whole's entries are.
      order: None if the pieces come in order; else what permuted the entries of the whole.
    """

    dim: int
    blocks: int = 1
    ratio: float = 1.0
    order: Hashable = None

    @property
    def place(self) -> tuple[int, int, Hashable]:
        """Return what must agree between values that are combined entry by entry."""
        return self.dim, self.blocks, self.order

    def at(self, dim: int) -> "Split":
        """Return the same relation along another dim."""
        return dataclasses.replace(self, dim=dim)

    def scaled(self, factor: float) -> "Split":
        """Return the relation of the value times a number that is `factor` larger in the whole."""
        return dataclasses.replace(self, ratio=self.ratio * factor)


@dataclasses.dataclass(frozen=True)
class Total:
    """W = ratio * the sum of all P_i.

    Attributes:
      ratio: 1 for a sum over rows, 1/n for a mean.
      op: what sums over the pieces.
    """

    ratio: float
    op: Op | None = dataclasses.field(default=None, compare=False)

    def scaled(self, factor: float) -> "Total":
        """Return the relation of the value times a number that is `factor` larger in the whole."""
        return dataclasses.replace(self, ratio=self.ratio * factor)


@dataclasses.dataclass(frozen=True)
class Shifted:
    """A split value plus a total, as in `mean(errors + penalty)`: only what is linear keeps it.

    Attributes:
      split: the relation of the first part.
      total: that of the second.
    """

    split: Split
    total: Total


@dataclasses.dataclass(frozen=True)
class Extreme:
    """W = the largest, or the smallest, of all P_i.

    Attributes:
      kind: "max" or "min".
      op: what compares the pieces.
    """

    kind: str
    op: Op | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """The numbers themselves, in the whole and in each piece; a dim along which they are equal may have size 1.

    Attributes:
      whole: W.
      piece: P_i, the same for every piece.
      op: what made them.
    """

    whole: np.ndarray
    piece: np.ndarray
    op: Op | None = None

    @property
    def zero(self) -> bool:
        """Whether all numbers are 0."""
        return not (self.whole.any() or self.piece.any())

    @property
    def equal(self) -> bool:
        """Whether the whole has the numbers of the piece."""
        return _equal(self.whole, self.piece)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Indices of several dims: each entry along the last dim has a relation of its own, as in `x[arange(rows), labels]`."""

    columns: "tuple[Value, ...]"


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Nothing is known.

    Attributes:
      why: a key of `WHY`.
      op: the first operation of which nothing is known.
      use: what was done with a total or an extreme at `op`, if that is what is wrong.
    """

    why: str
    op: Op | None = dataclasses.field(default=None, compare=False)
    use: Op | None = dataclasses.field(default=None, compare=False)


Value = Same | Split | Total | Shifted | Extreme | Known | Columns | Unknown

WHY = {
    "mixes": "rows are mixed.",
    "position": "a row's part depends on its position in the batch.",
    "count": "it depends on the number of rows otherwise than a mean over them.",
    "backward": "the derivative rule of a jax.custom_vjp or jax.custom_jvp mixes rows, or depends on their number.",
    "primitive": "no rule says what this operation does to rows.",
    "shape": "no rule says where rows are afterwards.",
    "loop": "no rule says what this loop does to rows.",
    "traces": "it does other things on the whole batch than on a piece of it.",
}
"""What a message says of an `Unknown`."""


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(*np.broadcast_arrays(a, b), equal_nan=a.dtype.kind in "fc")) if fits(a, b) else False


def fits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays broadcast to one shape."""
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        return False
    return True


def close(a: float, b: float, tolerance: float) -> bool:
    """Return whether two ratios are equal up to the rounding of the numbers that they come from."""
    return a == b or math.isclose(a, b, rel_tol=tolerance)


def tolerance_of(dtype: Any) -> float:
    """Return how far the ratio of two numbers may be off that were rounded to a dtype."""
    name = getattr(dtype, "name", "")
    return {"float64": 2.0**-49, "complex128": 2.0**-49, "bfloat16": 2.0**-6, "float16": 2.0**-9}.get(name, 2.0**-20)


class Site:
    """One equation in both traces.

    Attributes:
      whole: the equation on the whole batch.
      piece: the equation on a piece.
      pieces: n.
      callers: the calls around it.
    """

    def __init__(self, whole: JaxprEqn, piece: JaxprEqn, pieces: int, callers: tuple[JaxprEqn, ...] = ()):
        self.whole, self.piece, self.pieces, self.callers = whole, piece, pieces, callers
        self.name, self.params = whole.primitive.name, whole.params
        self.op = Op(whole, callers)

    def operand(self, i: int = 0) -> Shapes:
        """Return the shapes of an operand, in the whole and in a piece."""
        return shape_of(self.whole.invars[i]), shape_of(self.piece.invars[i])

    def result(self, i: int = 0) -> Shapes:
        """Return the shapes of a result, in the whole and in a piece."""
        return shape_of(self.whole.outvars[i]), shape_of(self.piece.outvars[i])

    @property
    def num_results(self) -> int:
        """How many results it has."""
        return len(self.whole.outvars)

    @property
    def dtype(self) -> Any:
        """The dtype of the first result."""
        return getattr(self.whole.outvars[0].aval, "dtype", np.dtype(np.float32))

    @property
    def tolerance(self) -> float:
        """How far two ratios may differ and count as equal."""
        dtypes = [getattr(var.aval, "dtype", None) for var in (*self.whole.invars, *self.whole.outvars)]
        floating = [tolerance_of(dtype) for dtype in dtypes if getattr(dtype, "kind", "") in "fcV"]
        return min(floating, default=tolerance_of(np.dtype(np.float64)))

    def equal(self, a: float, b: float) -> bool:
        """Return whether two ratios are equal."""
        return close(a, b, self.tolerance)

    def unknown(self, why: str = "mixes") -> Unknown:
        """Return that nothing is known from here on."""
        return Unknown(why, self.op)

    def params_of(self, name: str) -> tuple[Any, Any]:
        """Return a parameter, in the whole and in a piece."""
        return self.whole.params[name], self.piece.params[name]


def shape_of(var: Any) -> Shape:
    """Return the shape of a variable; tokens have none."""
    return tuple(getattr(var.aval, "shape", ()))


class OfOperand(Site):
    """The equation, as one that has an operand in another place, or of other shapes.

    Args:
      site: the equation.
      first: which operand counts as the first.
      shapes: what counts as the shapes of all operands; None for what they are.
    """

    def __init__(self, site: Site, first: int = 0, shapes: Shapes | None = None):
        super().__init__(site.whole, site.piece, site.pieces, site.callers)
        self._first, self._shapes = first, shapes

    def operand(self, i: int = 0) -> Shapes:
        """Return the shapes of an operand, in the whole and in a piece."""
        return super().operand(self._first + i) if self._shapes is None else self._shapes


def differing(shapes: Shapes) -> tuple[int, ...]:
    """Return the dims that differ in size between the whole and a piece."""
    return tuple(dim for dim, (whole, piece) in enumerate(zip(*shapes, strict=True)) if whole != piece)


def growth(shapes: Shapes, dims: Sequence[int]) -> float:
    """Return how many times as many entries the whole has along dims."""
    whole, piece = (math.prod(shape[dim] for dim in dims) for shape in shapes)
    return whole / piece if piece else math.nan
