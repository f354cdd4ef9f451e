"""The mean of a list of arrays, each in the dtype it is to travel in: what `exact` and `power_sgd` stand on."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shardopt.reducers import wire
from shardopt.reducers.axis import AxisName
from shardopt.reducers.axis import axis_size as size_of
from shardopt.reducers.buckets import in_buckets, plan_buckets
from shardopt.reducers.two_phase import cast_codec, two_phase_bytes, two_phase_mean


def mean_of(values: Sequence[Any], dtypes: Sequence[Any], axis_name: AxisName) -> tuple[list[Any], list[Any]]:
    """Average arrays over an axis, sent in given dtypes, summed in their own.

    An array that travels as it is takes an all-reduce. One that is rounded to travel takes two phases, so that sums
    are taken in the wide dtype and each number is rounded twice, rather than once a hop.

    Args:
      values: real arrays, fp32 or wider.
      dtypes: what each travels in.
      axis_name: the bound axis.

    Returns:
      (means, lefts): what rounding has lost, as `two_phase_mean` has it; zero where nothing was rounded.
    """
    count = size_of("mean_of", axis_name)

    def move(flat, key):
        wide, travels = key
        if _travels_whole(wide, travels):
            return wire.total(flat, axis_name, count) / count, jnp.zeros_like(flat)
        return two_phase_mean(flat, cast_codec(travels), axis_name)

    return in_buckets(values, _keys([value.dtype for value in values], dtypes), move)


def mean_bytes(sizes: Sequence[int], wide: Sequence[Any], dtypes: Sequence[Any], axis_size: int) -> int:
    """Return what a device sends in `mean_of`.

    Args:
      sizes: elements of each array.
      wide: the dtypes of the arrays.
      dtypes: what each travels in.
      axis_size: N. An all-reduce sends 2 (N - 1) / N of the padded buffer.
    """
    sent = 0
    for bucket in plan_buckets(sizes, _keys(wide, dtypes)):
        own, travels = bucket.key
        if _travels_whole(own, travels):
            sent += 2 * (axis_size - 1) * -(-bucket.size // axis_size) * own.itemsize
        else:
            sent += two_phase_bytes(bucket.size, cast_codec(travels), axis_size, own)
    return sent


def _keys(wide: Sequence[Any], dtypes: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(jnp.dtype(own), jnp.dtype(travels)) for own, travels in zip(wide, dtypes, strict=True)]


def _travels_whole(wide: Any, travels: Any) -> bool:
    return travels.itemsize >= wide.itemsize
