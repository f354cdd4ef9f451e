"""In how many steps a gather or scatter goes over a mesh axis, so that the compiler renders it as one."""

import jax

from shardopt.mesh import device_kind

Groups = list[list[int]]

_TORUS_OF_THREE = ("TPU v4", "TPU v5", "TPU7x")
"""Kinds of chips whose torus has three axes; v5p calls itself "TPU v5"."""

_LEAST = 64
"""From so many chips on XLA:TPU was seen to do it: 16 and 32 were gathered over."""


def steps_over(axis: str) -> list[Groups | None]:
    """Return the groups of each step of a gather over an axis, in order; a scatter takes them the other way round.

    XLA:TPU makes an all-reduce of padded buffers of a gather over every chip of a torus of three axes, and another of a
    scatter: twice the bytes, and twice the memory. It leaves alone what goes over fewer. So where an axis is the whole
    torus, pairs of neighbours gather first, and then every other chip: as many bytes as one gather, (n - 1) / n of the
    whole. Of one slice: a torus in each of several slices goes in one step, which has not been compiled.
    """
    mesh = jax.sharding.get_abstract_mesh()
    n = mesh.shape[axis]
    if not is_whole_torus(device_kind(), n, mesh.size):
        return [None]
    return [[[i, i + 1] for i in range(0, n, 2)], [list(range(first, n, 2)) for first in range(2)]]


def is_whole_torus(kind: str | None, size: int, devices: int) -> bool:
    """Return whether an axis of this size is a torus of three axes, as far as a program under trace can tell."""
    return kind in _TORUS_OF_THREE and size == devices and size >= _LEAST and size % 2 == 0
