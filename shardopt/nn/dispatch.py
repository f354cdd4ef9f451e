"""Tokens to their experts and back: sorted by expert, and over the devices of the expert axis by one ragged exchange each way.

Experts lie on devices in order, and a slice is sent for each expert, straight to where its rows begin at the receiver: what
arrives is sorted by expert too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardopt.collectives.shards import all_to_all
from shardopt.core.types import wide_dtype
from shardopt.mesh import device_kind_or_default

Axes = tuple[str, ...]


class Order(NamedTuple):
    """The choices of n tokens sorted by expert, those without a place last.

    Attributes:
      order: [n K], which choice (token * K + k) stands at each place.
      inverse: [n K], at which place each choice stands.
      sizes: [E], int32, how many choices each expert has.
    """

    order: Array
    inverse: Array
    sizes: Array


def sorted_by_expert(experts: Int[Array, "n K"], num_experts: int) -> Order:
    """Sort choices; tokens of an expert stay in order."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return Order(order, jnp.argsort(order), sizes)


@jax.custom_vjp
def spread(x: Float[Array, "n D"], order: Array, inverse: Array) -> Float[Array, "nK D"]:
    """Return the token of each choice, in order. Backwards the gradients of a token's choices are gathered, not scattered."""
    return x[order // (order.shape[0] // x.shape[0])]


spread.defvjp(
    lambda x, order, inverse: (spread(x, order, inverse), (x.shape[0], order, inverse)),
    lambda kept, grads: (_summed(kept[0], grads, kept[2]), None, None),
)


def combine(rows: Float[Array, "nK D"], order: Array, inverse: Array, tokens: int) -> Float[Array, "n D"]:
    """Return the sum over each token's choices, in float32 at least: the transpose of `spread`."""
    return _combine(tokens, rows, order, inverse)


def _summed(tokens: int, rows: Array, inverse: Array) -> Array:
    return jnp.sum(rows[inverse].reshape(tokens, -1, rows.shape[1]), axis=1, dtype=wide_dtype(rows.dtype)).astype(
        rows.dtype
    )


_combine = jax.custom_vjp(lambda tokens, rows, order, inverse: _summed(tokens, rows, inverse), nondiff_argnums=(0,))
_combine.defvjp(
    lambda tokens, rows, order, inverse: (_summed(tokens, rows, inverse), (order, inverse)),
    lambda tokens, kept, grad: (spread(grad, *kept), None, None),
)


class Slices(NamedTuple):
    """What `jax.lax.ragged_all_to_all` is told: of each slice, S for each device in turn, all [X S], int32.

    Attributes:
      input_offsets: where it begins here.
      send_sizes: its rows.
      output_offsets: where it begins at its receiver.
      recv_sizes: rows of the slices that are received, S from each device in turn.
    """

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


class Exchange(NamedTuple):
    """How rows travel to the experts' devices, and back.

    Attributes:
      there: a slice of sorted rows for each expert.
      back: a slice of received rows for each device and expert here.
      sizes: [E / X], how many rows each expert here gets, of all devices.
    """

    there: Slices
    back: Slices
    sizes: Array


def plan_exchange(axes: Axes, sizes: Int[Array, " E"]) -> Exchange:
    """Tell all devices how many rows go where: an all-gather of 4 X E bytes."""
    devices, me = lax.axis_size(axes), lax.axis_index(axes)
    of_all = lax.all_gather(sizes, axes)  # [X, E]
    here = sizes.shape[0] // devices
    begins = jnp.cumsum(of_all, axis=1) - of_all  # of each expert among the sorted rows of each device
    totals = jnp.sum(of_all, axis=0).reshape(devices, here)
    at_receiver = (jnp.cumsum(totals, axis=1) - totals).reshape(-1)[None] + jnp.cumsum(of_all, axis=0) - of_all
    mine = lambda x: lax.dynamic_slice_in_dim(x, me * here, here, axis=1).reshape(-1)  # noqa: E731
    there = Slices(begins[me], sizes, at_receiver[me], mine(of_all))
    back = Slices(mine(at_receiver), mine(of_all), mine(begins), sizes)
    return Exchange(there, back, totals[me])


def send(axes: Axes, most: int, num_rows: int, rows: Array, there: Slices, back: Slices) -> Array:
    """Return the `num_rows` rows that are received, 0 where none is; backwards their gradients go the other way.

    Args:
      axes: of the mesh, over which rows travel.
      most: how many rows go from one device to another at most.
      num_rows: of the result.
      rows: [*, D].
      there: what goes where.
      back: the same, to where the rows were.
    """
    return _send(axes, most, num_rows, rows.shape[0], rows, there, back)


def _moved(axes: Axes, most: int, num_rows: int, rows: Array, slices: Slices) -> Array:
    output = jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype)
    if device_kind_or_default() == "cpu":  # where XLA does not have it
        return _moved_padded(axes, most, rows, output, slices)
    return lax.ragged_all_to_all(rows, output, *slices, axis_name=axes)


def _moved_padded(axes: Axes, most: int, rows: Array, output: Array, slices: Slices) -> Array:
    """Do what `jax.lax.ragged_all_to_all` does by an all_to_all of `most` rows for each device."""
    devices = lax.axis_size(axes)
    received_at = lax.all_to_all(slices.output_offsets, axes, 0, 0, tiled=True)
    taken = _places(slices.input_offsets, slices.send_sizes, devices, most, rows.shape[0])
    written = _places(received_at, slices.recv_sizes, devices, most, output.shape[0])
    sent = jnp.take(rows, taken, axis=0, mode="fill", fill_value=0)
    return output.at[written].set(all_to_all(sent, axes, 0, 0), mode="drop")


def _places(offsets: Array, sizes: Array, devices: int, most: int, nowhere: int) -> Array:
    """Return [X most], the row at each place where slices stand packed, device by device; `nowhere` where there is none."""
    offsets, sizes = offsets.reshape(devices, -1), sizes.reshape(devices, -1)
    ends, at = jnp.cumsum(sizes, axis=1), jnp.arange(most)
    which = jnp.sum(at[None, :, None] >= ends[:, None], axis=2)  # of the slices of a device
    ahead = jnp.take_along_axis(offsets - (ends - sizes), jnp.minimum(which, offsets.shape[1] - 1), axis=1)
    return jnp.where(which < offsets.shape[1], ahead + at[None], nowhere).reshape(-1)


_send = jax.custom_vjp(
    lambda axes, most, num_rows, num_sent, rows, there, back: _moved(axes, most, num_rows, rows, there),
    nondiff_argnums=(0, 1, 2, 3),
)
_send.defvjp(
    lambda axes, most, num_rows, num_sent, rows, there, back: (
        _moved(axes, most, num_rows, rows, there),
        (there, back),
    ),
    lambda axes, most, num_rows, num_sent, kept, grads: (_moved(axes, most, num_sent, grads, kept[1]), None, None),
)
