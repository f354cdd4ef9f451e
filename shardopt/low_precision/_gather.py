"""All-gather of weights that are rounded to 8 bits before they are sent."""

import functools
from collections.abc import Sequence

import jax

from shardopt.collectives._buckets import MeshAxes
from shardopt.collectives._tiles import Gather, gather_matrices
from shardopt.core._types import replaced
from shardopt.low_precision._numbers import maximum_over
from shardopt.low_precision._weight import Form, RoundedWeight


def gather_rounded(
    weights: Sequence[jax.Array],
    forms: Sequence[Form],
    axes: Sequence[MeshAxes],
    gather: Gather,
) -> list[RoundedWeight]:
    """Return weights rounded and gathered; a device rounds its shard.

    Args:
      weights: the shards.
      forms: how each weight is a matrix whose rows are sharded.
      axes: the mesh axes that shard each weight.
      gather: `gather(x, axes, dim)` all-gathers a dim.

    Communication: the numbers, a byte each. A scale of 4 bytes for each channel is gathered if rows
    are channels, all of them together, and else it is a maximum over the axes.
    """
    dtypes = [
        form.rounding.dtype or weight.dtype for weight, form in zip(weights, forms, strict=True)
    ]
    rounded = [
        form.round_rows(
            form.matrix(weight.astype(dtype)), functools.partial(maximum_over, axes=weight_axes)
        )
        for weight, form, dtype, weight_axes in zip(weights, forms, dtypes, axes, strict=True)
    ]
    matrices = gather_matrices([numbers for numbers, _ in rounded], axes, gather)
    scales = [scale for _, scale in rounded]
    sharded = [i for i, form in enumerate(forms) if form.by_channel]
    rows = gather_matrices(
        [scales[i].reshape(1, -1) for i in sharded], [axes[i] for i in sharded], gather
    )
    scales = replaced(
        scales,
        sharded,
        [row.reshape(-1, *scales[i].shape[1:]) for row, i in zip(rows, sharded, strict=True)],
    )
    return [
        RoundedWeight.of(numbers, scale, dtype, form, is_cast=dtype == weight.dtype)
        for weight, numbers, scale, dtype, form in zip(
            weights, matrices, scales, dtypes, forms, strict=True
        )
    ]
