"""Attention with whole rows of keys on each device: gathered over the context axis, or exchanged
for heads.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardopt.collectives._shards import psum_scatter
from shardopt.kernels._flash import (
    Keys,
    Marks,
    MaskRule,
    Queries,
    State,
    absorb,
    empty_state,
    gradients,
)
from shardopt.nn._blocks_of_keys import Attention, Operands
from shardopt.nn._regions import Axes


def exchanged_attention(
    axes: Axes,
    degree: int,
    operands: Operands,
    run: Attention,
) -> Float[Array, "B T H K"]:
    """Exchange heads for positions among `degree` neighbours, attend, and exchange back.

    Several groups form a ring.

    Args:
      axes: names of the context axis.
      degree: a divisor of the size of the axis and of G: device i has outer index i // degree,
        inner index i % degree.
      operands: T positions of this device, and the sinks of all H heads; values are as wide as
        keys.
      run: attention of [B, degree T, H / degree, K] and so on; it includes the ring across groups,
        if there are several.
    """
    query, key, value, marks, sinks = operands
    size = lax.axis_size(axes)
    groups = None
    if degree < size:
        groups = [list(range(first, first + degree)) for first in range(0, size, degree)]
    options = {"axis_name": axes, "axis_index_groups": groups, "tiled": True}
    to_heads = functools.partial(lax.all_to_all, split_axis=2, concat_axis=1, **options)
    marks = jax.tree.map(lambda x: lax.all_gather(x, axis=1, **options), marks)
    if sinks is not None:  # the sinks of this device's heads
        count = sinks.shape[0] // degree
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axes) % degree * count, count)
    mixed = run(Operands(to_heads(query), to_heads(key), to_heads(value), marks, sinks))
    return lax.all_to_all(mixed, split_axis=1, concat_axis=2, **options)


class GatheredKeys(NamedTuple):
    """The keys of all devices at once; the backward pass gathers them again.

    Attributes:
      axes: names of the context axis.
      rule: which positions see which.
    """

    axes: Axes
    rule: MaskRule

    def absorb(self, query: Array, keys: Keys) -> State:
        """Return the state of these queries after all keys."""
        return absorb(empty_state(query), query, *_gather_keys(self.axes, keys), self.rule)

    def gradients(self, queries: Queries, keys: Keys) -> tuple[Array, Array, Array]:
        """Return dQ, and the sums of dK and dV, which are scattered in float32 at least."""
        query_marks, all_keys = _gather_keys(self.axes, keys)
        dq, dk, dv = gradients(queries._replace(marks=query_marks), all_keys, self.rule)
        return dq, psum_scatter(dk, self.axes, 2), psum_scatter(dv, self.axes, 2)


def _gather_keys(axes: Axes, keys: Keys) -> tuple[Marks, Keys]:
    """Return the marks of this device's positions, and the keys of all positions."""
    key, value, query_marks = keys
    length = key.shape[2]
    gather = functools.partial(lax.all_gather, axis_name=axes, tiled=True)
    key_marks = jax.tree.map(lambda x: gather(x, axis=1), query_marks)
    key = gather(key, axis=2)
    value = gather(value, axis=2)
    if query_marks.positions is None:
        all_positions = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
        local_positions = lax.dynamic_slice_in_dim(
            all_positions, lax.axis_index(axes) * length, length, axis=1
        )
        query_marks = query_marks._replace(positions=local_positions)
        key_marks = key_marks._replace(positions=all_positions)
    return query_marks, Keys(key, value, key_marks)
