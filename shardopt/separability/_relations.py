"""Relations between a value of the whole batch and the values of its pieces: the lattice of the
proof.

A loss is traced twice: on the whole batch (the whole trace), and on one of n equal pieces of it
(the piece trace). Both traces have the same equations, with other sizes. A variable has the value W
in the whole trace, and P_i in the trace of piece i. A relation says how W follows from P_0, ...,
P_{n-1}, for all parameters and all rows. Ratios are exact fractions above 0:

    Same(r)       W = r P_i for every i
    Split(d, k)   W = r concat(P_0, ..., P_{n-1}) along dim d (k times, for each of k blocks)
    Total(c)      W = c (P_0 + ... + P_{n-1})
    Shifted       W = r concat(Q_0, ..., Q_{n-1}) + c (T_0 + ... + T_{n-1}) where P_i = Q_i + T_i
    Extreme(max)  W = max(P_0, ..., P_{n-1})
    Known         the proof has computed the numbers of W and P_i: they follow from no row and no parameter
    Columns       each entry along the last dim has its own relation
    Unknown       nothing is known

A value that follows from one draw of random numbers for all rows is `drawn`. Each piece has another
key, so the relation holds only if all pieces draw the same numbers. Then a mean over pieces is right
in expectation. A weight, an extreme or a collective is not.

All relations but Known share one rule. A dim may have another size in W than in P, although it is
not the split dim. Then **all entries along this dim are equal**. So a number that is broadcast is
the Same for any number of rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn

from shardopt.trace._jaxprs import shape_of
from shardopt.trace._primitives import library_name

Shape = tuple[int, ...]
KeyPath = tuple[tuple[str, Any], ...]
"""How a random key is made: steps such as ("split", "shape=(2,)"), ("at", 1)."""
Shapes = tuple[Shape, Shape]
"""The shapes of a value in the whole trace and in the piece trace."""


class Operation(NamedTuple):
    """An equation of the loss, for an error message to name.

    Attributes:
      eqn: the equation.
      callers: the calls around it, the outermost first. jax caches traces of its own functions,
        which then do not hold their caller.
    """

    eqn: JaxprEqn
    callers: tuple[JaxprEqn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Same:
    """W = ratio * P_i, for every piece.

    Attributes:
      ratio: W / P_i.
      drawn: whether the value follows from a random draw for all rows.
      keys: for random keys that are drawn, the ways that they are made, see `_draws`.
    """

    ratio: Fraction = Fraction(1)
    drawn: bool = False
    keys: frozenset[KeyPath] = frozenset()


@dataclasses.dataclass(frozen=True)
class Split:
    """W = ratio * the concatenation of all P_i.

    Attributes:
      dim: the dim along which they are concatenated.
      blocks: how many blocks this dim has. Each block is a concatenation: entry [block, j] of P_i
        is entry [block, i, j] of W.
      ratio: the ratio of an entry of W to its entry of P_i.
      drawn: see `Same`. A value with a random draw for each row is not drawn.
    """

    dim: int
    blocks: int = 1
    ratio: Fraction = Fraction(1)
    drawn: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """The fields that must be equal for two values to be combined entry by entry."""
        return self.dim, self.blocks

    def moved_to(self, dim: int) -> "Split":
        """Return the same relation along another dim."""
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True)
class Total:
    """W = ratio * the sum of all P_i.

    Attributes:
      ratio: 1 for a sum over rows, 1/n for a mean.
      op: the operation that sums over rows.
      drawn: see `Same`.
    """

    ratio: Fraction
    op: Operation | None = dataclasses.field(default=None, compare=False)
    drawn: bool = False


@dataclasses.dataclass(frozen=True)
class Shifted:
    """A split value plus a total, as in `mean(errors + penalty)`.

    Only linear operations keep this relation.

    Attributes:
      split: the relation of the split value.
      total: the relation of the total.
    """

    split: Split
    total: Total


@dataclasses.dataclass(frozen=True)
class Extreme:
    """W = the largest, or the smallest, of all P_i.

    Attributes:
      kind: "max" or "min".
      op: the operation that compares rows.
      drawn: see `Same`.
    """

    kind: str
    op: Operation | None = dataclasses.field(default=None, compare=False)
    drawn: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """The numbers of W and P_i. A dim along which all numbers are equal may have size 1.

    Attributes:
      whole_values: the numbers of W.
      piece_values: the numbers of P_i, which are the same for every piece.
      op: the operation that made them.
    """

    whole_values: np.ndarray
    piece_values: np.ndarray
    op: Operation | None = None

    @property
    def all_zero(self) -> bool:
        """Whether all numbers are 0, and none is -0.0."""
        return is_plain_zero(self.whole_values) and is_plain_zero(self.piece_values)

    @property
    def same_numbers(self) -> bool:
        """Whether W has the numbers of P_i."""
        return equal_numbers(self.whole_values, self.piece_values)

    def equals(self, other: "Known") -> bool:
        """Return whether another value has the same numbers, in the whole and in a piece."""
        return equal_numbers(self.whole_values, other.whole_values) and equal_numbers(
            self.piece_values, other.piece_values
        )

    def as_same(self) -> "Same | Unrelated":
        """Return the relation of a value that has these numbers only sometimes, such as in one turn
        of a loop.
        """
        return Same() if self.same_numbers else Unrelated("count", self.op)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Indices of several dims, as in `x[arange(rows), labels]`.

    Each entry along the last dim has its own relation.
    """

    columns: "tuple[Relation, ...]"


@dataclasses.dataclass(frozen=True)
class Unrelated:
    """Nothing is known.

    Attributes:
      reason: a key of `REASONS`.
      op: the first operation whose result is unknown; or the sum or extreme that `use` cannot take.
      use: the operation that cannot take the total or extreme of `op`; None if `op` itself is the
        problem.
    """

    reason: str
    op: Operation | None = dataclasses.field(default=None, compare=False)
    use: Operation | None = dataclasses.field(default=None, compare=False)


Relation = Same | Split | Total | Shifted | Extreme | Known | Columns | Unrelated
Scaled = TypeVar("Scaled", bound=Same | Split | Total)


def scaled(relation: Scaled, factor: Fraction) -> Scaled:
    """Return the relation of a value times a number which is `factor` times as large in the whole
    trace.
    """
    return dataclasses.replace(relation, ratio=relation.ratio * factor)


def is_drawn(relation: Relation) -> bool:
    """Return whether a relation holds only if all pieces draw the same random numbers."""
    if isinstance(relation, Shifted):
        return relation.split.drawn or relation.total.drawn
    if isinstance(relation, Columns):
        return any(map(is_drawn, relation.columns))
    return isinstance(relation, Same | Split | Total | Extreme) and relation.drawn


def as_drawn(relation: Relation) -> Relation:
    """Return the relation of a value that follows from a random draw for all rows too."""
    if isinstance(relation, Shifted):
        return Shifted(
            dataclasses.replace(relation.split, drawn=True),
            dataclasses.replace(relation.total, drawn=True),
        )
    if isinstance(relation, Columns):
        return Columns(tuple(map(as_drawn, relation.columns)))
    if isinstance(relation, Known):
        return as_drawn(relation.as_same())
    if isinstance(relation, Same | Split | Total | Extreme):
        return dataclasses.replace(relation, drawn=True)
    return relation


REASONS = {
    "mixes": "rows are mixed.",
    "position": "a row's part depends on its position in the batch.",
    "count": "it depends on the number of rows otherwise than a mean over them.",
    "backward": (
        "the derivative rule of a jax.custom_vjp or jax.custom_jvp mixes rows, or depends on their"
        " number."
    ),
    "primitive": "no rule says what this operation does to rows.",
    "shape": "no rule says where rows are afterwards.",
    "loop": "no rule says what this loop does to rows.",
    "symbolic": "a derivative rule with symbolic_zeros=True depends on what is differentiated.",
    "drawn": (
        "it follows from one random number for all rows, and each device draws another one. Draw one"
        " for each row."
    ),
    "reused": (
        "one random key gives numbers for each row, and is used once more. Split it with"
        " jax.random.split before."
    ),
    "hidden": (
        "devices may have this random key in common. Make it of the key of the loss, with"
        " jax.random.split or jax.random.fold_in."
    ),
    "keys": (
        "jax draws numbers for several keys of this implementation together, not key by key. Use"
        ' jax.random.key(seed, impl="threefry2x32").'
    ),
    "traces": "it does other things on the whole batch than on a piece of it.",
}
"""The sentence of an error message for each reason of an `Unrelated`."""


def is_plain_zero(values: np.ndarray) -> bool:
    """Return whether all numbers are 0, and none is -0.0."""
    return not values.tobytes().strip(b"\0")


def equal_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays are equal bit by bit: 0.0 and -0.0 have other angles, and other bits."""
    try:
        both = np.broadcast_arrays(a, b)
    except ValueError:  # their shapes do not fit
        return False
    dtype = np.result_type(*both)
    return both[0].astype(dtype).tobytes() == both[1].astype(dtype).tobytes()


def is_exactly_same(relation: Relation) -> bool:
    """Return whether W = P_i, without any rounding: a relation `Same` with ratio 1."""
    return isinstance(relation, Same) and relation.ratio == 1


def is_unscaled(relation: Relation) -> TypeGuard[Same | Split]:
    """Return whether a relation is `Same` or `Split` with ratio 1."""
    return isinstance(relation, Same | Split) and relation.ratio == 1


class EquationPair:
    """One equation in both traces.

    Attributes:
      whole_eqn: the equation in the whole trace.
      piece_eqn: the equation in the piece trace.
      num_pieces: n.
      callers: the calls around it, the outermost first.
      name: the name of the primitive; "" if neither jax nor equinox defines it.
      params: the parameters in the whole trace.
      op: the equation, for an error message to name.
    """

    def __init__(
        self,
        whole_eqn: JaxprEqn,
        piece_eqn: JaxprEqn,
        num_pieces: int,
        callers: tuple[JaxprEqn, ...] = (),
    ):
        self.whole_eqn = whole_eqn
        self.piece_eqn = piece_eqn
        self.num_pieces = num_pieces
        self.callers = callers
        self.name = library_name(whole_eqn.primitive)
        self.params = whole_eqn.params
        self.op = Operation(whole_eqn, callers)

    def operand_shapes(self, i: int = 0) -> Shapes:
        """Return the shapes of an operand in the whole trace and in the piece trace."""
        return shape_of(self.whole_eqn.invars[i]), shape_of(self.piece_eqn.invars[i])

    def operand_dtype(self, i: int = 0) -> Any:
        """Return the dtype of an operand; None if it has none."""
        return getattr(self.whole_eqn.invars[i].aval, "dtype", None)

    def result_shapes(self, i: int = 0) -> Shapes:
        """Return the shapes of a result in the whole trace and in the piece trace."""
        return shape_of(self.whole_eqn.outvars[i]), shape_of(self.piece_eqn.outvars[i])

    @property
    def differing_operand_dims(self) -> set[int]:
        """The dims that have another size in the whole trace than in the piece trace, in any
        operand.
        """
        return {
            dim
            for i in range(len(self.whole_eqn.invars))
            for dim in differing_dims(self.operand_shapes(i))
        }

    @property
    def num_results(self) -> int:
        """The number of results."""
        return len(self.whole_eqn.outvars)

    @property
    def dtype(self) -> Any:
        """The dtype of the first result."""
        return getattr(self.whole_eqn.outvars[0].aval, "dtype", np.dtype(np.float32))

    def unknown(self, reason: str = "mixes") -> Unrelated:
        """Return `Unrelated`, with this equation as the first operation whose result is unknown."""
        return Unrelated(reason, self.op)

    def both_params(self, name: str) -> tuple[Any, Any]:
        """Return a parameter of the equation in the whole trace and in the piece trace."""
        return self.whole_eqn.params[name], self.piece_eqn.params[name]


def differing_dims(shapes: Shapes) -> tuple[int, ...]:
    """Return the dims that have another size in the whole trace than in the piece trace."""
    return tuple(
        dim
        for dim, (whole_size, piece_size) in enumerate(zip(*shapes, strict=True))
        if whole_size != piece_size
    )


def sizes_of_dim(shapes: Shapes, dim: int) -> tuple[int, int]:
    """Return the size of a dim in the whole trace and in the piece trace."""
    return shapes[0][dim], shapes[1][dim]


def dim_after_removal(dim: int, removed_dims: Sequence[int]) -> int:
    """Return the new number of a dim after other dims are removed."""
    return dim - sum(removed_dim < dim for removed_dim in removed_dims)


def growth(shapes: Shapes, dims: Sequence[int]) -> Fraction:
    """Return the number of entries along dims in the whole trace, divided by their number in the
    piece trace; 0 if a piece has none.
    """
    whole_size, piece_size = (math.prod(shape[dim] for dim in dims) for shape in shapes)
    return Fraction(whole_size, piece_size) if piece_size else Fraction(0)
