"""All-gather of sharded leaves and reduce-scatter of their gradients; each is the transpose of the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardopt.collectives._buckets import (
    SMALL_BUCKET_BYTES,
    MeshAxes,
    all_gather_buckets,
    reduce_scatter_buckets,
    shards_of,
)
from shardopt.collectives._per_device import shard_by_shard
from shardopt.collectives._rounded_gather import gather_rounded
from shardopt.core._checksum import checksum_of, to_limbs
from shardopt.core._rounded_weight import Form, joined
from shardopt.core._types import replaced
from shardopt.mesh import device_kind, device_kind_or_default


class LeafWire(NamedTuple):
    """How a leaf travels between devices.

    Attributes:
      dim: the dim that is sharded, or None: the leaf is replicated, and is not sent.
      tensor: how the leaf is sharded over the tensor axis; this does not change.
      axes: the mesh axis that shards the leaf, or several axes that act as one.
      gather_dtype: the dtype that the leaf is cast to before it is all-gathered, or None to keep its own.
      scatter_dtype: the dtype that its gradient is cast to before it is reduce-scattered, or None to keep its own.
      trained: whether the leaf has a gradient. A bucket would send the zeros of a frozen leaf.
      form: how the leaf is rounded to 8 bits before it is all-gathered, as a matrix; None does not round it.
    """

    dim: int | None
    tensor: PartitionSpec
    axes: MeshAxes
    gather_dtype: DTypeLike | None = None
    scatter_dtype: DTypeLike | None = None
    trained: bool = True
    form: Form | None = None

    def stacked(self, num_dims: int) -> "LeafWire":
        """Return the wire of such leaves stacked along new first dims."""
        dim = None if self.dim is None else self.dim + num_dims
        return self._replace(dim=dim, tensor=PartitionSpec(*[None] * num_dims, *self.tensor))

    @property
    def of_gradient(self) -> "LeafWire":
        """The wire of a gradient; the gradient of a rounded leaf is scattered by the rows of its matrix."""
        return self if self.form is None else self._replace(dim=0, tensor=PartitionSpec(), form=None)

    def scattered(self, x: jax.Array) -> jax.Array:
        """Return a local gradient, cast to the dtype that is sent."""
        return x if self.dim is None or self.scatter_dtype is None else x.astype(self.scatter_dtype)

    def sends_bits(self, x: jax.Array) -> bool:
        """Return whether a gradient that was cast is sent as bits, because XLA:CPU would send it as fp32."""
        is_cast = self.dim is not None and self.scatter_dtype is not None
        return is_cast and x.dtype.itemsize == 2 and device_kind() == "cpu"


def all_gather(
    leaves: Sequence[jax.Array],
    wires: Sequence[LeafWire],
    *,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
    cast_in_place: bool = False,
    probe: jax.Array | None = None,
) -> list[Any]:
    """All-gather local shards along mesh axes; the backward pass reduce-scatters their gradients.

    Args:
      leaves: local shards.
      wires: how each leaf travels. Gradients are cast back before they are summed, so sums have the precision of the
        stored leaf, unless `scatter_dtype` says otherwise.
      bucket_bytes: the gathered bytes of leaves that may share a collective, if that is faster. Leaves of one bucket
        are gathered at the same time, and so are their gradients.
      cast_in_place: whether a TPU casts float32 to bfloat16 exactly here, and not earlier in the program.
      probe: float32[8] without a meaning, whose gradient is the sum of the local gradients' bits, see `core._checksum`.

    Returns:
      The gathered leaves; a leaf with a form is a `RoundedWeight`. The gradient of a sharded leaf is summed over its axes;
      the gradient of a replicated leaf stays local.
    """
    stored_dtypes = [leaf.dtype for leaf in leaves]
    is_inexact = [jnp.issubdtype(dtype, jnp.inexact) for dtype in stored_dtypes]
    differentiable = [i for i, wire in enumerate(wires) if is_inexact[i] and wire.trained]
    forms = {i: wire.form for i, wire in enumerate(wires) if wire.form is not None}

    def cast(x: jax.Array, wire: LeafWire) -> jax.Array:
        if wire.gather_dtype is None or x.dtype == wire.gather_dtype:
            return x
        return _cast_in_place(x, wire.gather_dtype) if cast_in_place else x.astype(wire.gather_dtype)

    def forward(xs, probe):
        del probe
        move = functools.partial(all_gather_buckets, gather=_all_gather, bucket_bytes=bucket_bytes)
        leaves = [cast(x, wire) for x, wire in zip(xs, wires, strict=True)]
        plain_wires = [wire if wire.form is None else wire._replace(dim=None) for wire in wires]
        gathered = _apply_where_sharded(move, leaves, plain_wires)
        shards, axes = [leaves[i] for i in forms], [wires[i].axes for i in forms]
        return replaced(gathered, list(forms), gather_rounded(shards, list(forms.values()), axes, _all_gather))

    # A derived backward pass would reduce the gradients in the dtype of the gather, so it is written out.
    def backward(_, cotangents):
        # the parts of a rounded leaf's gradient are sent one by one, since joining them would copy them
        parts = {i: cotangents[i].zeros if i in forms else [cotangents[i]] for i in differentiable}
        owners = [i for i in differentiable for _ in parts[i]]
        local_grads = [part.astype(stored_dtypes[i]) for i in differentiable for part in parts[i]]
        part_sums = reduce_scatter(local_grads, [wires[i].of_gradient for i in owners], bucket_bytes=bucket_bytes)
        sums_of = {i: [x for x, owner in zip(part_sums, owners, strict=True) if owner == i] for i in differentiable}
        sums = [forms[i].weight(joined(sums_of[i])) if i in forms else sums_of[i][0] for i in differentiable]
        limbs = None if probe is None else to_limbs(checksum_of(local_grads))
        return replaced([None] * len(stored_dtypes), differentiable, sums), limbs  # None is a zero cotangent

    run = jax.custom_vjp(forward)
    run.defvjp(lambda xs, probe: (forward(xs, probe), None), backward)
    return run(list(leaves), probe)


def reduce_scatter(
    leaves: Sequence[jax.Array], wires: Sequence[LeafWire], *, bucket_bytes: int = SMALL_BUCKET_BYTES
) -> list[jax.Array]:
    """Sum local gradients over mesh axes, where each device keeps its shard; leaves with dim None stay local.

    Args:
      leaves: local gradients.
      wires: how each leaf travels. Sums are returned in the dtype of the leaf.
      bucket_bytes: see `all_gather`.
    """
    sent = [wire.scattered(x) for x, wire in zip(leaves, wires, strict=True)]
    as_bits = [wire.sends_bits(x) for x, wire in zip(sent, wires, strict=True)]
    for scatter, bits in ((psum_scatter, False), (_reduce_scatter_bits, True)):
        chosen = [
            wire if leaf_bits is bits else wire._replace(dim=None)
            for wire, leaf_bits in zip(wires, as_bits, strict=True)
        ]
        move = functools.partial(reduce_scatter_buckets, scatter=scatter, bucket_bytes=bucket_bytes)
        sent = _apply_where_sharded(move, sent, chosen)
    return [x.astype(leaf.dtype) for x, leaf in zip(sent, leaves, strict=True)]


def _apply_where_sharded(
    move: Callable[[list[jax.Array], list[int], MeshAxes], list[jax.Array]],
    leaves: Sequence[jax.Array],
    wires: Sequence[LeafWire],
) -> list[jax.Array]:
    """Apply a collective to the leaves that have a dim, once for all leaves with the same axes; return the others as is."""
    results = list(leaves)
    sharded = {i: wire.dim for i, wire in enumerate(wires) if wire.dim is not None}
    for axes in dict.fromkeys(wires[i].axes for i in sharded):
        dims = {i: dim for i, dim in sharded.items() if wires[i].axes == axes}

        def run(xs: list[jax.Array], dims: dict[int, int] = dims, axes: MeshAxes = axes) -> list[jax.Array]:
            return move(xs, list(dims.values()), axes)

        moved = shard_by_shard(run, [leaves[i] for i in dims], [wires[i].tensor for i in dims])
        results = replaced(results, dims, moved)
    return results


def psum_scatter(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    """Sum over mesh axes, where each device keeps its shard of a dim: `jax.lax.psum_scatter`, tiled.

    Between processes on CPU this is an all-to-all and a local sum. XLA's reduce-scatter through gloo gave wrong sums
    there, in one of fifty to a hundred calls (24 MB, two processes, jax 0.10.2). All-to-alls and all-reduces gave none.
    """
    if jax.process_count() > 1 and device_kind_or_default() == "cpu":
        return _sum_by_exchange(x, axis, dim, x.dtype)
    return _joined_to_tiles(lambda x, dim: jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), x, dim)


def _reduce_scatter_bits(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    """Sum half-precision floats in fp32, but send them as they are; XLA:CPU would send fp32."""
    return _sum_by_exchange(x, axis, dim, jnp.float32)


def _sum_by_exchange(x: jax.Array, axis: MeshAxes, dim: int, dtype: DTypeLike) -> jax.Array:
    """Send each device its shard from all devices, and sum the shards in `dtype`."""
    rows = all_to_all(shards_of(x, dim, jax.lax.axis_size(axis)), axis, 0, 0)
    return jnp.sum(rows, axis=0, dtype=dtype)


def all_to_all(x: jax.Array, axis: MeshAxes, split: int, concat: int) -> jax.Array:
    """Split the dim `split` over a mesh axis, and join the received parts on the dim `concat`; not differentiable."""

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split, concat, tiled=True)

    return _as_bits_on_cpu(move, x)


def _all_gather(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    def move(x: jax.Array, dim: int) -> jax.Array:
        return _as_bits_on_cpu(lambda x: jax.lax.all_gather(x, axis, axis=dim, tiled=True), x)

    return _joined_to_tiles(move, x, dim)


def _joined_to_tiles(move: Callable[[jax.Array, int], jax.Array], x: jax.Array, dim: int) -> jax.Array:
    """Apply a collective over a dim; on TPU two later dims are joined for it if they would be tiles of few rows.

    XLA:TPU sends arrays in tiles of the last two dims. A weight [D, 2, F] that was gathered in tiles of 2 x 128 is copied
    before its product, 2.1 ms a block of Llama 3 8B (v5p:8x8x8).
    """
    rows = x.ndim - 2
    if dim >= rows or x.shape[rows] >= _TILE_ROWS or not (device_kind() or "").startswith("TPU"):
        return move(x, dim)
    moved = move(x.reshape(*x.shape[:rows], -1), dim)
    return moved.reshape(*moved.shape[:rows], *x.shape[rows:])


_TILE_ROWS = 8
"""Rows of a tile on TPU."""


def _cast_in_place(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast; on a TPU, keep XLA from moving a cast from float32 to bfloat16 out of the loop over blocks.

    XLA would cast the stack of all blocks instead (`xla_jf_bf16_propagation`), and hold this copy of half the size for
    the whole step. No XLA pass moves a rounding (`reduce_precision`), so rounding here fixes the place of the cast.
    """
    half = x.dtype == jnp.float32 and dtype == jnp.bfloat16
    if half and (device_kind() or "").startswith("TPU"):
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x if x.dtype == dtype else x.astype(dtype)


def _as_bits_on_cpu(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a collective; on CPU send short floats as integer bits, because XLA:CPU would send them as fp32.

    Other devices send them unchanged: on a TPU the cast to bits and back copies the gathered array.
    """
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize)
    if bits is None or not jnp.issubdtype(x.dtype, jnp.floating) or device_kind() != "cpu":
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, bits)), x.dtype)
