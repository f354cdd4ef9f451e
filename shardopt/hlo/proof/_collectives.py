"""What collectives do to the pieces that devices hold: they are the identity of whole arrays, or
they are wrong.
"""

import math
from collections.abc import Sequence

import numpy as np

from shardopt.hlo._collective import Groups
from shardopt.hlo.proof._value import (
    REDUCTIONS,
    SCATTERED,
    DerivedValue,
    Factor,
    Hidden,
    Positions,
    Unproved,
    Wrong,
    cut,
    cut_beside,
    merged_hidden,
    normal,
    partition,
    replaced,
    same_everywhere,
    scaled,
    used,
    varies,
    whole,
    with_element,
    zeros,
)


def _varying(at: Positions, groups: Groups) -> bool:
    """Return whether any group has devices with different numbers."""
    return any((at.array[list(group)] != at.array[group[0]]).any() for group in groups)


def _varying_factors(value: DerivedValue, groups: Groups) -> list[tuple[int, Factor]]:
    """Return the factors, with their dims, whose pieces differ between devices of a group."""
    return [
        (i, factor)
        for i, dim in enumerate(value.dims)
        for factor in dim
        if factor.size and _varying(factor.at, groups)
    ]


def _sizes_of(groups: Groups) -> tuple[int, int]:
    """Return the number of devices, and the number of devices of each group."""
    members = sorted(device for group in groups for device in group)
    if members != list(range(len(members))):
        raise Unproved("its groups do not contain every device once.")
    if len({len(group) for group in groups}) != 1:
        raise Unproved("its groups have different sizes.")
    return len(members), len(groups[0])


def reduced_over(value: DerivedValue, kind: str, groups: Groups, order: int) -> DerivedValue:
    """Return the result of an all-reduce."""
    _, n = _sizes_of(groups)
    if n == 1:
        return value
    if kind not in REDUCTIONS:
        raise Unproved(f"no rule covers a reduction by {kind}.")
    if _varying_factors(value, groups):
        raise Wrong("it reduces over devices that hold different pieces of an array.", groups)
    # all-reduce over groups of 2 of a sum with 4 terms, one term on each of 4 devices:
    #
    # devices   0   1   2   3       terms t0 t1 t2 t3
    # groups    {0, 1} {2, 3}  ->  t0 + t1 twice, t2 + t3 twice: a sum of 2 terms remains
    # groups    {0, 1, 2, 3}   ->  complete: nothing remains
    # two devices of a group with the same term: it counts twice, which is wrong
    varying = [h for h in value.hidden if _varying(h.at, groups)]
    if not varying:
        return _of_copies(value, kind, groups, n)
    remaining = [h for h in value.hidden if h not in varying]
    if kind != "add":
        varying = list(used(varying, order, linear=kind))
    _check_terms({h.kind for h in varying}, kind, value.constant)
    remaining += _incomplete(varying, kind, groups, n, order)
    sums = value.sums | {group_classes(groups)} if kind == "add" else value.sums
    return value.changed(hidden=merged_hidden([tuple(remaining)]), constant=False, sums=sums)


def _of_copies(value: DerivedValue, kind: str, groups: Groups, n: int) -> DerivedValue:
    """Return the result of an all-reduce of equal values."""
    if value.zero or (kind not in ("add", "multiply") and not value.constant):
        return value
    if kind != "add":
        raise Unproved(f"it takes the {kind} of copies, where a sum may be meant.")
    # a count of rows or devices: it is a constant no more, so that no second sum is taken
    if value.constant:
        return value.changed(constant=False, sums=value.sums | {group_classes(groups)})
    if any(h.kind == kind for h in value.hidden):
        raise Wrong(
            "it sums over devices that hold the same term: each term counts several times, and the"
            " sum over other devices is still missing.",
            groups,
        )
    if group_classes(groups) in value.sums:
        raise Wrong(
            f"it sums {n} copies of a sum that is complete already: the result is {n} times too"
            " large.",
            groups,
        )
    raise Unproved(
        f"it sums {n} copies of a value: right only if the result is used as an average of equal"
        " values."
    )


def _check_terms(kinds: set[str], kind: str, constant: bool) -> None:
    """Raise if a reduction of coordinates of these kinds may mean something else."""
    if kind != "add" and "dim" in kinds:
        raise Unproved(
            f"it takes the {kind} over a dim of which each device holds one element, where a sum"
            " may be meant."
        )
    if "own" in kinds:
        raise Unproved(
            "it sums values that devices computed from terms of a sum that is not complete: the"
            " result is that of one device only if the computation between is linear up to"
            " rounding."
        )
    if "device" in kinds:
        raise Unproved("it sums values that devices chose by their own number.")
    if kinds == {"dim"} and constant:
        raise Unproved("it sums constants that differ between devices.")


def _incomplete(
    varying: list[Hidden], kind: str, groups: Groups, n: int, order: int
) -> list[Hidden]:
    """Return the coordinate of the reduction that remains after groups of n devices; none if it is
    complete.
    """
    stacked = np.stack([h.at.array for h in varying], axis=1)
    total = math.prod(h.count for h in varying)
    members = [frozenset(map(tuple, stacked[list(group)].tolist())) for group in groups]
    terms = frozenset().union(*members)
    if len(terms) < total:
        raise Unproved("it sums terms of which some are on no device.")
    if any(len(member) != n for member in members):
        raise Wrong(
            "some devices of a group hold the same term, which counts several times.", groups
        )
    if n > total:
        raise Wrong("its groups have more devices than there are terms.", groups)
    if n == total:
        return []
    distinct = sorted(set(members), key=sorted)
    if total % n or n * len(distinct) != len(terms):
        raise Wrong(
            "its groups sum sets of terms that overlap, so that no later sum can complete them.",
            groups,
        )
    # Groups that summed the same terms get one number: the next sum must see them as copies.
    at = _numbered(groups, [[distinct.index(member)] * n for member in members])
    origin = next((h.origin for h in varying if h.kind == kind), order)
    return [Hidden(kind, at, total // n, origin)]


def group_classes(groups: Groups) -> Positions:
    """Number the groups by their first device."""
    return _numbered(groups, [[min(group)] * len(group) for group in groups])


def _numbered(groups: Groups, numbers: Sequence[Sequence[int]]) -> Positions:
    """Return one number per device, from the numbers of the members of each group."""
    at = np.zeros(sum(map(len, groups)), np.int64)
    for group, members in zip(groups, numbers, strict=True):
        at[list(group)] = members
    return Positions.of(at)


def position_in_group(groups: Groups) -> Positions:
    """Return the position of each device in its group."""
    return _numbered(groups, [range(len(group)) for group in groups])


def block(value: DerivedValue, dim: int, at: Positions, n: int) -> DerivedValue:
    """Return one of n blocks of a dim: block `at` of each device."""
    if n == 1:
        return value
    size = value.shape[dim]
    shape = replaced(value.shape, dim, size // n)
    factors = list(normal(value.dims[dim]))
    hidden = cut_beside(value, shape)
    if factors and factors[0].size == 0 and factors[0].local % n == 0:
        factors[0] = factors[0]._replace(local=factors[0].local // n)
    elif factors and factors[0].size > 0 and factors[0].local % n == 0:
        major, minor = cut(factors[0], n)
        # In blocks: `major` counts blocks of the whole dim.
        start = Positions.of(major.at.array + at.array)
        if minor.local == 1:
            hidden = with_element(
                hidden, Hidden("dim", start, major.size, SCATTERED, math.prod(shape[dim + 1 :]))
            )
            factors = factors[1:]
        else:
            factors[0] = Factor(minor.local, major.size * minor.local, scaled(start, minor.local))
    else:
        raise Unproved("it cuts a dim that is made of several pieces.")
    new_dim = normal(tuple(factor for factor in factors if factor.local != 1))
    dims = replaced(value.dims, dim, new_dim)
    return value.changed(shape=shape, dims=dims, hidden=hidden, fill=value.fill)


def gathered(value: DerivedValue, dim: int, groups: Groups) -> DerivedValue:
    """Return the result of an all-gather along a dim: the pieces of each group, in its order."""
    devices, n = _sizes_of(groups)
    if n == 1:
        return value
    size = value.shape[dim]
    shape = replaced(value.shape, dim, size * n)
    if value.fill is not None and not value.hidden:
        return value.changed(
            shape=shape,
            dims=replaced(value.dims, dim, same_everywhere(size * n, devices)),
            fill=value.fill,
        )
    # joined in their order, pieces are a dim to the left of their elements
    minor = math.prod(value.shape[dim:])
    coordinate, hidden = _gathered_coordinate(value, groups, minor)
    dims = value.dims
    factors = list(value.dims[dim])
    if coordinate is None:
        factors = [Factor(n, 0, zeros(devices)), *factors]
    else:
        moved, factor = coordinate
        first = _first(factor.at, groups)
        if moved < 0:
            factors = [Factor(n, factor.size, first), *factors]
        elif moved == dim and factors[:1] == [factor]:
            factors[0] = Factor(factor.local * n, factor.size, first)
        elif size == 1:  # pieces become rows of a dim of their own
            factors = [Factor(n, factor.size // factor.local, scaled(first, 1, factor.local))]
            # the array that the piece was cut from is this new dim, so the piece becomes whole
            made_whole = (whole(f.local, devices)[0] if f == factor else f for f in dims[moved])
            dims = replaced(dims, moved, tuple(made_whole))
        else:
            raise Unproved(
                "it joins pieces of one dim along another: whether they are put in order later is"
                " not followed."
            )
    return value.changed(
        shape=shape, dims=replaced(dims, dim, normal(tuple(factors))), hidden=hidden
    )


def _first(at: Positions, groups: Groups) -> Positions:
    """Return the number of the first device of each group, on all of its devices."""
    return _numbered(groups, [[at.array[group[0]]] * len(group) for group in groups])


def _gathered_coordinate(
    value: DerivedValue, groups: Groups, minor: int
) -> tuple[tuple[int, Factor] | None, tuple[Hidden, ...]]:
    """Return the one coordinate that varies in the groups: (dim, factor), dim -1 for a hidden dim;
    None if there is none. And the hidden coordinates that remain.
    """
    factors = _varying_factors(value, groups)
    hidden = [h for h in value.hidden if _varying(h.at, groups)]
    if not factors and not hidden:
        return None, value.hidden
    remaining = tuple(h for h in value.hidden if h not in hidden)
    if len(factors) == 1 and not hidden:
        ((dim, factor),) = factors
        _check_ascending(factor.at, factor.local, groups)
        return (dim, factor), remaining
    kinds = {h.kind for h in hidden}
    if not factors and kinds == {"dim"}:
        return (-1, _joined_elements(value, hidden, groups, minor)), remaining
    if "device" in kinds:
        raise Unproved("it gathers values that devices chose by their own number.")
    if kinds - {"dim"}:
        raise Unproved("it gathers terms of a sum that is not complete.")
    raise Unproved("it gathers pieces that differ in several ways.")


def _joined_elements(
    value: DerivedValue, hidden: Sequence[Hidden], groups: Groups, minor: int
) -> Factor:
    """Return the dim whose elements the devices of each group hold, one each.

    Several dims become one: of them, the coordinate that changes last within a group is the major.
    """
    position = np.zeros_like(hidden[0].at.array)
    for h in sorted(hidden, key=lambda h: -_period(h.at, groups)):
        position = position * h.count + h.at.array
    at = Positions.of(position)
    _check_ascending(at, 1, groups)
    if {h.minor for h in hidden} != {minor} and math.prod(value.shape) != 1:
        raise Unproved(
            "it joins elements of a dim of which each device holds one; whether along that dim is"
            " unknown."
        )
    return Factor(1, math.prod(h.count for h in hidden), at)


def _period(at: Positions, groups: Groups) -> int:
    """Return how many neighbours in a group have equal coordinates."""
    row = at.array[list(groups[0])]
    return int(np.argmax(row != row[0])) or len(row)


def _check_ascending(at: Positions, step: int, groups: Groups) -> None:
    for row in (at.array[list(group)] for group in groups):
        if (row != row[0] + step * np.arange(len(row))).any():
            raise Wrong(
                "it joins pieces in another order than they have in the array: from"
                f" {row[:8].tolist()}.",
                groups,
            )


def exchanged(value: DerivedValue, dim: int, groups: Groups) -> DerivedValue:
    """Return the result of an all-to-all: block i of a dim goes to device i of the group, blocks
    arrive in its order.
    """
    devices, n = _sizes_of(groups)
    if n == 1:
        return value
    sent = block(value, dim, zeros(devices), n)
    # An all-to-all gathers the pieces of the senders. Each device then keeps one block.
    received = gathered(sent, dim, groups)
    # the block that arrives is the one with the receiver's number: gathering saw block 0 of every
    # device
    common = value._replace(hidden=tuple(h for h in value.hidden if not _varying(h.at, groups)))
    blocks = block(common, dim, position_in_group(groups), n)
    factors = list(received.dims[dim])
    for before, after in zip(sent.dims[dim], blocks.dims[dim], strict=False):
        if before == after:
            continue
        if before not in factors:
            raise Unproved("it exchanges blocks of a dim of which each device holds a piece.")
        factors[factors.index(before)] = after
    unchanged = tuple(h for h in received.hidden if h not in sent.hidden or h in blocks.hidden)
    new = tuple(h for h in blocks.hidden if h not in sent.hidden)
    return received.changed(
        dims=replaced(received.dims, dim, tuple(factors)),
        hidden=merged_hidden([unchanged, new]),
        fill=received.fill,
    )


def permuted(value: DerivedValue, senders: np.ndarray, order: int) -> DerivedValue:
    """Return the result of a collective-permute from one sender per device, -1 for none."""
    if value.zero:
        return value
    receives = Positions.of(senders >= 0)
    # A permute moves the facts about a device together with its data.
    source = np.where(senders < 0, np.arange(len(senders)), senders)  # the others get zeros

    def moved(at: Positions) -> Positions:
        return Positions.of(at.array[source])

    dims = tuple(
        tuple(factor._replace(at=moved(factor.at)) for factor in dim) for dim in value.dims
    )
    hidden = tuple(h._replace(at=moved(h.at)) for h in value.hidden)
    if varies(receives):
        hidden = (*hidden, Hidden("device", partition(receives), 2, order))
    return value.changed(dims=dims, hidden=merged_hidden([hidden]), fill=value.fill)
