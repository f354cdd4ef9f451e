"""The mean over an axis: `exact`, and the two phases in which rounded or encoded numbers are averaged.

With x_d the values of device d, cut into N chunks x_d[c], and C a codec, the owner c of chunk c gets C(x_d[c]) from
every other device d, has its own x_c[c] exactly, and sends C(m_c) of the mean m_c to all. Two errors arise, each known
to one device: x_d[c] - C(x_d[c]) to its sender, and N (m_c - C(m_c)), counted in units of the sum, to the owner. They
belong to different chunks of a device, since no device sends its own chunk in the first phase; so one memory as large
as the gradient holds both, and N mean + sum of memories is the sum of the values, exactly.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shardopt.collectives.buckets import Bucket, plan_buckets
from shardopt.core.errors import format_error
from shardopt.core.types import wide_dtype
from shardopt.reducers.axis import AxisName, all_gather_packed, all_reduce_padded, all_to_all_packed
from shardopt.reducers.axis import axis_size as size_of
from shardopt.reducers.reducer import MessageCodec, Reducer, make_reducer, real_dtype, real_shape

BUCKET_ELEMENTS = 2**23
"""Where a bucket is closed: 32 MiB in fp32. A leaf above it has one of its own, without being copied."""


def exact(dtype: DTypeLike | None = None) -> Reducer:
    """Average gradients as they are, or rounded to a dtype on the wire.

    mean = round(sum_d round(g_d) / N), with round to the dtype on the wire; sums are taken in fp32 at least.

    **Equivalence**: the mean up to summation order where nothing is rounded; else each number is rounded at most
    twice, however many devices there are.

    **Placement**: no state.

    **Communication** a call, per device, for Psi elements of b bytes: 2(N-1)/N Psi b, as one all-reduce a bucket, or
    an all-to-all and an all-gather of N equal chunks where that dtype is narrower than fp32 (XLA:CPU
    would widen it in an all-reduce).

    Args:
      dtype: on the wire, such as `jnp.bfloat16`; by default that of each leaf. A leaf is never widened.

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
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data"))(jnp.array([1.0, 2.0]))
      >>> print(mean)
      [1.5 1.5]
    """
    chosen = None if dtype is None else _checked(dtype)
    name = "exact()" if chosen is None else f"exact({chosen.name})"

    def wire_dtype(leaf_dtype):
        own = real_dtype(leaf_dtype)
        return own if chosen is None or chosen.itemsize >= own.itemsize else chosen

    def send(values, dtypes, state, axis_name):
        means, lefts = mean_of(values, [wire_dtype(one) for one in dtypes], axis_name)
        return means, lefts, state

    def count(params, axis_size):
        leaves = jax.tree.leaves(params)
        sizes = [math.prod(real_shape(leaf)) for leaf in leaves]
        wide = [real_dtype(wide_dtype(leaf.dtype)) for leaf in leaves]
        return mean_bytes(sizes, wide, [wire_dtype(leaf.dtype) for leaf in leaves], axis_size)

    def write(values, dtypes, state):
        return [value.astype(wire_dtype(dtype)) for value, dtype in zip(values, dtypes, strict=True)], state

    def read(message, shapes, dtypes):
        return [part.astype(like.dtype) for part, like in zip(message, shapes, strict=True)]

    return make_reducer(name, send=send, count=count, codec=MessageCodec(write, read))


def _checked(dtype: DTypeLike) -> np.dtype:
    try:
        chosen = jnp.dtype(dtype)
    except TypeError as error:
        fix = "pass one such as jax.numpy.bfloat16."
        raise TypeError(format_error("exact", f"dtype must be a dtype, got {dtype!r}.", fix=fix)) from error
    if not jnp.issubdtype(chosen, jnp.floating) or chosen.itemsize < 2:
        what = f"dtype must be a floating dtype of 16 bits or more, got {chosen.name}."
        raise ValueError(format_error("exact", what, fix="use bfloat16, or so.reducers.int8() for fewer bits."))
    return chosen


def mean_of(
    values: Sequence[jax.Array], dtypes: Sequence[np.dtype], axis_name: AxisName
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Average real arrays, fp32 or wider, over an axis, sent in given dtypes, summed in their own; return (means, lefts).

    An array that is sent as it is takes an all-reduce. One that is rounded takes two phases, so that sums are taken in
    the wide dtype and each number is rounded twice, rather than once a hop. What that has lost is left, zero elsewhere.
    """
    count = size_of("mean_of", axis_name)

    def move(flat, key):
        wide, wire = key
        if wire.itemsize >= wide.itemsize:
            return all_reduce_padded(flat, axis_name, count) / count, jnp.zeros_like(flat)
        return two_phase_mean(flat, _cast(wire), axis_name)

    return in_buckets(values, list(zip([value.dtype for value in values], dtypes, strict=True)), move)


def mean_bytes(sizes: Sequence[int], wide: Sequence[np.dtype], dtypes: Sequence[np.dtype], axis_size: int) -> int:
    """Return what a device sends in `mean_of`, of arrays of these sizes, their own (`wide`) dtypes and those on the wire.

    An all-reduce sends 2 (N - 1) / N of the padded buffer.
    """
    sent = 0
    for bucket in buckets_of(sizes, list(zip(wide, dtypes, strict=True))):
        own, wire = bucket.key
        if wire.itemsize >= own.itemsize:
            sent += 2 * (axis_size - 1) * -(-bucket.size // axis_size) * own.itemsize
        else:
            sent += two_phase_bytes(bucket.size, _cast(wire), axis_size, own)
    return sent


def in_buckets(
    values: Sequence[jax.Array],
    keys: Sequence[Hashable],
    move: Callable[[jax.Array, Hashable], tuple[jax.Array, jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Apply `move(flat, key) -> (mean, left)`, both flat, to each bucket; return the means and lefts of all values."""
    means, lefts = list(values), [jnp.zeros_like(value) for value in values]
    for bucket in buckets_of([value.size for value in values], keys):
        mean, left = move(join_bucket(values, bucket), bucket.key)
        for i, own_mean, own_left in zip(
            bucket.members, split_bucket(mean, bucket), split_bucket(left, bucket), strict=True
        ):
            means[i], lefts[i] = own_mean.reshape(values[i].shape), own_left.reshape(values[i].shape)
    return means, lefts


def buckets_of(sizes: Sequence[int], keys: Sequence[Hashable]) -> list[Bucket]:
    """Return the buckets of arrays of so many elements."""
    return plan_buckets(sizes, keys, BUCKET_ELEMENTS)


def join_bucket(values: Sequence[jax.Array], bucket: Bucket) -> jax.Array:
    """Return the values of a bucket as one flat array."""
    pieces = [values[i].reshape(-1) for i in bucket.members]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def split_bucket(flat: jax.Array, bucket: Bucket) -> list[jax.Array]:
    """Return the flat values of a bucket."""
    stops = np.cumsum(bucket.sizes).tolist()
    return [flat[stop - size : stop] for stop, size in zip(stops, bucket.sizes, strict=True)]


class Codec(NamedTuple):
    """How rows of numbers are written in few bytes.

    Attributes:
      length: `length(n)`: what a chunk of n elements is padded to.
      encode: `encode(rows, valid) -> parts`: rows [R, C] to arrays [R, k]; `valid` [R, C] is False for padding.
      decode: `decode(parts, length, dtype) -> rows`.
      nbytes: `nbytes(length, dtype)`: the bytes of one encoded row.
    """

    length: Callable[[int], int]
    encode: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]
    decode: Callable[[Sequence[jax.Array], int, np.dtype], jax.Array]
    nbytes: Callable[[int, np.dtype], int]


def two_phase_mean(flat: jax.Array, codec: Codec, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Return the mean of flat arrays [n] over an axis, the same bits on all devices, and what this device must send again."""
    count, n, dtype = size_of("two_phase_mean", axis_name), flat.size, flat.dtype
    length = _chunk(n, count, codec)
    rows = jnp.pad(flat, (0, count * length - n)).reshape(count, length)
    real = jnp.asarray(np.clip(n - np.arange(count) * length, 0, length), jnp.int32)
    valid = jnp.arange(length)[None, :] < real[:, None]
    me = jax.lax.axis_index(axis_name)
    mine = (jnp.arange(count) == me)[:, None]
    own = jax.lax.dynamic_slice_in_dim(rows, me, 1)

    parts = codec.encode(rows, valid)
    received = codec.decode(all_to_all_packed(parts, axis_name), length, dtype)
    is_real = jax.lax.dynamic_slice_in_dim(valid, me, 1)
    # what a codec makes of padding is not to weigh in the mean
    mean = jnp.where(is_real, jnp.where(mine, own, received).sum(axis=0, keepdims=True) / count, 0)
    shown = codec.encode(mean, is_real)
    means = codec.decode(all_gather_packed(shown, axis_name), length, dtype)

    not_sent = rows - codec.decode(parts, length, dtype)
    not_shown = count * (mean - codec.decode(shown, length, dtype))
    left = jnp.where(mine, not_shown, not_sent)
    return means.reshape(-1)[:n], left.reshape(-1)[:n]


def two_phase_bytes(n: int, codec: Codec, axis_size: int, dtype: np.dtype) -> int:
    """Return what a device sends for n elements: N - 1 chunks in an all-to-all, then N - 1 in a ring of gathers."""
    return 2 * (axis_size - 1) * codec.nbytes(_chunk(n, axis_size, codec), dtype)


def _chunk(n: int, axis_size: int, codec: Codec) -> int:
    return codec.length(-(-n // axis_size))


def _cast(wire: np.dtype) -> Codec:
    """Return the codec that rounds to a narrower floating dtype."""

    def encode(rows, valid):
        return (rows.astype(wire),)

    def decode(parts, length, wide):
        return parts[0].astype(wide)

    return Codec(lambda n: n, encode, decode, lambda length, wide: length * wire.itemsize)
