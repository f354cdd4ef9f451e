"""All-gather of sharded leaves, and reduce-scatter of their gradients: each the transpose of the other."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardopt.collectives.buckets import (
    SMALL_BUCKET_BYTES,
    MeshAxes,
    all_gather_buckets,
    reduce_scatter_buckets,
    shards_of,
)
from shardopt.collectives.per_device import shard_by_shard
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
    """Gather local shards along mesh axes; the backward pass reduce-scatters their gradients.

    Args:
      leaves: local shards.
      dims: the dim each leaf is sharded on, or None where it is replicated.
      specs: how each leaf is sharded over the tensor axis, which it stays.
      axes: the mesh axis that each is sharded over, or several taken together.
      dtypes: what each leaf is cast to before it travels, None for what it is. Gradients are cast back before they
        are summed, so the reduction keeps the precision of the stored leaf, unless `scatter_dtypes` says otherwise.
      scatter_dtypes: see `dtypes` of `reduce_scatter`, of the gradients.
      bucket_bytes: gathered bytes of leaves that may share a collective, where that pays; they are then gathered at the
        same time, and so are their gradients.
      cast_in_place: whether float32 is cast to bfloat16 right here on a TPU, and nowhere before.

    Returns:
      The gathered leaves. The gradient of a sharded leaf is the sum over its axes; that of a replicated one stays local.
    """
    stored = [leaf.dtype for leaf in leaves]
    travels = [
        one if dtype is None else dtype for one, dtype in zip(stored, dtypes or [None] * len(leaves), strict=True)
    ]
    differentiable = [i for i, one in enumerate(stored) if jnp.issubdtype(one, jnp.inexact)]

    def forward(xs):
        narrow = _cast_in_place if cast_in_place else lambda x, dtype: x if x.dtype == dtype else x.astype(dtype)
        cast = [narrow(x, dtype) for x, dtype in zip(xs, travels, strict=True)]
        move = functools.partial(all_gather_buckets, gather=_all_gather, bucket_bytes=bucket_bytes)
        return _where_sharded(move, cast, dims, axes, specs)

    # Written out rather than derived: deriving it would reduce the gradients in the dtype that travels.
    def backward(_, cotangents):
        wide = [cotangents[i].astype(stored[i]) for i in differentiable]
        where = [dims[i] for i in differentiable], [specs[i] for i in differentiable]
        over = [axes[i] for i in differentiable]
        narrow = None if scatter_dtypes is None else [scatter_dtypes[i] for i in differentiable]
        sums = reduce_scatter(wide, *where, axes=over, dtypes=narrow, bucket_bytes=bucket_bytes)
        grads: list[jax.Array | None] = [None] * len(stored)  # None is the zero cotangent of an integer leaf
        for i, total in zip(differentiable, sums, strict=True):
            grads[i] = total
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
    """Sum local gradients over mesh axes, each device keeping its shard; leaves with dim None stay local.

    Args:
      leaves: local gradients.
      dims: the dim each is cut on, or None.
      specs: how each is sharded over the tensor axis, which it stays.
      axes: the mesh axis to sum each over, or several taken together.
      dtypes: what each leaf is cast to before it is sent, None for what it is; sums come back in the dtype of the leaf.
      bucket_bytes: as in `all_gather`.
    """
    dtypes = dtypes or [None] * len(leaves)
    cast = [dim is not None and dtype is not None for dim, dtype in zip(dims, dtypes, strict=True)]
    sent = [x.astype(dtype) if one else x for x, dtype, one in zip(leaves, dtypes, cast, strict=True)]

    as_bits = [one and x.dtype.itemsize == 2 and device_kind() == "cpu" for x, one in zip(sent, cast, strict=True)]
    for scatter, chosen in ((psum_scatter, False), (_reduce_scatter_bits, True)):
        some = [dim if bits is chosen else None for dim, bits in zip(dims, as_bits, strict=True)]
        move = functools.partial(reduce_scatter_buckets, scatter=scatter, bucket_bytes=bucket_bytes)
        sent = _where_sharded(move, sent, some, axes, specs)
    return [x.astype(leaf.dtype) for x, leaf in zip(sent, leaves, strict=True)]


def _where_sharded(
    move: Callable[[list[jax.Array], list[int], MeshAxes], list[jax.Array]],
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    axes: Sequence[MeshAxes],
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Apply collectives to the leaves that have a dim, those of the same axes together; leave the others as they are."""
    results, split = list(leaves), {i: dim for i, dim in enumerate(dims) if dim is not None}
    for over in dict.fromkeys(axes[i] for i in split):
        some = {i: dim for i, dim in split.items() if axes[i] == over}

        def run(xs: list[jax.Array], some: dict[int, int] = some, over: MeshAxes = over) -> list[jax.Array]:
            return move(xs, list(some.values()), over)

        moved = shard_by_shard(run, [leaves[i] for i in some], [specs[i] for i in some])
        for i, x in zip(some, moved, strict=True):
            results[i] = x
    return results


def psum_scatter(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    """Sum over mesh axes, each device keeping its shard of a dim: `jax.lax.psum_scatter`, tiled.

    Between processes on CPU it is an all-to-all, and a sum of what comes: of the reduce-scatters that XLA hands to gloo one in
    fifty to a hundred gave wrong sums, of 24 MB over two processes with jax 0.10.2, while all-to-alls and all-reduces gave none.
    """
    if jax.process_count() > 1 and device_kind_or_default() == "cpu":
        return _sum_by_exchange(x, axis, dim, x.dtype)
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def _reduce_scatter_bits(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    """Sum half-precision floats in fp32, sent as the bits they are: XLA:CPU would widen them to fp32 on the wire."""
    return _sum_by_exchange(x, axis, dim, jnp.float32)


def _sum_by_exchange(x: jax.Array, axis: MeshAxes, dim: int, dtype: DTypeLike) -> jax.Array:
    """Sum in a dtype, after each device was sent its shard of all."""
    rows = all_to_all(shards_of(x, dim, jax.lax.axis_size(axis)), axis, 0, 0)
    return jnp.sum(rows, axis=0, dtype=dtype)


def all_to_all(x: jax.Array, axis: MeshAxes, split: int, concat: int) -> jax.Array:
    """Cut a dim over a mesh axis, and join what all devices have of this part along another dim; not differentiable."""

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split, concat, tiled=True)

    return _as_bits_on_cpu(move, x)


def _all_gather(x: jax.Array, axis: MeshAxes, dim: int) -> jax.Array:
    return _as_bits_on_cpu(lambda x: jax.lax.all_gather(x, axis, axis=dim, tiled=True), x)


def _cast_in_place(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast; on a TPU float32 to bfloat16 so that XLA does not do it before the loop that the shard is a slice in.

    It would move the cast up to the stack of all blocks (`xla_jf_bf16_propagation`), which is then held once more for the
    whole step, half as large. No pass moves a rounding.
    """
    half = x.dtype == jnp.float32 and dtype == jnp.bfloat16
    if half and (device_kind() or "").startswith("TPU"):
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x if x.dtype == dtype else x.astype(dtype)


def _as_bits_on_cpu(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Move an array; on CPU half-precision floats as the bits they are, which XLA:CPU would widen to fp32 on the wire.

    Elsewhere they travel as they are: on a TPU the cast to bits and back is a copy of the gathered array.
    """
    half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    if not half or device_kind() != "cpu":
        return move(x)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)
