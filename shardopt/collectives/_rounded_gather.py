"""All-gather of weights that are rounded to 8 bits before they are sent."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives._buckets import MeshAxes
from shardopt.core._rounded_weight import Form, RoundedWeight, joined

JOINED_BYTES = 2**25
"""Smaller matrices with as many rows share a collective. XLA:TPU sends a gather of 16 MB as an all-reduce of zeros and a
shard, which costs a pass over the gathered matrix, and four times as much as the copies that part a joined one (v6e:8x8)."""


def gather_rounded(
    weights: Sequence[jax.Array],
    forms: Sequence[Form],
    axes: Sequence[MeshAxes],
    gather: Callable[[jax.Array, MeshAxes, int], jax.Array],
) -> list[RoundedWeight]:
    """Return weights rounded and gathered; a device rounds its shard.

    Args:
      weights: the shards.
      forms: how each weight is a matrix whose rows are sharded.
      axes: the mesh axes that shard each weight.
      gather: `gather(x, axes, dim)` all-gathers a dim.

    Communication: the numbers, a byte each. A scale of 4 bytes for each channel is gathered if rows are channels, and else it
    is a maximum over the axes.
    """
    dtypes = [form.rounding.dtype or weight.dtype for weight, form in zip(weights, forms, strict=True)]
    rounded = [
        form.round_rows(form.matrix(weight.astype(dtype)), functools.partial(maximum_over, axes=weight_axes))
        for weight, form, dtype, weight_axes in zip(weights, forms, dtypes, axes, strict=True)
    ]
    matrices = _gather_joined([numbers for numbers, _ in rounded], axes, gather)
    scales = [
        gather(scale, weight_axes, 0) if form.by_channel else scale
        for (_, scale), form, weight_axes in zip(rounded, forms, axes, strict=True)
    ]
    return [RoundedWeight.of(*parts) for parts in zip(matrices, scales, dtypes, forms, strict=True)]


def maximum_over(largest: jax.Array, axes: MeshAxes) -> jax.Array:
    """Return the maximum over devices for a scale; NaN becomes infinity.

    XLA:CPU drops NaN in a maximum over devices. A scale of infinity makes all numbers NaN as well.
    """
    return jax.lax.pmax(jnp.where(jnp.isnan(largest), jnp.inf, largest), axes)


def _gather_joined(
    shards: Sequence[jax.Array], axes: Sequence[MeshAxes], gather: Callable[[jax.Array, MeshAxes, int], jax.Array]
) -> list[jax.Array]:
    """Return matrices from shards of their rows; small ones of as many rows are joined while they are sent."""
    bundles: dict[object, list[int]] = {}
    for i, shard in enumerate(shards):
        is_small = shard.nbytes * jax.lax.axis_size(axes[i]) < JOINED_BYTES
        key = (len(shard), shard.dtype, axes[i]) if is_small else i
        bundles.setdefault(key, []).append(i)
    matrices = dict[int, jax.Array]()
    for bundle in bundles.values():
        matrix = gather(joined([shards[i] for i in bundle]), axes[bundle[0]], 0)
        ends = itertools.accumulate(shards[i].shape[1] for i in bundle)
        matrices |= zip(bundle, jnp.split(matrix, list(ends)[:-1], axis=1), strict=True)
    return [matrices[i] for i in range(len(shards))]
