"""Ring buffers: lists of arrays [num_slots, ...] that are read and written one slot at a time."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Arrays = list[Any]


def make_ring(shapes: Sequence[Any], num_slots: int, fill: float) -> Arrays:
    """Return a ring for arrays of these shapes; a ring of no slots is no arrays."""
    return [full_ring((num_slots, *one.shape), one.dtype, fill) for one in shapes] if num_slots else []


def full_ring(shape: tuple[int, ...], dtype: Any, fill: float) -> Any:
    """Return an array of `fill`, or of zeros where the dtype is not floating."""
    return jnp.full(shape, fill if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


def write_slot(ring: Arrays, slot: Any, values: Sequence[Any]) -> Arrays:
    """Return the ring with `values` in a slot."""
    return [jax.lax.dynamic_update_index_in_dim(r, x, slot, 0) for r, x in zip(ring, values, strict=True)]


def write_tree(stacked: Any, slot: Any, values: Any) -> Any:
    """Return a pytree of stacked arrays with a pytree of values in a slot."""
    return jax.tree.map(lambda r, x: jax.lax.dynamic_update_index_in_dim(r, x, slot, 0), stacked, values)


def read_slot(ring: Arrays, slot: Any) -> Arrays:
    """Return what lies in a slot."""
    return [jax.lax.dynamic_index_in_dim(r, slot, 0, keepdims=False) for r in ring]


def add_to_slot(ring: Arrays, slot: Any, values: Sequence[Any]) -> Arrays:
    """Return the ring with `values` added to a slot, in the dtype of the ring."""
    return write_slot(
        ring, slot, [old + new.astype(old.dtype) for old, new in zip(read_slot(ring, slot), values, strict=True)]
    )


def blank_ring(shapes: Sequence[Any], fill: float) -> Arrays:
    """Return arrays of these shapes, filled."""
    return [full_ring(one.shape, one.dtype, fill) for one in shapes]
