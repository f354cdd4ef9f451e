"""`exact`: the plain mean, in a dtype of choice."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core.errors import complaint
from shardopt.core.types import wide_dtype
from shardopt.reducers.code import cast_code
from shardopt.reducers.leaves import real_dtype, real_shape
from shardopt.reducers.mean import mean_bytes, mean_of
from shardopt.reducers.reducer import Reducer, make_reducer


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
        raise TypeError(complaint("exact", f"dtype must be a dtype, got {dtype!r}.", fix=fix)) from error
    if not jnp.issubdtype(chosen, jnp.floating) or chosen.itemsize < 2:
        what = f"dtype must be a floating dtype of 16 bits or more, got {chosen.name}."
        raise ValueError(complaint("exact", what, fix="use bfloat16, or so.reducers.int8() for fewer bits."))
    return chosen
