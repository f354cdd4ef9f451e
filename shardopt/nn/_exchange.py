"""Attention with whole rows of keys on each device: gathered over the context axis, or exchanged
for heads.
"""

import functools
from collections.abc import Callable

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
    absorb,
    delta_of,
    empty_state,
    finish,
    gradients,
    heads_first,
    heads_last,
    sink_gradient,
)

Axes = tuple[str, ...]
Attention = Callable[[Array, Array, Array, Marks, Array | None], Array]


def exchanged_attention(
    axes: Axes,
    degree: int,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    marks: Marks,
    sinks: Float[Array, " H"] | None,
    run: Attention,
) -> Float[Array, "B T H K"]:
    """Exchange heads for positions among `degree` neighbours, attend, and exchange back.

    Several groups form a ring.

    Args:
      axes: names of the context axis.
      degree: a divisor of the size of the axis and of G: device i has outer index i // degree,
        inner index i % degree.
      query: [B, T, H, K], T positions of this device.
      key: [B, T, G, K].
      value: [B, T, G, K].
      marks: the marks of these positions.
      sinks: the sinks of all H heads.
      run: attention of [B, degree T, H / degree, K] and so on; it includes the ring across groups,
        if there are several.
    """
    size = lax.axis_size(axes)
    groups = None
    if degree < size:
        groups = [list(range(first, first + degree)) for first in range(0, size, degree)]
    to_heads = functools.partial(
        lax.all_to_all,
        axis_name=axes,
        split_axis=2,
        concat_axis=1,
        axis_index_groups=groups,
        tiled=True,
    )
    gather = functools.partial(
        lax.all_gather, axis_name=axes, axis=1, axis_index_groups=groups, tiled=True
    )
    marks = jax.tree.map(lambda x: gather(x), marks)
    if sinks is not None:  # the sinks of this device's heads
        count = sinks.shape[0] // degree
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axes) % degree * count, count)
    mixed = run(to_heads(query), to_heads(key), to_heads(value), marks, sinks)
    return lax.all_to_all(
        mixed, axis_name=axes, split_axis=1, concat_axis=2, axis_index_groups=groups, tiled=True
    )


def gathered_attention(
    axes: Axes,
    rule: MaskRule,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    marks: Marks,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "B T H K"]:
    """Gather keys and values, attend, and scatter the sums of dK and dV, in float32 at least.

    The backward pass gathers keys and values again.
    """
    return heads_last(_attend(axes, rule, *heads_first(query, key, value), marks, sinks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    axes: Axes,
    rule: MaskRule,
    query: Array,
    key: Array,
    value: Array,
    marks: Marks,
    sinks: Array | None,
) -> Array:
    return _forward(axes, rule, query, key, value, marks, sinks)[0]


def _forward(
    axes: Axes,
    rule: MaskRule,
    query: Array,
    key: Array,
    value: Array,
    marks: Marks,
    sinks: Array | None,
) -> tuple[Array, tuple]:
    state = absorb(empty_state(query), query, *_gather_keys(axes, key, value, marks), rule)
    out, logsumexp = finish(state, value.dtype, sinks)
    return out, (query, key, value, marks, sinks, out, logsumexp)


def _backward(
    axes: Axes, rule: MaskRule, residuals: tuple, d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    query, key, value, marks, sinks, out, logsumexp = residuals
    # otherwise XLA stores the keys and values that the forward pass gathered
    key, value, d_out = lax.optimization_barrier((key, value, d_out))
    delta = delta_of(out, d_out, logsumexp)
    query_marks, keys = _gather_keys(axes, key, value, marks)
    dq, dk, dv = gradients(Queries(query, d_out, logsumexp, delta, query_marks), keys, rule)
    dk, dv = (psum_scatter(x, axes, 2) for x in (dk, dv))
    d_sinks = sink_gradient(sinks, logsumexp, delta)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None, d_sinks


_attend.defvjp(_forward, _backward)


def _gather_keys(axes: Axes, key: Array, value: Array, query_marks: Marks) -> tuple[Marks, Keys]:
    """Return the marks of this device's positions, and the keys of all positions."""
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
