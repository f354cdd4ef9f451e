"""Replica groups back to the mesh axes that they span."""

from collections.abc import Mapping

import numpy as np

from shardopt.hlo.groups import Groups


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes that every group spans whole, in mesh order; None if the groups are no such product.

    Args:
      groups: positions in the mesh, which is flattened with its last axis fastest.
      sizes: mesh axis to size.

    Example:
      >>> axes_of_groups(((0, 2), (1, 3)), {"data": 2, "tensor": 2})
      ('data',)
      >>> axes_of_groups(((0, 3), (1, 2)), {"data": 2, "tensor": 2}) is None
      True
    """
    names = tuple(sizes)
    found: set[tuple[str, ...]] = set()
    for group in groups:
        coordinates = _coordinates(group, sizes)
        moving = (coordinates != coordinates[:, :1]).any(axis=1)
        axes = tuple(name for name, moves in zip(names, moving, strict=True) if moves)
        if len(set(group)) != np.prod([sizes[axis] for axis in axes], dtype=int):
            return None
        found.add(axes)
    return found.pop() if len(found) == 1 else None


def axis_of_parts(groups: Groups, sizes: Mapping[str, int]) -> str | None:
    """Return the mesh axis of which every group is a part, cut as a mesh with more axes would cut it; else None.

    Such are the groups of one step of a collective that goes over an axis in several: neighbours first, then every other.

    Args:
      groups: positions in the mesh, which is flattened with its last axis fastest.
      sizes: mesh axis to size.

    Example:
      >>> axis_of_parts(((0, 1), (2, 3)), {"data": 4}), axis_of_parts(((0, 2), (1, 3)), {"data": 4})
      ('data', 'data')
      >>> axis_of_parts(((0, 3), (1, 2)), {"data": 4}) is None
      True
    """
    names = tuple(sizes)
    found: set[tuple[int, int, int]] = set()
    for group in groups:
        coordinates = _coordinates(tuple(sorted(group)), sizes)
        moving = np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1))
        if len(moving) != 1:
            return None
        places, count = coordinates[moving[0]], len(group)
        stride = int(places[1] - places[0])
        first = places[0] // (stride * count) * stride * count + places[0] % stride
        if (places != first + stride * np.arange(count)).any():
            return None
        found.add((int(moving[0]), stride, count))
    if len(found) != 1:
        return None
    ((axis, stride, count),) = found
    size = sizes[names[axis]]
    return names[axis] if count < size and size % (stride * count) == 0 else None


def axes_of_pairs(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which any (source, target) pair moves, in mesh order."""
    source, target = (_coordinates(ends, sizes) for ends in zip(*pairs, strict=True))
    moving = (source != target).any(axis=1)
    return tuple(name for name, moves in zip(sizes, moving, strict=True) if moves)


def _coordinates(positions: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    return np.stack(np.unravel_index(np.array(positions), tuple(sizes.values())))
