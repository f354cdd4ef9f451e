"""Attention over keys that come block by block from other devices: for the backward pass it keeps the
output, and the keys come again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
from jax import lax
from jaxtyping import Array, Float

from shardopt.kernels._flash import (
    Keys,
    Marks,
    Queries,
    State,
    delta_of,
    finish,
    heads_first,
    heads_last,
    sink_gradient,
)


class Operands(NamedTuple):
    """The arrays of attention.

    Attributes:
      query: [B, T, H, K].
      key: [B, T, G, K].
      value: [B, T, G, V].
      marks: the positions and segments of the T tokens.
      sinks: [H], or None.
    """

    query: Float[Array, "B T H K"]
    key: Float[Array, "B T G K"]
    value: Float[Array, "B T G V"]
    marks: Marks
    sinks: Float[Array, " H"] | None


Attention = Callable[[Operands], Float[Array, "B T H V"]]


class Blocks(Protocol):
    """How the keys of all devices come to the queries of this one. It is hashable."""

    def absorb(self, query: Array, keys: Keys) -> State:
        """Return the state of these queries after all keys; this device holds `keys`."""
        ...

    def gradients(self, queries: Queries, keys: Keys) -> tuple[Array, Array, Array]:
        """Return dQ of these queries, and dK and dV of the keys of this device from all queries."""
        ...


def attend(blocks: Blocks, operands: Operands) -> Float[Array, "B T H K"]:
    """Return attention of these queries over the keys of all devices; values are as wide as keys."""
    query, key, value, marks, sinks = operands
    return heads_last(_attend(blocks, *heads_first(query, key, value), marks, sinks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: Blocks, query: Array, key: Array, value: Array, marks: Marks, sinks: Array | None
) -> Array:
    return _forward(blocks, query, key, value, marks, sinks)[0]


def _forward(
    blocks: Blocks, query: Array, key: Array, value: Array, marks: Marks, sinks: Array | None
) -> tuple[Array, tuple]:
    state = blocks.absorb(query, Keys(key, value, marks))
    out, logsumexp = finish(state, value.dtype, sinks)
    return out, (query, key, value, marks, sinks, out, logsumexp)


def _backward(
    blocks: Blocks, residuals: tuple, d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    query, key, value, marks, sinks, out, logsumexp = residuals
    # otherwise XLA may store the keys and values that came in the forward pass
    key, value, d_out = lax.optimization_barrier((key, value, d_out))
    delta = delta_of(out, d_out, logsumexp)
    queries = Queries(query, d_out, logsumexp, delta, marks)
    dq, dk, dv = blocks.gradients(queries, Keys(key, value, marks))
    d_sinks = sink_gradient(sinks, logsumexp, delta)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype), None, d_sinks


_attend.defvjp(_forward, _backward)
