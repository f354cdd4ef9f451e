"""All-gather of sharded leaves and reduce-scatter of their gradients; each is the transpose of the other."""

import functools
from collections.abc import Callable, Sequence

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
from shardopt.mesh import device_kind, device_kind_or_default


def all_gather(
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    specs: Sequence[PartitionSpec],
    *,
    axes: Sequence[MeshAxes],
    dtypes: Sequence[DTypeLike | None] | None = None,
    scatter_dtypes: Sequence[DTypeLike | None] | None = None,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
    cast_in_place: bool = False,
) -> list[jax.Array]:
    """All-gather local shards along mesh axes; the backward pass reduce-scatters their gradients.

    Args:
      leaves: local shards.
      dims: the sharded dim of each leaf, or None if the leaf is replicated.
      specs: how each leaf is sharded over the tensor axis; this does not change.
      axes: the mesh axis that shards each leaf, or several axes that act as one.
      dtypes: the dtype that each leaf is cast to before it is sent, or None to keep its own. Gradients are cast back
        before they are summed, so sums have the precision of the stored leaf, unless `scatter_dtypes` says otherwise.
      scatter_dtypes: the dtypes of the gradients on the wire: `dtypes` of `reduce_scatter`.
      bucket_bytes: the gathered bytes of leaves that may share a collective, if that is faster. Leaves of one bucket
        are gathered at the same time, and so are their gradients.
      cast_in_place: whether a TPU casts float32 to bfloat16 exactly here, and not earlier in the program.

    Returns:
      The gathered leaves. The gradient of a sharded leaf is summed over its axes; the gradient of a replicated leaf
      stays local.
    """
    stored_dtypes = [leaf.dtype for leaf in leaves]
    wire_dtypes = [
        stored_dtype if dtype is None else dtype
        for stored_dtype, dtype in zip(stored_dtypes, dtypes or [None] * len(leaves), strict=True)
    ]
    differentiable = [i for i, dtype in enumerate(stored_dtypes) if jnp.issubdtype(dtype, jnp.inexact)]

    def forward(xs):
        cast_leaf = _cast_in_place if cast_in_place else lambda x, dtype: x if x.dtype == dtype else x.astype(dtype)
        cast = [cast_leaf(x, dtype) for x, dtype in zip(xs, wire_dtypes, strict=True)]
        move = functools.partial(all_gather_buckets, gather=_all_gather, bucket_bytes=bucket_bytes)
        return _apply_where_sharded(move, cast, dims, axes, specs)

    # A derived backward pass would reduce the gradients in the dtype of the gather, so it is written out.
    def backward(_, cotangents):
        local_grads = [cotangents[i].astype(stored_dtypes[i]) for i in differentiable]
        dims_and_specs = [dims[i] for i in differentiable], [specs[i] for i in differentiable]
        reduce_axes = [axes[i] for i in differentiable]
        grad_dtypes = None if scatter_dtypes is None else [scatter_dtypes[i] for i in differentiable]
        sums = reduce_scatter(
            local_grads, *dims_and_specs, axes=reduce_axes, dtypes=grad_dtypes, bucket_bytes=bucket_bytes
        )
        grads: list[jax.Array | None] = [None] * len(stored_dtypes)  # None is the zero cotangent of an integer leaf
        for i, grad in zip(differentiable, sums, strict=True):
            grads[i] = grad
        return (grads,)

    run = jax.custom_vjp(forward)
    run.defvjp(lambda xs: (forward(xs), None), backward)
    return run(list(leaves))


def reduce_scatter(
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    specs: Sequence[PartitionSpec],
    *,
    axes: Sequence[MeshAxes],
    dtypes: Sequence[DTypeLike | None] | None = None,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
) -> list[jax.Array]:
    """Sum local gradients over mesh axes, where each device keeps its shard; leaves with dim None stay local.

    Args:
      leaves: local gradients.
      dims: the dim that each leaf is split on, or None.
      specs: how each leaf is sharded over the tensor axis; this does not change.
      axes: the mesh axis to sum each leaf over, or several axes that act as one.
      dtypes: the dtype that each leaf is cast to before it is sent, or None to keep its own. Sums are returned in the
        dtype of the leaf.
      bucket_bytes: see `all_gather`.
    """
    dtypes = dtypes or [None] * len(leaves)
    cast_flags = [dim is not None and dtype is not None for dim, dtype in zip(dims, dtypes, strict=True)]
    sent = [x.astype(dtype) if is_cast else x for x, dtype, is_cast in zip(leaves, dtypes, cast_flags, strict=True)]

    as_bits = [
        is_cast and x.dtype.itemsize == 2 and device_kind() == "cpu"
        for x, is_cast in zip(sent, cast_flags, strict=True)
    ]
    for scatter, wants_bits in ((psum_scatter, False), (_reduce_scatter_bits, True)):
        chosen_dims = [dim if bits is wants_bits else None for dim, bits in zip(dims, as_bits, strict=True)]
        move = functools.partial(reduce_scatter_buckets, scatter=scatter, bucket_bytes=bucket_bytes)
        sent = _apply_where_sharded(move, sent, chosen_dims, axes, specs)
    return [x.astype(leaf.dtype) for x, leaf in zip(sent, leaves, strict=True)]


def _apply_where_sharded(
    move: Callable[[list[jax.Array], list[int], MeshAxes], list[jax.Array]],
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    axes: Sequence[MeshAxes],
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Apply a collective to the leaves that have a dim, once for all leaves with the same axes; return the others as is."""
    results, dim_of_leaf = list(leaves), {i: dim for i, dim in enumerate(dims) if dim is not None}
    for leaf_axes in dict.fromkeys(axes[i] for i in dim_of_leaf):
        same_axes_dims = {i: dim for i, dim in dim_of_leaf.items() if axes[i] == leaf_axes}

        def run(
            xs: list[jax.Array], same_axes_dims: dict[int, int] = same_axes_dims, leaf_axes: MeshAxes = leaf_axes
        ) -> list[jax.Array]:
            return move(xs, list(same_axes_dims.values()), leaf_axes)

        moved = shard_by_shard(run, [leaves[i] for i in same_axes_dims], [specs[i] for i in same_axes_dims])
        for i, x in zip(same_axes_dims, moved, strict=True):
            results[i] = x
    return results


def psum_scatter(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    """Sum over mesh axes, where each device keeps its shard of a dim: `jax.lax.psum_scatter`, tiled.

    Between processes on CPU this is an all-to-all and a local sum. XLA's reduce-scatter through gloo gave wrong sums
    there, in one of fifty to a hundred calls (24 MB, two processes, jax 0.10.2). All-to-alls and all-reduces gave none.
    """
    if jax.process_count() > 1 and device_kind_or_default() == "cpu":
        return _sum_by_exchange(x, axis, dim, x.dtype)
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


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
    return _as_bits_on_cpu(lambda x: jax.lax.all_gather(x, axis, axis=dim, tiled=True), x)


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
    """Apply a collective; on CPU send half-precision floats as integer bits, because XLA:CPU would send them as fp32.

    Other devices send them unchanged: on a TPU the cast to bits and back copies the gathered array.
    """
    half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    if not half or device_kind() != "cpu":
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)
