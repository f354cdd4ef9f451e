"""The mean in two compressed phases: everybody reduces one chunk, then shows the result to all.

With x_d the values of device d, cut into chunks x_d[c], and C a codec, the owner c of chunk c gets C(x_d[c]) from
every other device d, has its own x_c[c] exactly, and shows C(m_c) of the mean m_c. Two things are lost, and both are
known to one device: x_d[c] - C(x_d[c]) to its sender, and N (m_c - C(m_c)), counted in units of the sum, to the
owner. They belong to different chunks of a device, since nobody sends its own chunk in the first phase; so one memory
as large as the gradient holds both, and N mean + sum of memories is the sum of the values, exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.types import PyTree
from shardopt.reducers.axis import AxisName
from shardopt.reducers.axis import axis_size as size_of
from shardopt.reducers.buckets import all_gather_packed, all_to_all_packed, plan_buckets


class Codec(NamedTuple):
    """How rows of numbers are written in few bytes.

    Attributes:
      length: `length(n)`: what a chunk of n elements is padded to.
      encode: `encode(rows, valid) -> parts`: rows [R, C] to arrays [R, k]; `valid` [R, C] is False for padding.
      decode: `decode(parts, length, dtype) -> rows`.
      nbytes: `nbytes(length, dtype)`: the bytes of one encoded row.
    """

    length: Callable[[int], int]
    encode: Callable[[Any, Any], tuple[Any, ...]]
    decode: Callable[[Any, int, Any], Any]
    nbytes: Callable[[int, Any], int]


def two_phase_mean(flat: Any, codec: Codec, axis_name: AxisName) -> tuple[Any, Any]:
    """Return the mean of flat arrays over an axis, and what this device must send again.

    Args:
      flat: this device's values [n], fp32 or wider.
      codec: how they travel.
      axis_name: the bound axis.

    Returns:
      (mean, left), both [n]; mean is bit for bit the same on all devices.
    """
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


def two_phase_bytes(n: int, codec: Codec, axis_size: int, dtype: Any) -> int:
    """Return what a device sends for n elements: N - 1 chunks in an all-to-all, then N - 1 in a ring of gathers."""
    return 2 * (axis_size - 1) * codec.nbytes(_chunk(n, axis_size, codec), dtype)


def cast_codec(dtype: Any) -> Codec:
    """Return the codec that rounds to a narrower floating dtype."""

    def encode(rows, valid):
        return (rows.astype(dtype),)

    def decode(parts, length, wide):
        return parts[0].astype(wide)

    return Codec(lambda n: n, encode, decode, lambda length, wide: length * jnp.dtype(dtype).itemsize)


def blocks_of(n: int, block_size: int, multiple: int = 1) -> int:
    """Return n padded to whole blocks; a chunk below one block is one block of its own size, up to a multiple."""
    padded = -(-n // multiple) * multiple
    return padded if padded <= block_size else -(-n // block_size) * block_size


def _chunk(n: int, axis_size: int, codec: Codec) -> int:
    return codec.length(-(-n // axis_size))


# How one sender writes its values, and any receiver reads them: the part of a reducer that needs no axis.


def _no_state(params: PyTree) -> PyTree:
    return ()


class Code(NamedTuple):
    """Functions over lists of real arrays, fp32 or wider; a complex leaf [...] comes as [..., 2].

    Attributes:
      write: `write(values, dtypes, state) -> (message, state)`: any tree of compact arrays. Dtypes are those of the
        leaves, real parts of complex ones.
      read: `read(message, shapes, dtypes) -> values`; `shapes` are values or `jax.ShapeDtypeStruct`s like them.
      init: `init(params) -> state`.
      correct: `correct(values, state) -> (values, state)`, run before what was not sent is added; None for nothing.
      feedback: whether what a message does not say is remembered.
    """

    write: Callable[[list[Any], list[Any], PyTree], tuple[PyTree, PyTree]]
    read: Callable[[PyTree, list[Any], list[Any]], list[Any]]
    init: Callable[[PyTree], PyTree] = _no_state
    correct: Callable[[list[Any], PyTree], tuple[list[Any], PyTree]] | None = None
    feedback: bool = False


def cast_code(travels: Callable[[Any], Any]) -> Code:
    """Return the code that rounds each value to `travels(dtype of its leaf)`."""

    def write(values, dtypes, state):
        return [value.astype(travels(dtype)) for value, dtype in zip(values, dtypes, strict=True)], state

    def read(message, shapes, dtypes):
        return [part.astype(like.dtype) for part, like in zip(message, shapes, strict=True)]

    return Code(write, read)


def block_code(codec: Codec) -> Code:
    """Return the code that sends flat buckets through a codec, each as one row."""

    def write(values, dtypes, state):
        message = []
        for bucket in _buckets(values):
            pieces = [values[i].reshape(-1) for i in bucket.members]
            flat = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
            length = codec.length(bucket.size)
            row = jnp.pad(flat, (0, length - bucket.size))[None]
            message.append(codec.encode(row, (jnp.arange(length) < bucket.size)[None]))
        return message, state

    def read(message, shapes, dtypes):
        values = [jnp.zeros(like.shape, like.dtype) for like in shapes]
        for bucket, parts in zip(_buckets(shapes), message, strict=True):
            row, start = codec.decode(parts, codec.length(bucket.size), bucket.key)[0], 0
            for i, size in zip(bucket.members, bucket.sizes, strict=True):
                values[i] = row[start : start + size].reshape(shapes[i].shape)
                start += size
        return values

    return Code(write, read)


def _buckets(values: Sequence[Any]) -> list[Any]:
    return plan_buckets([value.size for value in values], [value.dtype for value in values])
