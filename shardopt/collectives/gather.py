"""Making split leaves whole, and reducing whole gradients into splits: each the other's transpose."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.collectives.per_device import with_tensor_shards


def gather(
    leaves: Sequence[Any],
    dims: Sequence[int | None],
    specs: Sequence[PartitionSpec],
    *,
    axis: str,
    dtype: Any = None,
) -> list[Any]:
    """Make local shards whole along a mesh axis; the backward pass reduce-scatters their gradients.

    Args:
      leaves: local shards.
      dims: the dim each leaf is split on over `axis`, or None where it is already whole.
      specs: how each leaf is split over the tensor axis, which it stays.
      axis: the mesh axis to gather over.
      dtype: what floating leaves are cast to before they travel. Their gradients are cast back before they are
        summed, so the reduction keeps the precision of the stored leaf.

    Returns:
      The whole leaves. The gradient of a split leaf is the sum over `axis`; that of a whole one stays local.
    """
    dtypes = [leaf.dtype for leaf in leaves]
    floating = [i for i, one in enumerate(dtypes) if jnp.issubdtype(one, jnp.floating)]

    def forward(xs):
        cast = [x.astype(dtype) if dtype is not None and i in floating else x for i, x in enumerate(xs)]
        return with_tensor_shards(move, cast, specs)

    def move(xs, positions):
        return [
            x if dims[i] is None else jax.lax.all_gather(x, axis, axis=dims[i], tiled=True)
            for x, i in zip(xs, positions, strict=True)
        ]

    # Written out rather than derived: deriving it would reduce the gradients in `dtype`.
    def backward(_, cotangents):
        wide = [cotangents[i].astype(dtypes[i]) for i in floating]
        sums = scatter_sum(wide, [dims[i] for i in floating], [specs[i] for i in floating], axis=axis)
        grads: list[Any] = [None] * len(dtypes)  # None is the zero cotangent of an integer leaf
        for i, total in zip(floating, sums, strict=True):
            grads[i] = total
        return (grads,)

    run = jax.custom_vjp(forward)
    run.defvjp(lambda xs: (forward(xs), None), backward)
    return run(list(leaves))


def scatter_sum(
    leaves: Sequence[Any], dims: Sequence[int | None], specs: Sequence[PartitionSpec], *, axis: str
) -> list[Any]:
    """Sum local gradients over a mesh axis, each device keeping its shard; leaves with dim None stay local."""

    def scatter(xs, positions):
        return [
            x if dims[i] is None else jax.lax.psum_scatter(x, axis, scatter_dimension=dims[i], tiled=True)
            for x, i in zip(xs, positions, strict=True)
        ]

    return with_tensor_shards(scatter, leaves, specs)
