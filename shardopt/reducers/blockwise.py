"""Reducers that write a gradient as blocks, each with a scale of its own: `int8` and `sign`."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from shardopt.core.types import wide_dtype
from shardopt.reducers.buckets import in_buckets, plan_buckets
from shardopt.reducers.code import block_code
from shardopt.reducers.leaves import real_dtype, real_shape
from shardopt.reducers.reducer import Reducer, make_reducer
from shardopt.reducers.two_phase import Codec, two_phase_bytes, two_phase_mean


def blockwise(name: str, codec: Codec) -> Reducer:
    """Return the reducer that sends flat buckets through a codec in two phases."""

    def send(values: Sequence[Any], dtypes, state, axis_name):
        def move(flat, key):
            return two_phase_mean(flat, codec, axis_name)

        means, lefts = in_buckets(values, [value.dtype for value in values], move)
        return means, lefts, state

    def count(params, axis_size):
        leaves = jax.tree.leaves(params)
        sizes = [math.prod(real_shape(leaf)) for leaf in leaves]
        buckets = plan_buckets(sizes, [real_dtype(wide_dtype(leaf.dtype)) for leaf in leaves])
        return sum(two_phase_bytes(bucket.size, codec, axis_size, bucket.key) for bucket in buckets)

    return make_reducer(name, send=send, count=count, code=block_code(codec))
