"""The part of a value that each device holds: a piece of a whole array, and the sums or choices
along which it differs.

A dim of an array is a list of factors, major first. A factor says which interval of a larger dim
each device holds. Other dependences of a value are hidden: a sum that is not complete yet, or a
choice by the number of the device. A dim is hidden too if every device holds one element of it.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from shardopt.hlo._hlo_text import cached

if TYPE_CHECKING:
    from shardopt.hlo.proof._lookup import Range, Rows, Shift


T = TypeVar("T")


class _Shared:
    """An array. Equal arrays of a class are one object, so that they compare and hash fast."""

    __slots__ = ("__weakref__", "array")
    _known: ClassVar[WeakValueDictionary[Hashable, Any]] = WeakValueDictionary()

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def _of(cls, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array)
        key = (cls, array.tobytes(), array.dtype.str, array.shape)
        return _Shared._known.setdefault(key, cls(array))


class Positions(_Shared):
    """One whole number per device."""

    @staticmethod
    def of(array: np.ndarray) -> "Positions":
        """Return the vector with these numbers."""
        return Positions._of(np.asarray(array, np.int64))

    def __repr__(self) -> str:
        return str(self.array.tolist())


# Dim of 8 elements on 4 devices:
#
# whole on each device        Factor(8, 8, at=[0, 0, 0, 0])
# cut into 4                  Factor(2, 8, at=[0, 2, 4, 6])
# cut into 2, each copied     Factor(4, 8, at=[0, 0, 4, 4])
# one element on each of 8 devices is no factor of the dim: it is `Hidden("dim", ...)`
class Factor(NamedTuple):
    """A device holds `local` elements, from position `at` on, of a dim of `size` elements.

    `size` is 0 if the value is constant along the dim: it fits every interval of every size. `size`
    is -1 for numbers that count positions: the interval is known, and the size is not.
    """

    local: int
    size: int
    at: Positions


class Hidden(NamedTuple):
    """A coordinate of a value that is no dim of its array: devices with equal numbers hold equal
    things.

    Attributes:
      kind: `dim` for a dim with one element on each device; `add`, `maximum`, ... for a
        reduction that is not complete; `own` if every device computed with a term of such a
        reduction as if it were complete; `device` for a choice by the number of the device.
      at: the coordinate of each device.
      count: the number of coordinates that there are.
      origin: the index of the instruction that made it.
      minor: for a dim, the number of elements of its array that are to its right; -1 if unknown.
    """

    kind: str
    at: Positions
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    origin: int
    minor: int = -1


class Fault(NamedTuple):
    """Why a value is wrong, or unknown.

    Attributes:
      wrong: True if it is wrong.
      order: the index of the instruction, in the order of evaluation.
      reason: the reason as a sentence.
      groups: the devices concerned.
    """

    wrong: bool
    order: int
    reason: str
    groups: tuple[tuple[int, ...], ...] = ()


class Data(_Shared):
    """Known numbers, `[1 or devices, *shape]`."""

    @staticmethod
    def of(array: np.ndarray) -> "Data":
        """Return the numbers, once if all devices have the same."""
        is_same = len(array) > 1 and (array == array[:1]).all()
        return Data._of(array[:1] if is_same else array)


Dim = tuple[Factor, ...]
HiddenDims = tuple[Hidden, ...]
"""The hidden dims of a value."""


class Facts(NamedTuple):
    """The known facts about the numbers of a value, besides its dims.

    Attributes:
      shift: integers that an instruction made, plus a number per device.
      within: whether such integers are in an interval per device.
      rows: rows that were looked up in a table whose rows are spread over devices.
      interval: the value with the interval of a dim that each device joined from pieces of its
        neighbours.
    """

    shift: "Shift | None" = None
    within: "Range | None" = None
    rows: "Rows | None" = None
    interval: "DerivedValue | None" = None


class DerivedValue(NamedTuple):
    """An array on all devices.

    Attributes:
      shape: its local shape.
      dims: the factors of each dim.
      hidden: its coordinates that are no dims.
      constant: whether it depends on no input of the program.
      fill: the number that all its elements are equal to; None if unknown.
      data: its numbers, if they are few integers that depend on no input.
      faults: why it is wrong or unknown; its dims then say nothing.
      parts: pieces along the last dim if they have different layouts; `dims` then say nothing.
      sums: the groups over which the value is a sum that is complete: a sum over them again would
        count it twice.
      facts: the known facts about its numbers.
    """

    shape: tuple[int, ...]
    dims: tuple[Dim, ...] = ()
    hidden: HiddenDims = ()
    constant: bool = False
    fill: float | None = None
    data: Data | None = None
    faults: frozenset[Fault] = frozenset()
    parts: "tuple[DerivedValue, ...] | None" = None
    sums: frozenset[Positions] = frozenset()
    facts: Facts = Facts()

    @property
    def zero(self) -> bool:
        """Whether all elements are 0, so that it is a term of every sum."""
        return self.fill == 0

    def dims_with(self, common: Mapping[int, Dim]) -> tuple[Dim, ...]:
        """Return its dims, with the dims of `common` in their places."""
        return tuple(common.get(i, dim) for i, dim in enumerate(self.dims))

    def other_dims(self, left_out: Collection[int | None]) -> list[int]:
        """Return the numbers of the dims that are not left out."""
        return [i for i in range(len(self.shape)) if i not in left_out]

    def changed(self, **fields: object) -> "DerivedValue":
        """Return the value with other fields, no longer with known numbers."""
        return self._replace(**{"data": None, "fill": None, "facts": Facts(), **fields})  # type: ignore[arg-type]


class RuleError(Exception):
    """A rule gives no value."""

    is_wrong = False

    def __init__(self, reason: str, groups: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.groups = groups


class Wrong(RuleError):  # noqa: N818
    """An instruction is wrong."""

    is_wrong = True


class Unproved(RuleError):  # noqa: N818
    """No rule covers an instruction."""


REDUCTIONS = ("add", "maximum", "minimum", "and", "or", "multiply")
INPUT = -1
"""The origin of dims of which the program gets one element on each device."""
SCATTERED = -2
"""The origin of dims of which a collective leaves one element on each device."""
SLICED = -3
"""The origin of dims of which a slice leaves one element on each device."""
# The most that may be wrong comes first: of two claims about one coordinate, the stronger stays.
_RANK = {"own": 4, **dict.fromkeys(REDUCTIONS, 3), "device": 2, "dim": 1}


def replaced(items: tuple[T, ...], index: int, new: T) -> tuple[T, ...]:
    """Return a tuple with another item."""
    return (*items[:index], new, *items[index + 1 :])


def zeros(devices: int) -> Positions:
    """Return position 0 on all devices."""
    return Positions.of(np.zeros(devices, np.int64))


@cached
def scaled(at: Positions, factor: int, divisor: int = 1) -> Positions:
    """Return the positions times a factor, divided by a divisor."""
    return Positions.of(at.array * factor // divisor)


@cached
def all_multiples(at: Positions, divisor: int) -> bool:
    """Return whether all positions are multiples of a number."""
    return not (at.array % divisor).any()


@cached
def partition(at: Positions) -> Positions:
    """Number the classes of devices with equal coordinates by their first device."""
    _, first, inverse = np.unique(at.array, return_index=True, return_inverse=True)
    return Positions.of(first[inverse])


@cached
def varies(at: Positions) -> bool:
    """Return whether the devices have different numbers."""
    return bool((at.array != at.array[0]).any())


@cached
def joint(*coordinates: Positions) -> Positions:
    """Return the classes of devices that agree in all coordinates."""
    stacked = np.stack([at.array for at in coordinates])
    _, first, inverse = np.unique(stacked, axis=1, return_index=True, return_inverse=True)
    return Positions.of(first[inverse.reshape(-1)])


def determines(coordinates: Sequence[Positions], at: Positions) -> bool:
    """Return whether devices that agree in all coordinates agree in `at`."""
    return joint(*coordinates, at) is joint(*coordinates) if coordinates else not varies(at)


def whole(local: int, devices: int) -> Dim:
    """Return a dim that every device holds whole."""
    return (Factor(local, local, zeros(devices)),) if local != 1 else ()


def same_everywhere(local: int, devices: int) -> Dim:
    """Return a dim along which the value is constant."""
    return (Factor(local, 0, zeros(devices)),) if local != 1 else ()


def is_whole(dim: Dim) -> bool:
    """Return whether every device holds the whole dim, or could."""
    return all(factor.size in (0, factor.local) for factor in dim)


def is_constant_along(dim: Dim) -> bool:
    """Return whether the value is constant along a dim."""
    return all(factor.size == 0 for factor in dim)


def resized(dim: Dim, size: int) -> Dim:
    """Return a dim along which the value is constant, with another number of elements."""
    return tuple(factor._replace(local=size) for factor in dim[:1] if size != 1)


@cached
def normal(dim: Dim) -> Dim:
    """Join neighbours: a whole factor belongs to the factor before it."""
    joined: list[Factor] = []
    for factor in dim:
        if factor.local == 1:
            continue
        # A whole minor factor adds nothing: (4 of 8) x (3 of 3) is (12 of 24).
        if joined:
            major = joined[-1]
            if major.size == 0 and factor.size == 0:
                joined[-1] = Factor(major.local * factor.local, 0, factor.at)
                continue
            if major.size > 0 and factor.size == factor.local:
                joined[-1] = Factor(
                    major.local * factor.local,
                    major.size * factor.local,
                    scaled(major.at, factor.local),
                )
                continue
        joined.append(factor)
    return tuple(joined)


def cut(factor: Factor, major: int) -> tuple[Factor, Factor]:
    """Split a factor into `major` times the remaining elements."""
    minor = factor.local // major
    if factor.size == 0:
        return Factor(major, 0, factor.at), Factor(minor, 0, factor.at)
    if factor.size > 0 and factor.size % minor == 0 and all_multiples(factor.at, minor):
        zero = zeros(len(factor.at.array))
        return Factor(major, factor.size // minor, scaled(factor.at, 1, minor)), Factor(
            minor, minor, zero
        )
    raise Unproved("the reshape splits a dim across the borders of its pieces.")


def split_dims(factors: Sequence[Factor], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Distribute factors, major first, over the dims of a shape: a reshape."""
    devices = len(factors[0].at.array) if factors else 0
    pending = list(reversed(factors))
    dims: list[Dim] = []
    for size in shape:
        dim: list[Factor] = []
        missing = size
        # Invariant: the dims so far use up the factors that are popped, major first, as a reshape
        # keeps the order of elements.
        while missing > 1:
            if not pending:
                raise Unproved("the reshape has another number of elements.")
            factor = pending.pop()
            if missing % factor.local == 0:
                dim.append(factor)
                missing //= factor.local
            elif factor.local % missing == 0:
                major, minor = cut(factor, missing)
                dim.append(major)
                pending.append(minor)
                missing = 1
            else:  # join with the next factor if both are whole, or could be
                if not pending:
                    raise Unproved("the reshape splits a dim unevenly.")
                following = pending.pop()
                first, second = (_specialised(part, devices) for part in (factor, following))
                merged = normal((first, second))
                if len(merged) != 1:
                    raise Unproved("the reshape splits a dim across the borders of its pieces.")
                pending.append(merged[0])
        dims.append(normal(tuple(dim)))
    return tuple(dims)


def _specialised(factor: Factor, devices: int) -> Factor:
    return Factor(factor.local, factor.local, zeros(devices)) if factor.size == 0 else factor


def aligned(first: Dim, second: Dim) -> list[tuple[Factor, Factor]]:
    """Cut the factors of two dims of equal local size into pairs of equal local size."""
    first_factors = list(reversed(normal(first)))
    second_factors = list(reversed(normal(second)))
    pairs = []
    while first_factors and second_factors:
        a = first_factors.pop()
        b = second_factors.pop()
        if a.local > b.local and a.local % b.local == 0:
            a, minor = cut(a, b.local)
            first_factors.append(minor)
        elif b.local > a.local and b.local % a.local == 0:
            b, minor = cut(b, a.local)
            second_factors.append(minor)
        elif a.local != b.local:
            raise Unproved("two dims are made of pieces of different sizes.")
        pairs.append((a, b))
    return pairs


class _MismatchError(Exception):
    """Two factors that are different pieces."""


@cached
def unified(first: Dim, second: Dim) -> Dim:
    """Return the dim that both values have; raise if they hold different pieces."""
    if first is second or first == second:
        return first
    factors = []
    for a, b in aligned(first, second):
        # A value that is constant along a dim fits whatever piece the other one is.
        if a == b or b.size == 0:
            factors.append(a)
        elif a.size == 0:
            factors.append(b)
        elif -1 in (a.size, b.size) and a.at is b.at:
            factors.append(a if b.size == -1 else b)
        else:
            raise _MismatchError(a, b)
    return normal(tuple(factors))


def unify(
    first: DerivedValue, second: DerivedValue, dims: Iterable[tuple[int, int]] | None = None
) -> tuple[DerivedValue, DerivedValue]:
    """Return both values without the hidden dims that became visible, and `first` with the dims
    that both have.

    `dims` has the pairs of dims that must agree, by default all of two values of one shape.
    """
    for i, j in [(i, i) for i in first.other_dims(())] if dims is None else dims:
        while True:
            try:
                common = unified(first.dims[i], second.dims[j])
            except _MismatchError as mismatch:
                a, b = mismatch.args
                if revealed := _revealed(first, i, a, b):
                    first = revealed
                elif revealed := _revealed(second, j, b, a):
                    second = revealed
                elif first.constant or second.constant:
                    raise Unproved(
                        "positions within a piece meet positions within the whole."
                    ) from None
                else:
                    raise Wrong(
                        f"its operands hold different pieces: {_piece(a)} and {_piece(b)}."
                    ) from None
            else:
                first = first._replace(dims=replaced(first.dims, i, common))
                break
    return first, second


def _revealed(value: DerivedValue, dim: int, factor: Factor, other: Factor) -> DerivedValue | None:
    """Return the value with a whole dim as the piece `other`, if it depends on the device as that
    piece does.
    """
    if factor.size != factor.local or other.size <= other.local or len(value.dims[dim]) != 1:
        return None
    if other.size % other.local or not all_multiples(other.at, other.local):
        return None
    at = scaled(other.at, 1, other.local)
    count = other.size // other.local
    for hidden in value.hidden:
        same = (hidden.kind, hidden.at, hidden.count) == ("dim", at, count)
        if same and hidden.origin != SCATTERED:  # the rows of a batch are not the rows of a weight
            raise Unproved(
                "each device holds one element of a dim, which may or may not be the major part of"
                " another."
            )
        # numbers that each device made for its own rows, such as random ones, are rows of a whole
        # array
        if same or (hidden.kind == "device" and determines([other.at], hidden.at)):
            remaining = tuple(h for h in value.hidden if h is not hidden)
            return value._replace(dims=replaced(value.dims, dim, (other,)), hidden=remaining)
    return None


def _piece(factor: Factor) -> str:
    if factor.size == factor.local:
        return f"all {factor.local} elements"
    starts = factor.at.array[:8].tolist()
    ellipsis = ", ..." if len(factor.at.array) > 8 else ""
    return (
        f"{factor.local} of {factor.size if factor.size > 0 else 'all'} elements from"
        f" {starts}{ellipsis}"
    )


def with_element(hidden: HiddenDims, element: Hidden) -> HiddenDims:
    """Return the coordinates with a dim whose one element each device now takes."""
    if any(partition(h.at) is partition(element.at) and h.kind != "device" for h in hidden):
        raise Unproved(
            "each device takes its own element of a value that differs between the same devices"
            " already."
        )
    return merged_hidden([(*hidden, element)])


def cut_beside(value: DerivedValue, shape: tuple[int, ...]) -> HiddenDims:
    """Return the coordinates of a value after its dims are cut to a shape: other elements are to
    their right.
    """
    minors = {math.prod(value.shape[dim:]): math.prod(shape[dim:]) for dim in range(len(shape) + 1)}
    return tuple(h._replace(minor=minors.get(h.minor, -1)) for h in value.hidden)


def merged_hidden(values: Iterable[HiddenDims]) -> HiddenDims:
    """Return all coordinates once. If two kinds have the same coordinate, the stronger remains."""
    known: dict[tuple[Positions, int], Hidden] = {}
    for hidden in values:
        for h in hidden:
            key = (h.at, h.count)
            if key not in known or _RANK[h.kind] > _RANK[known[key].kind]:
                known[key] = h
    return tuple(sorted(known.values(), key=lambda h: (h.kind, h.count, h.at.array.tobytes())))


def pending(value: DerivedValue) -> HiddenDims:
    """Return the reductions of a value that are not complete."""
    return tuple(h for h in value.hidden if h.kind in REDUCTIONS)


def classes_of(hidden: Iterable[Hidden]) -> set[Positions]:
    """Return the classes of devices of each coordinate."""
    return {partition(h.at) for h in hidden}


def as_own(hidden: Hidden, order: int) -> Hidden:
    """Return the coordinate of a term of a reduction that is used on its own."""
    return hidden._replace(kind="own", origin=order)


def used(hidden: Iterable[Hidden], order: int, linear: str = "") -> HiddenDims:
    """Return the coordinates after a use that is not linear: terms of a reduction are used on their
    own. Terms of the reduction `linear` remain.
    """
    return tuple(
        as_own(h, order) if h.kind in REDUCTIONS and h.kind != linear else h for h in hidden
    )


def mixed(values: Sequence[DerivedValue], order: int) -> HiddenDims:
    """Return the coordinates of a function of values that is not linear in any of them."""
    return merged_hidden(used(value.hidden, order) for value in values)


def added(values: Sequence[DerivedValue], order: int, kind: str = "add") -> HiddenDims:
    """Return the coordinates of a sum of values.

    All must be terms of the same reductions. A term plus a value that is whole is a number of the
    device's own: a later sum counts the whole value several times, unless it is an average.
    """
    terms = [value for value in values if not (kind == "add" and value.zero)]
    # By classes of devices: two numberings of the same classes are one sum.
    reductions = {partition(h.at): h for value in terms for h in pending(value)}
    changed = []
    for value in terms:
        hidden = value.hidden
        for reduction in reductions.values():
            hidden = _as_term(hidden, reduction, kind, order)
        changed.append(hidden)
    return merged_hidden(changed)


def _as_term(hidden: HiddenDims, reduction: Hidden, kind: str, order: int) -> HiddenDims:
    """Return the coordinates of a value after it is added to terms of a reduction."""
    key = partition(reduction.at), reduction.count
    same = [h for h in hidden if (partition(h.at), h.count) == key]
    if not same:  # the value is whole, and each device adds it to its own term
        return (*hidden, as_own(reduction, order))
    if reduction.kind == kind and all(h.kind != "own" for h in same):
        terms = [h._replace(kind=kind) for h in same]
    else:
        terms = [h if h.kind == "own" else as_own(h, order) for h in same]
    return (*(h for h in hidden if h not in same), *terms)


def multiplied(values: Sequence[DerivedValue], order: int) -> HiddenDims:
    """Return the coordinates of a product: linear in each operand, and in no two at once."""
    hidden: list[HiddenDims] = []
    for i, value in enumerate(values):
        classes_of_others = classes_of(
            h for j, other in enumerate(values) if j != i for h in other.hidden
        )
        hidden.append(
            tuple(
                as_own(h, order)
                if h.kind in REDUCTIONS
                and (h.kind != "add" or partition(h.at) in classes_of_others)
                else h
                for h in value.hidden
            )
        )
    return merged_hidden(hidden)


def without_known_devices(value: DerivedValue) -> DerivedValue:
    """Drop the choices by device that the other coordinates of a value imply."""
    if not any(h.kind == "device" for h in value.hidden):
        return value
    hidden = list(value.hidden)
    for h in value.hidden:
        if h.kind == "device":
            coordinates = [f.at for dim in value.dims for f in dim if f.size > 0]
            coordinates += [
                other.at for other in hidden if other is not h and other.kind in ("dim", "device")
            ]
            # A device that chose by its number, and whose piece says the same, chose by its piece.
            if determines(coordinates, h.at):
                hidden.remove(h)
    return value._replace(hidden=tuple(hidden))


def joined(first: DerivedValue, second: DerivedValue) -> DerivedValue:
    """Return what holds for both of two values: the result of a branch, or of a loop that may not
    turn.
    """
    if first == second:
        return first
    if first.faults or second.faults:
        return first.changed(faults=first.faults | second.faults)
    if first.zero or second.zero:
        return (second if first.zero else first).changed(
            constant=first.constant and second.constant
        )
    if first.parts or second.parts:
        return _joined_parts(first, second)
    try:
        first, second = unify(first, second)
        # As for a sum: if one is a term and the other is complete, the result is neither.
        hidden = added([first, second], -1)
    except Wrong as problem:
        raise Unproved(f"a loop or branch changes what a value holds: {problem.reason}") from None

    def of_both(a: T, b: T, unknown: T) -> T:
        return a if a == b else unknown

    return DerivedValue(
        first.shape,
        first.dims,
        hidden,
        constant=first.constant and second.constant,
        fill=of_both(first.fill, second.fill, None),
        data=of_both(first.data, second.data, None),
        sums=first.sums & second.sums,
        facts=of_both(first.facts, second.facts, Facts()),
    )


def _joined_parts(first: DerivedValue, second: DerivedValue) -> DerivedValue:
    first_parts, second_parts = (value.parts or () for value in (first, second))
    if [part.shape for part in first_parts] != [part.shape for part in second_parts]:
        raise Unproved("two values of a loop or branch are made of different pieces.")
    return first.changed(parts=tuple(map(joined, first_parts, second_parts)), constant=False)
