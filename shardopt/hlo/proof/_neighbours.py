"""Pieces of neighbours: a device joins the pieces of devices next to it, and cuts its own block out
of them.

XLA does this if a collective leaves pieces of another size than a sharding has, such as whole
tiles.
"""

from collections.abc import Sequence

import numpy as np

from shardopt.hlo.proof._indexing import starts_of
from shardopt.hlo.proof._lines import Line
from shardopt.hlo.proof._value import DerivedValue, Factor, Positions, Unproved, replaced

NOWHERE = -(1 << 60)


def window(
    value: DerivedValue, dim: int, senders: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> DerivedValue | None:
    """Return the interval of a dim that each device joins from pieces of a value.

    None if it is no interval.

    Elements outside of the dim are anything: no device sends them.

    Args:
      value: the value. Each device holds a piece.
      dim: the dim along which pieces are joined.
      senders: the device that each piece comes from, `[pieces, devices]`; -1 for none.
      starts: where each piece starts in the sender's piece of the dim.
      sizes: the number of elements of each piece.
    """
    if len(value.dims) <= dim or len(value.dims[dim]) != 1:
        return None
    factor = value.dims[dim][0]
    has_sender = senders >= 0
    offsets = np.cumsum(sizes) - sizes
    # [pieces, devices]: where the joined interval would begin in the dim, if this piece is at its
    # place. All pieces of a device must say the same.
    places = factor.at.array[senders] + (starts - offsets)[:, None]
    at = np.where(has_sender, places, NOWHERE).max(0)
    low = at + offsets[:, None]
    high = at + (offsets + sizes)[:, None]
    coordinates = [f.at for i, factors in enumerate(value.dims) for f in factors if i != dim] + [
        h.at for h in value.hidden
    ]
    if (
        factor.size <= factor.local
        or not np.where(has_sender, places == at, (high <= 0) | (low >= factor.size)).all()
        or any((at_of.array[senders] != at_of.array)[has_sender].any() for at_of in coordinates)
    ):
        return None
    joined = Factor(int(sizes.sum()), factor.size, Positions.of(at))
    shape = replaced(value.shape, dim, joined.local)
    dims = replaced(value.dims, dim, (joined,))
    return value.changed(shape=shape, dims=dims)


def block_of(line: Line, interval: DerivedValue, indices: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of a dynamic slice of an interval: the slices are the blocks of a dim, from
    its first element on.
    """
    cut = [dim for dim, size in enumerate(line.dims) if size != interval.shape[dim]]
    starts = starts_of(indices[cut[0]], line.devices) if len(cut) == 1 else None
    (factor,) = interval.dims[cut[0]]
    size = line.dims[cut[0]]
    if starts is None or size == 1:
        raise Unproved("it slices what neighbours joined at a place that is unknown.")
    at = factor.at.array + np.clip(starts, 0, factor.local - size)
    blocks = np.unique(at)
    total = size * len(blocks)
    if (blocks != np.arange(0, total, size)).any() or total > factor.size:
        raise Unproved("its slices of what neighbours joined are not the blocks of a dim.")
    dims = replaced(interval.dims, cut[0], (Factor(size, total, Positions.of(at)),))
    return DerivedValue(line.dims, dims, interval.hidden, interval.constant)
