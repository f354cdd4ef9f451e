"""`top_k`: the largest entries, as pairs of index and value."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.arguments import check_is_number
from shardopt.core.errors import format_error
from shardopt.reducers.axis import AxisName, all_gather_packed
from shardopt.reducers.axis import axis_size as size_of
from shardopt.reducers.device_state import ErrorFeedback
from shardopt.reducers.reducer import (
    Dtypes,
    MessageCodec,
    Reducer,
    Values,
    make_reducer,
    narrow,
    real_dtype,
    real_shape,
    widen,
    zeros_like,
)


class TopKState(NamedTuple):
    """The state of `top_k` with momentum.

    Attributes:
      velocity: u of each device, like the gradients, in fp32 at least. Differs between devices.
    """

    velocity: ErrorFeedback


def top_k(density: float = 0.01, *, momentum: float = 0.0) -> Reducer:
    """Average the entries that each device finds largest, zero elsewhere; use it with `error_feedback`.

    Each device sends the k = density n entries of largest magnitude of each leaf (at least one), as (index, value);
    the mean is the sum of what came, over N. With momentum mu > 0, momentum correction: u = mu u + g takes the place
    of g, and u becomes zero where it was sent; the optimizer should then have no momentum of its own.

    **Equivalence**: the mean at density 1; with `error_feedback` nothing is lost over time. NaN and inf count as
    largest, so they are sent.

    **Placement**: no state; with momentum, u is local to each device, as large as its gradients in fp32.

    **Communication** a call, per device, for Psi elements of b bytes: all-gathers of uint32 indices and of values,
    (N-1) density Psi (4 + b) bytes. That grows with N: against fp32 all-reduces it is density N times as much.

    Args:
      density: the part of the entries that is sent, in (0, 1].
      momentum: mu, in [0, 1).

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if `density` is outside (0, 1] or `momentum` outside [0, 1).

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.top_k(density=0.5)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)
      24576
      >>> grads = jnp.array([[4.0, 1.0], [2.0, -6.0]])
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data"))(grads)
      >>> print(mean[0])
      [ 2. -3.]

    References:
      Lin et al., "Deep Gradient Compression", 2018, section 3.1 (momentum correction) and 3.2 (factor masking).
    """
    check_is_number("top_k", "density", density)
    check_is_number("top_k", "momentum", momentum)
    if not 0 < density <= 1:
        fix = "use 1 to send everything, 0.01 to send one entry in a hundred."
        raise ValueError(format_error("top_k", f"density must be above 0 and at most 1, got {density}.", fix=fix))
    if not 0 <= momentum < 1:
        raise ValueError(format_error("top_k", f"momentum must be at least 0 and below 1, got {momentum}."))
    corrects = momentum > 0

    def init(params):
        return TopKState(ErrorFeedback(zeros_like(params))) if corrects else ()

    def correct(values, state):
        leaves, treedef = jax.tree.flatten(state.velocity.value)
        moved = [momentum * u + g for u, g in zip(widen(leaves), values, strict=True)]
        kept = narrow(moved, [leaf.dtype for leaf in leaves])
        return moved, TopKState(ErrorFeedback(treedef.unflatten(kept)))

    def send(values, dtypes, state, axis_name):
        chosen = [_largest(value.reshape(-1), density) for value in values]
        means, sent = _mean_of_chosen(values, chosen, dtypes, axis_name)
        lefts = [
            value.reshape(-1).at[at].add(-own).reshape(value.shape)
            for value, at, own in zip(values, chosen, sent, strict=True)
        ]
        if corrects:
            state = _forget_sent(state, chosen)
        return means, lefts, state

    def write(values, dtypes, state):
        chosen = [_largest(value.reshape(-1), density) for value in values]
        pairs = [
            (at.astype(jnp.uint32), value.reshape(-1)[at].astype(dtype))
            for value, at, dtype in zip(values, chosen, dtypes, strict=True)
        ]
        return pairs, _forget_sent(state, chosen) if corrects else state

    def read(message, shapes, dtypes):
        return [
            jnp.zeros(like.size, like.dtype)
            .at[at]
            .set(entries.astype(like.dtype), unique_indices=True)
            .reshape(like.shape)
            for (at, entries), like in zip(message, shapes, strict=True)
        ]

    def count(params, axis_size):
        pairs = 0
        for leaf in jax.tree.leaves(params):
            width = 4 + real_dtype(leaf.dtype).itemsize
            pairs += num_sent(math.prod(real_shape(leaf)), density) * width
        return (axis_size - 1) * pairs

    name = f"top_k(density={density:g})" if not corrects else f"top_k(density={density:g}, momentum={momentum:g})"
    codec = MessageCodec(write, read)
    return make_reducer(name, init=init, send=send, count=count, correct=correct if corrects else None, codec=codec)


def num_sent(size: int, density: float) -> int:
    """Return how many of so many entries are sent: at least one, if there is one."""
    return min(size, max(1, math.ceil(density * size - 1e-9 * size)))


def _largest(flat: jax.Array, density: float) -> jax.Array:
    """Return where the largest entries are, NaN before all others."""
    if not flat.size:
        return jnp.zeros(0, jnp.int32)
    magnitude = jnp.where(jnp.isnan(flat), jnp.inf, jnp.abs(flat))
    return jax.lax.top_k(magnitude, num_sent(flat.size, density))[1]


def _mean_of_chosen(
    values: Values, chosen: list[jax.Array], dtypes: Dtypes, axis_name: AxisName
) -> tuple[Values, Values]:
    """Return the means, and what this device sent of each value, rounded as on the wire."""
    busy = [i for i, at in enumerate(chosen) if at.size]
    count = size_of("top_k", axis_name)
    narrowed = [values[i].reshape(-1)[chosen[i]].astype(dtypes[i]) for i in busy]
    indices = [chosen[i].astype(jnp.uint32) for i in busy]
    came = all_gather_packed([part[None] for part in [*indices, *narrowed]], axis_name)
    means, sent = [jnp.zeros_like(value) for value in values], [jnp.zeros(0, value.dtype) for value in values]
    for position, i in enumerate(busy):
        pairs = came[position], came[len(busy) + position].astype(values[i].dtype)
        means[i] = _scatter_sum(*pairs, values[i].size).reshape(values[i].shape) / count
        sent[i] = narrowed[position].astype(values[i].dtype)
    return means, sent


def _scatter_sum(indices: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """Add up the pairs device after device: no index comes twice at once, so all devices add in the same order."""

    def add(dense, pairs):
        at, entries = pairs
        return dense.at[at].add(entries, unique_indices=True), None

    first = jnp.zeros(size, values.dtype).at[indices[0]].add(values[0], unique_indices=True)
    return jax.lax.scan(add, first, (indices[1:], values[1:]))[0]


def _forget_sent(state: TopKState, chosen: list[jax.Array]) -> TopKState:
    leaves, treedef = jax.tree.flatten(state.velocity.value)
    kept = []
    for u, at in zip(widen(leaves), chosen, strict=True):
        kept.append(u.reshape(-1).at[at].set(0).reshape(u.shape))
    return TopKState(ErrorFeedback(treedef.unflatten(narrow(kept, [leaf.dtype for leaf in leaves]))))
