"""`exact`: the plain mean, in a dtype of choice."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.errors import format_error
from shardopt.core.types import wide_dtype
from shardopt.reducers.axis import AxisName
from shardopt.reducers.axis import axis_size as size_of
from shardopt.reducers.buckets import all_reduce_packed, in_buckets, plan_buckets
from shardopt.reducers.codec import cast_code, cast_codec, two_phase_bytes, two_phase_mean
from shardopt.reducers.reducer import Reducer, make_reducer, real_dtype, real_shape

# The mean of a list of arrays, each in the dtype it is to travel in: what `exact` and `power_sgd` stand on.


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
            return all_reduce_packed(flat, axis_name, count) / count, jnp.zeros_like(flat)
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


def exact(dtype: Any = None) -> Reducer:
    """Average gradients as they are, or rounded to a dtype while they travel.

    mean = round(sum_d round(g_d) / N), with round to the dtype that travels; sums are taken in fp32 at least.

    **Equivalence**: the mean up to summation order where nothing is rounded; else each number is rounded at most
    twice, however many devices there are.

    **Placement**: no state.

    **Communication** a call, per device, for Psi elements of b bytes: 2(N-1)/N Psi b, as one all-reduce a bucket, or
    an all-to-all and an all-gather of N equal chunks where the dtype that travels is narrower than fp32 (XLA:CPU
    would widen it in an all-reduce).

    Args:
      dtype: what travels, such as `jnp.bfloat16`; by default what each leaf is. A leaf is never widened to travel.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `dtype` is not a dtype.
      ValueError: if `dtype` is not a real floating one of 16 bits or more.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.exact(jnp.bfloat16)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)
      6144
      >>> mean = jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data")(jnp.array([1.0, 2.0]))
      >>> print(mean)
      [1.5 1.5]
    """
    chosen = None if dtype is None else _checked(dtype)
    name = "exact()" if chosen is None else f"exact({chosen.name})"

    def travels(leaf_dtype):
        own = real_dtype(leaf_dtype)
        return own if chosen is None or chosen.itemsize >= own.itemsize else chosen

    def send(values, dtypes, state, axis_name):
        means, lefts = mean_of(values, [travels(one) for one in dtypes], axis_name)
        return means, lefts, state

    def count(params, axis_size):
        leaves = jax.tree.leaves(params)
        sizes = [math.prod(real_shape(leaf)) for leaf in leaves]
        wide = [real_dtype(wide_dtype(leaf.dtype)) for leaf in leaves]
        return mean_bytes(sizes, wide, [travels(leaf.dtype) for leaf in leaves], axis_size)

    return make_reducer(name, send=send, count=count, code=cast_code(travels))


def _checked(dtype: Any) -> Any:
    try:
        chosen = jnp.dtype(dtype)
    except TypeError as error:
        fix = "pass one such as jax.numpy.bfloat16."
        raise TypeError(format_error("exact", f"dtype must be a dtype, got {dtype!r}.", fix=fix)) from error
    if not jnp.issubdtype(chosen, jnp.floating) or chosen.itemsize < 2:
        what = f"dtype must be a floating dtype of 16 bits or more, got {chosen.name}."
        raise ValueError(format_error("exact", what, fix="use bfloat16, or so.reducers.int8() for fewer bits."))
    return chosen
