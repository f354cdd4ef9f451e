"""Send tokens to their experts and back: sort them by expert, and exchange them over the expert
axis.

There is one ragged exchange in each direction. Devices hold the experts in order. A slice is sent
for each expert, directly to the place where its rows begin at the receiver. So the received rows
are sorted by expert too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardopt.collectives._shards import all_to_all
from shardopt.core import wide_dtype
from shardopt.mesh import device_kind_or_default
from shardopt.nn._regions import Axes


class SortedChoices(NamedTuple):
    """The choices of n tokens sorted by expert; choices without a place are last.

    Attributes:
      order: [n K], the choice (token * K + k) at each sorted place.
      inverse: [n K], the sorted place of each choice.
      sizes: [E], int32, how many choices each expert has.
    """

    order: Array
    inverse: Array
    sizes: Array


def sorted_by_expert(experts: Int[Array, "n K"], num_experts: int) -> SortedChoices:
    """Sort choices by expert; the tokens of an expert stay in order."""
    flat_experts = experts.reshape(-1)
    order = jnp.argsort(flat_experts, stable=True)
    sizes = jnp.sum(flat_experts[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return SortedChoices(order, jnp.argsort(order), sizes)


@jax.custom_vjp
def spread(x: Float[Array, "n D"], order: Array, inverse: Array) -> Float[Array, "nK D"]:
    """Return the token of each choice, in sorted order.

    Backwards, the gradients of a token's choices are gathered, not scattered.
    """
    # Choice token * K + k belongs to `token`.
    return x[order // (order.shape[0] // x.shape[0])]


spread.defvjp(
    lambda x, order, inverse: (spread(x, order, inverse), (x.shape[0], order, inverse)),
    lambda residuals, grads: (_sum_choices(residuals[0], grads, residuals[2]), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(
    rows: Float[Array, "nK D"], order: Array, inverse: Array, tokens: int
) -> Float[Array, "n D"]:
    """Return the sum over each token's choices, computed in float32 at least: the transpose of
    `spread`.
    """
    return _sum_choices(tokens, rows, inverse)


def _sum_choices(tokens: int, rows: Array, inverse: Array) -> Array:
    # choices first: a TPU adds whole arrays of tokens faster than the few neighbours of each token
    # [K, n, D]
    rows_of_choices = rows[inverse.reshape(tokens, -1).T]
    return jnp.sum(rows_of_choices, axis=0, dtype=wide_dtype(rows.dtype)).astype(rows.dtype)


combine.defvjp(
    lambda rows, order, inverse, tokens: (_sum_choices(tokens, rows, inverse), (order, inverse)),
    lambda tokens, residuals, grad: (spread(grad, *residuals), None, None),
)


class Slices(NamedTuple):
    """The arguments of `jax.lax.ragged_all_to_all`: S slices for each device in turn, all [X S],
    int32.

    Attributes:
      input_offsets: where each slice begins in this device's rows.
      send_sizes: the rows of each slice.
      output_offsets: where each slice begins at its receiver.
      recv_sizes: the rows of the received slices, S from each device in turn.
    """

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


class Exchange(NamedTuple):
    """How rows travel to the devices of the experts, and back.

    Attributes:
      to_experts: a slice of sorted rows for each expert.
      to_tokens: a slice of received rows for each device and local expert.
      sizes: [E / X], how many rows each local expert gets from all devices.
    """

    to_experts: Slices
    to_tokens: Slices
    sizes: Array


def plan_exchange(axes: Axes, sizes: Int[Array, " E"]) -> Exchange:
    """Return the slices of an exchange.

    To know the sizes of all devices takes an all-gather of 4 X E bytes.
    """
    devices = lax.axis_size(axes)
    device = lax.axis_index(axes)
    all_sizes = lax.all_gather(sizes, axes)  # [X, E]
    num_local = sizes.shape[0] // devices
    # [X, E], where each expert begins in the sorted rows of each device
    begin_at_sender = jnp.cumsum(all_sizes, axis=1) - all_sizes
    totals = jnp.sum(all_sizes, axis=0).reshape(devices, num_local)
    # At a receiver: first all rows of its first expert, from device 0, 1, ..., then of the next
    # expert. So received rows are sorted by expert, and no device sorts them.
    begin_at_receiver = (
        (jnp.cumsum(totals, axis=1) - totals).reshape(-1)[None]
        + jnp.cumsum(all_sizes, axis=0)
        - all_sizes
    )

    def select_local(x):
        return lax.dynamic_slice_in_dim(x, device * num_local, num_local, axis=1).reshape(-1)

    to_experts = Slices(
        begin_at_sender[device], sizes, begin_at_receiver[device], select_local(all_sizes)
    )
    # The way back: senders and receivers change places.
    to_tokens = Slices(
        select_local(begin_at_receiver),
        select_local(all_sizes),
        select_local(begin_at_sender),
        sizes,
    )
    return Exchange(to_experts, to_tokens, totals[device])


def send(
    axes: Axes, max_rows: int, num_rows: int, rows: Array, outgoing: Slices, returning: Slices
) -> Array:
    """Return the `num_rows` rows that this device receives, 0 where no row arrives.

    Backwards, their gradients return.

    Args:
      axes: the mesh axes over which rows travel.
      max_rows: the most rows that go from one device to another.
      num_rows: the rows of the result.
      rows: [*, D].
      outgoing: the slices of `rows`.
      returning: the slices of the result, by which gradients return.
    """
    return _send(axes, max_rows, num_rows, rows.shape[0], rows, outgoing, returning)


def _exchange_rows(axes: Axes, max_rows: int, num_rows: int, rows: Array, slices: Slices) -> Array:
    output = jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype)
    if device_kind_or_default() == "cpu":  # XLA:CPU has no ragged_all_to_all
        return _exchange_padded_rows(axes, max_rows, rows, output, slices)
    return lax.ragged_all_to_all(rows, output, *slices, axis_name=axes)


def _exchange_padded_rows(
    axes: Axes, max_rows: int, rows: Array, output: Array, slices: Slices
) -> Array:
    """Do the work of `jax.lax.ragged_all_to_all` by an all_to_all of `max_rows` rows for each
    device.
    """
    devices = lax.axis_size(axes)
    received_at = lax.all_to_all(slices.output_offsets, axes, 0, 0, tiled=True)
    sent_places = _slice_places(
        slices.input_offsets, slices.send_sizes, devices, max_rows, rows.shape[0]
    )
    received_places = _slice_places(
        received_at, slices.recv_sizes, devices, max_rows, output.shape[0]
    )
    sent_rows = jnp.take(rows, sent_places, axis=0, mode="fill", fill_value=0)
    return output.at[received_places].set(all_to_all(sent_rows, axes, 0, 0), mode="drop")


def _slice_places(offsets: Array, sizes: Array, devices: int, max_rows: int, missing: int) -> Array:
    """Return [X max_rows], the row at each place if slices are packed device by device.

    `missing` at places without a row.
    """
    offsets = offsets.reshape(devices, -1)
    sizes = sizes.reshape(devices, -1)
    ends = jnp.cumsum(sizes, axis=1)
    places = jnp.arange(max_rows)
    # which of the slices of a device
    slice_index = jnp.sum(places[None, :, None] >= ends[:, None], axis=2)
    shift = jnp.take_along_axis(
        offsets - (ends - sizes), jnp.minimum(slice_index, offsets.shape[1] - 1), axis=1
    )
    return jnp.where(slice_index < offsets.shape[1], shift + places[None], missing).reshape(-1)


_send = jax.custom_vjp(
    lambda axes, max_rows, num_rows, num_sent, rows, outgoing, returning: _exchange_rows(
        axes, max_rows, num_rows, rows, outgoing
    ),
    nondiff_argnums=(0, 1, 2, 3),
)
_send.defvjp(
    lambda axes, max_rows, num_rows, num_sent, rows, outgoing, returning: (
        _exchange_rows(axes, max_rows, num_rows, rows, outgoing),
        (outgoing, returning),
    ),
    lambda axes, max_rows, num_rows, num_sent, slices, grads: (
        _exchange_rows(axes, max_rows, num_sent, grads, slices[1]),
        None,
        None,
    ),
)
