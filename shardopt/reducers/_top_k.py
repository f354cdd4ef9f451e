"""`top_k`: send only the largest entries, as pairs of index and value."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core import Arrays, PyTree, calling, check_is_number, value_error
from shardopt.core._axis import AxisName
from shardopt.core._axis import axis_size as size_of
from shardopt.core._reducer import Dtypes, MessageCodec, Reducer, Values
from shardopt.reducers._axis import all_gather_packed
from shardopt.reducers._reducer import make_reducer, real_dtype, real_form


@calling("top_k")
def top_k(density: float = 0.01) -> Reducer:
    """Average the largest entries of each device's gradients; all other entries count as zero.

    Use it with `error_feedback`. Each device sends the k = density n entries of largest magnitude
    of each leaf of n entries (at least one), as (index, value). The mean is the sum of the received
    entries, divided by N.

    Args:
      density: the fraction of the entries that is sent, in (0, 1].

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `density` is not a number.
      ValueError: if it is outside (0, 1].

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.top_k(density=0.5)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)
      24576
      >>> grads = jnp.array([[4.0, 1.0], [2.0, -6.0]])
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data"))(grads)
      >>> print(mean[0])
      [ 2. -3.]

    **Equivalence**: equal to the mean at density 1. With `error_feedback` nothing is lost over
    time. NaN and inf count as the largest entries, so they are sent.

    **Placement**: no state.

    **Communication** per call and device, for Psi elements of b bytes: all-gathers of uint32
    indices and of values, (N-1) density Psi (4 + b) bytes. The bytes grow with N: they are density
    N times the bytes of an fp32 all-reduce.

    References:
      Lin et al., "Deep Gradient Compression", 2018, without its momentum correction.
    """
    check_is_number("density", density)
    if not 0 < density <= 1:
        fix = "use 1 to send everything, 0.01 to send one entry in a hundred."
        raise value_error(f"density must be above 0 and at most 1, got {density}.", fix=fix)
    functions = _TopK(density)
    return make_reducer(
        f"top_k(density={density:g})",
        send=functions.send,
        count_bytes=functions.count_bytes,
        codec=MessageCodec(functions.write, _read_entries),
    )


@dataclasses.dataclass(frozen=True)
class _TopK:
    """The functions of `top_k`, over lists of real arrays.

    The arguments are as in `make_reducer`.
    """

    density: float

    def send(
        self, values: Values, dtypes: Dtypes, state: PyTree, axis_name: AxisName
    ) -> tuple[Values, Values, PyTree]:
        sent_indices = self._indices(values)
        means, sent_entries = _mean_of_entries(values, sent_indices, dtypes, axis_name)
        residuals = [
            # What is sent leaves the residual: 0 where it was exact, else the rounding to the
            # wire's dtype.
            value.reshape(-1).at[indices].add(-entries).reshape(value.shape)
            for value, indices, entries in zip(values, sent_indices, sent_entries, strict=True)
        ]
        return means, residuals, state

    def write(self, values: Values, dtypes: Dtypes, state: PyTree) -> tuple[PyTree, PyTree]:
        sent_indices = self._indices(values)
        message = [
            # The same entries as `send`, without the mean over an axis.
            (indices.astype(jnp.uint32), value.reshape(-1)[indices].astype(dtype))
            for value, indices, dtype in zip(values, sent_indices, dtypes, strict=True)
        ]
        return message, state

    def count_bytes(self, params: PyTree, axis_size: int) -> int:
        message_bytes = 0
        for leaf in jax.tree.leaves(params):
            pair_bytes = 4 + real_dtype(leaf.dtype).itemsize
            message_bytes += num_sent(real_form(leaf).size, self.density) * pair_bytes
        return (axis_size - 1) * message_bytes

    def _indices(self, values: Values) -> Arrays:
        return [_largest_indices(value.reshape(-1), self.density) for value in values]


def _read_entries(message: PyTree, shapes: Sequence[Any], dtypes: Dtypes) -> Values:
    return [
        jnp.zeros(shape.size, shape.dtype)
        .at[indices]
        .set(entries.astype(shape.dtype), unique_indices=True)
        .reshape(shape.shape)
        for (indices, entries), shape in zip(message, shapes, strict=True)
    ]


def num_sent(size: int, density: float) -> int:
    """Return how many of `size` entries are sent: at least one, unless there are none."""
    return min(size, max(1, math.ceil(density * size - 1e-9 * size)))


def _largest_indices(flat: jax.Array, density: float) -> jax.Array:
    """Return the indices of the entries of largest magnitude; NaN counts as the largest."""
    if not flat.size:
        return jnp.zeros(0, jnp.int32)
    magnitude = jnp.where(jnp.isnan(flat), jnp.inf, jnp.abs(flat))
    return jax.lax.top_k(magnitude, num_sent(flat.size, density))[1]


@calling("top_k")
def _mean_of_entries(
    values: Values, sent_indices: Arrays, dtypes: Dtypes, axis_name: AxisName
) -> tuple[Values, Values]:
    """Return the means, and the entries that this device sent of each value, rounded as on the
    wire.
    """
    nonempty = [i for i, indices in enumerate(sent_indices) if indices.size]
    num_devices = size_of(axis_name)
    wire_entries = [values[i].reshape(-1)[sent_indices[i]].astype(dtypes[i]) for i in nonempty]
    wire_indices = [sent_indices[i].astype(jnp.uint32) for i in nonempty]
    # All leaves in one call: there is one gather for each dtype.
    received = all_gather_packed(
        [array[None] for array in [*wire_indices, *wire_entries]], axis_name
    )
    means = [jnp.zeros_like(value) for value in values]
    sent_entries = [jnp.zeros(0, value.dtype) for value in values]
    for position, i in enumerate(nonempty):
        pairs = received[position], received[len(nonempty) + position].astype(values[i].dtype)
        means[i] = _scatter_sum(*pairs, values[i].size).reshape(values[i].shape) / num_devices
        sent_entries[i] = wire_entries[position].astype(values[i].dtype)
    return means, sent_entries


def _scatter_sum(indices: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """Add up the received entries, one device after another.

    The indices of one device are unique, so every device adds in the same order and gets the same
    bits.
    """

    def add(dense, pairs):
        device_indices, entries = pairs
        return dense.at[device_indices].add(entries, unique_indices=True), None

    first = jnp.zeros(size, values.dtype).at[indices[0]].add(values[0], unique_indices=True)
    return jax.lax.scan(add, first, (indices[1:], values[1:]))[0]
