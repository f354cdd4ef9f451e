"""Attention with whole rows of keys on each device: gathered over the context axis, or exchanged for heads."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardopt.collectives.shards import psum_scatter
from shardopt.nn.flash import Marks, Rule, absorb, delta_of, finish, gradients, heads_first, heads_last, start

Axes = tuple[str, ...]
Attention = Callable[[Array, Array, Array, Marks], Array]


def exchanged_attention(
    axes: Axes,
    size: int,
    degree: int,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    marks: Marks,
    run: Attention,
) -> Float[Array, "B T H K"]:
    """Exchange heads for positions among `degree` neighbours, attend, and exchange back; a ring across such groups.

    Args:
      axes: names of the context axis.
      size: devices on it.
      degree: a divisor of `size` and of G: device i has outer index i // degree, inner index i % degree.
      query: [B, T, H, K], T positions of this device.
      key: [B, T, G, K].
      value: [B, T, G, K].
      marks: of these positions.
      run: attention of [B, degree T, H / degree, K] and so on, with the ring across groups if there are several.
    """
    groups = None
    if degree < size:
        groups = [list(range(first, first + degree)) for first in range(0, size, degree)]
    to_heads = functools.partial(
        lax.all_to_all, axis_name=axes, split_axis=2, concat_axis=1, axis_index_groups=groups, tiled=True
    )
    gathered = functools.partial(lax.all_gather, axis_name=axes, axis=1, axis_index_groups=groups, tiled=True)
    marks = jax.tree.map(lambda x: gathered(x), marks)
    mixed = run(to_heads(query), to_heads(key), to_heads(value), marks)
    return lax.all_to_all(mixed, axis_name=axes, split_axis=1, concat_axis=2, axis_index_groups=groups, tiled=True)


def gathered_attention(
    axes: Axes,
    rule: Rule,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    marks: Marks,
) -> Float[Array, "B T H K"]:
    """Gather keys and values, again in the backward pass, and scatter the sums of dK and dV, in float32 at least."""
    return heads_last(_attend(axes, rule, *heads_first(query, key, value), marks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(axes: Axes, rule: Rule, query: Array, key: Array, value: Array, marks: Marks) -> Array:
    return _forward(axes, rule, query, key, value, marks)[0]


def _forward(axes: Axes, rule: Rule, query: Array, key: Array, value: Array, marks: Marks) -> tuple[Array, tuple]:
    state = absorb(start(query), query, *_gathered(axes, key, value, marks), rule)
    out, logsumexp = finish(state, value.dtype)
    return out, (query, key, value, marks, out, logsumexp)


def _backward(axes: Axes, rule: Rule, kept: tuple, d_out: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, marks, out, logsumexp = kept
    key, value, d_out = lax.optimization_barrier((key, value, d_out))  # else XLA keeps what the forward pass gathered
    delta = delta_of(out, d_out, logsumexp)
    block = _gathered(axes, key, value, marks)
    dq, dk, dv = gradients(query, *block[:2], logsumexp, delta, d_out, *block[2:], rule)
    dk, dv = (psum_scatter(x, axes, 2) for x in (dk, dv))
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


def _gathered(axes: Axes, key: Array, value: Array, marks: Marks) -> tuple[Array, Array, Marks, Marks]:
    """Return all keys, all values, the marks of this device's positions and those of all."""
    length = key.shape[2]
    gathered = functools.partial(lax.all_gather, axis_name=axes, tiled=True)
    seen = jax.tree.map(lambda x: gathered(x, axis=1), marks)
    key, value = gathered(key, axis=2), gathered(value, axis=2)
    if marks.positions is None:
        at = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
        own = lax.dynamic_slice_in_dim(at, lax.axis_index(axes) * length, length, axis=1)
        marks, seen = marks._replace(positions=own), seen._replace(positions=at)
    return key, value, marks, seen
