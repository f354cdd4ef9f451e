"""The mean over an axis: `exact`, and the two-phase mean of rounded or encoded numbers.

Let x_d be the values of device d, cut into N chunks x_d[c], and C a codec. Device c is the owner of
chunk c.

1. The owner c receives C(x_d[c]) from every other device d. It has its own x_c[c] exactly.
2. The owner sends C(m_c) to all devices, where m_c is the mean of chunk c.

Each phase makes an error that one device knows:

- The sender knows x_d[c] - C(x_d[c]).
- The owner knows N (m_c - C(m_c)), in units of the sum.

The two errors of a device belong to different chunks, since no device sends its own chunk in the
first phase. So one memory as large as the gradient holds both, and N mean + the sum of memories
equals the sum of the values exactly.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shardopt.collectives._buckets import Bucket, plan_buckets
from shardopt.core import Arrays, PyTree, calling, check_count, type_error, value_error
from shardopt.core._axis import AxisName
from shardopt.core._axis import axis_size as size_of
from shardopt.core._reducer import Dtypes, MessageCodec, Reducer, Values
from shardopt.reducers._axis import (
    all_gather_kept,
    all_gather_packed,
    all_reduce_padded,
    all_to_all_kept,
    all_to_all_packed,
)
from shardopt.reducers._codec import Codec
from shardopt.reducers._grid import grid_of, num_partitions
from shardopt.reducers._reducer import make_reducer, real_dtype, real_form

BUCKET_ELEMENTS = 2**23
"""The size at which a bucket is full: 32 MiB in fp32. A larger leaf has its own bucket, and is not
copied.
"""

Collective = Callable[[Sequence[jax.Array], AxisName], Arrays]
"""A collective of several arrays over an axis."""


@calling("exact")
def exact(dtype: DTypeLike | None = None, *, tile_rows: int | None = None) -> Reducer:
    """Average gradients as they are, or rounded to a dtype on the wire.

    mean = round(sum_d round(g_d) / N), where round is to the dtype on the wire. Sums are in fp32 or
    wider.

    Args:
      dtype: the dtype on the wire, such as `jnp.bfloat16`; by default the dtype of each leaf. A
        leaf is never widened.
      tile_rows: rows of the global batch run in tiles of this many rows, at least 2, whose
        gradients are added in one order: training has the same bits on every mesh, see
        docs/same_bits.md. Only a strategy takes such a reducer.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `dtype` is not a dtype.
      ValueError: if `dtype` is not a real floating one of 16 bits or more, `tile_rows` is below 2,
        or both are passed.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.exact(jnp.bfloat16)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)
      6144
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data"))(jnp.array([1.0, 2.0]))
      >>> print(mean)
      [1.5 1.5]

    **Equivalence**: equal to the mean up to summation order where nothing is rounded. Otherwise
    each number is rounded at most twice, for any number of devices.

    **Placement**: no state.

    **Communication** per call and device, for Psi elements of b bytes: 2(N-1)/N Psi b, as one
    all-reduce per bucket. A dtype on the wire that is narrower than fp32 takes an all-to-all and an
    all-gather of N equal chunks instead, with the same bytes: XLA:CPU would widen the dtype in an
    all-reduce.
    """
    requested = None if dtype is None else _checked_dtype(dtype)
    name = "exact()" if requested is None else f"exact({requested.name})"

    if tile_rows is not None:
        return _in_tiles(tile_rows, requested)
    functions = _Exact(requested)
    codec = MessageCodec(functions.write, _read_rounded)
    reducer = make_reducer(
        name, send=functions.send, count_bytes=functions.count_bytes, codec=codec
    )
    return reducer._replace(is_exact=True, dtype=requested)


def _in_tiles(tile_rows: int, dtype: np.dtype | None) -> Reducer:
    """Return the reducer of `exact(tile_rows=...)`; the step of a strategy adds the gradients."""
    check_count("tile_rows", tile_rows, minimum=2)
    name = f"exact(tile_rows={tile_rows})"
    if dtype is not None:
        problem = f"gradients in {dtype.name} on the wire are rounded on each mesh in another way."
        raise value_error(problem, fix="leave dtype or tile_rows out.")

    @calling(name)
    def refuse(*args: Any) -> Any:
        problem = "the mean of some gradients has no tiles of rows."
        raise value_error(problem, fix="pass it to a strategy, so.ddp(..., reducer=...).")

    return Reducer(name, refuse, refuse, refuse, is_exact=True, tile_rows=tile_rows)


@dataclasses.dataclass(frozen=True)
class _Exact:
    """The functions of `exact`, over lists of real arrays.

    The arguments are as in `make_reducer`.
    """

    requested: np.dtype | None

    def wire_dtype(self, leaf_dtype: np.dtype) -> np.dtype:
        value_dtype = real_dtype(leaf_dtype)
        requested = self.requested
        return (
            value_dtype
            if requested is None or requested.itemsize >= value_dtype.itemsize
            else requested
        )

    def send(
        self, values: Values, dtypes: Dtypes, state: PyTree, axis_name: AxisName
    ) -> tuple[Values, Values, PyTree]:
        return *mean_of(values, [self.wire_dtype(dtype) for dtype in dtypes], axis_name), state

    def count_bytes(self, params: PyTree, axis_size: int) -> int:
        leaves = jax.tree.leaves(params)
        forms = list(map(real_form, leaves))
        return mean_bytes(
            [form.size for form in forms],
            [form.dtype for form in forms],
            [self.wire_dtype(leaf.dtype) for leaf in leaves],
            axis_size,
        )

    def write(self, values: Values, dtypes: Dtypes, state: PyTree) -> tuple[PyTree, PyTree]:
        return [
            value.astype(self.wire_dtype(dtype))
            for value, dtype in zip(values, dtypes, strict=True)
        ], state


def _read_rounded(message: PyTree, shapes: Sequence[Any], dtypes: Dtypes) -> Values:
    return [array.astype(shape.dtype) for array, shape in zip(message, shapes, strict=True)]


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        wire_dtype = jnp.dtype(dtype)
    except TypeError as error:
        fix = "pass one such as jax.numpy.bfloat16."
        raise type_error(f"dtype must be a dtype, got {dtype!r}.", fix=fix) from error
    if not jnp.issubdtype(wire_dtype, jnp.floating) or wire_dtype.itemsize < 2:
        problem = f"dtype must be a floating dtype of 16 bits or more, got {wire_dtype.name}."
        raise value_error(problem, fix="use bfloat16, or so.reducers.int8() for fewer bits.")
    return wire_dtype


@calling("mean_of")
def mean_of(
    values: Sequence[jax.Array], dtypes: Sequence[np.dtype], axis_name: AxisName
) -> tuple[Arrays, Arrays]:
    """Average real arrays over an axis; return (means, residuals).

    An array that is sent in its own dtype takes an all-reduce, and its residual is zero. An array
    that is rounded takes two phases: sums are in its own dtype, and each number is rounded twice
    instead of once per hop. Its residual is the error of that rounding.

    Args:
      values: real arrays, in fp32 or wider.
      dtypes: the dtype on the wire of each array.
      axis_name: the axis.
    """
    keys = list(zip([value.dtype for value in values], dtypes, strict=True))

    def codec_of(key: tuple[np.dtype, np.dtype]) -> Codec | None:
        value_dtype, wire_dtype = key
        return None if wire_dtype.itemsize >= value_dtype.itemsize else _cast_codec(wire_dtype)

    return means_of(values, keys, codec_of, axis_name)


def mean_bytes(
    sizes: Sequence[int],
    value_dtypes: Sequence[np.dtype],
    wire_dtypes: Sequence[np.dtype],
    axis_size: int,
) -> int:
    """Return the number of bytes that a device sends in `mean_of`.

    An all-reduce sends 2 (N - 1) / N of the padded buffer.

    Args:
      sizes: the number of elements of each array.
      value_dtypes: the dtype of each array.
      wire_dtypes: the dtype on the wire of each array.
      axis_size: N, the number of devices.
    """
    num_bytes = 0
    for bucket in buckets_of(sizes, list(zip(value_dtypes, wire_dtypes, strict=True))):
        value_dtype, wire_dtype = bucket.key
        if wire_dtype.itemsize >= value_dtype.itemsize:
            num_bytes += 2 * (axis_size - 1) * -(-bucket.size // axis_size) * value_dtype.itemsize
        else:
            num_bytes += two_phase_bytes(
                bucket.size, _cast_codec(wire_dtype), axis_size, value_dtype
            )
    return num_bytes


def means_of(
    values: Sequence[jax.Array],
    keys: Sequence[Any],
    codec_of: Callable[[Any], Codec | None],
    axis_name: AxisName,
) -> tuple[Arrays, Arrays]:
    """Average real arrays over an axis; return (means, residuals).

    Arrays share flat buckets. If the partitioner keeps an axis of the mesh, it may shard them. Each
    array is then averaged in its own shape, because a flat one has no sharding of its dims.

    Args:
      values: real arrays.
      keys: arrays with different keys share no bucket.
      codec_of: the codec of a key, or None for the exact mean.
      axis_name: the axis.
    """
    num_devices = size_of(axis_name)
    num_shards = num_partitions()

    def average(flat: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
        codec = codec_of(key)
        if codec is not None:
            return two_phase_mean(flat, codec, axis_name)
        # No residual: nothing is rounded below the dtype of the sums.
        return all_reduce_padded(flat, axis_name, num_devices) / num_devices, jnp.zeros_like(flat)

    def average_in_shape(value: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
        codec = codec_of(key)
        grid = None if codec is None else grid_of(value, codec, num_devices, num_shards)
        if codec is None or grid is None:
            return jax.lax.psum(value, axis_name) / num_devices, jnp.zeros_like(value)
        rows = grid.rows(value)
        row_codec = _of_last_dim(codec, rows.ndim)
        valid = jnp.ones(rows.shape, bool)
        means, residual = _mean_of_rows(
            rows, valid, row_codec, rows.shape[-1], axis_name, (all_to_all_kept, all_gather_kept)
        )
        return grid.array(means), grid.array(residual)

    if num_shards == 1:
        return in_buckets(values, keys, average)
    pairs = [average_in_shape(value, key) for value, key in zip(values, keys, strict=True)]
    return [mean for mean, _ in pairs], [residual for _, residual in pairs]


def in_buckets(
    values: Sequence[jax.Array],
    keys: Sequence[Hashable],
    average: Callable[[jax.Array, Hashable], tuple[jax.Array, jax.Array]],
) -> tuple[Arrays, Arrays]:
    """Apply `average(flat, key) -> (mean, residual)`, all flat arrays, to each bucket.

    Return (means, residuals).
    """
    means = list(values)
    residuals = [jnp.zeros_like(value) for value in values]
    for bucket in buckets_of([value.size for value in values], keys):
        bucket_mean, bucket_residual = average(join_bucket(values, bucket), bucket.key)
        for i, mean, residual in zip(
            bucket.members,
            split_bucket(bucket_mean, bucket),
            split_bucket(bucket_residual, bucket),
            strict=True,
        ):
            means[i], residuals[i] = (
                mean.reshape(values[i].shape),
                residual.reshape(values[i].shape),
            )
    return means, residuals


def buckets_of(sizes: Sequence[int], keys: Sequence[Hashable]) -> list[Bucket]:
    """Group arrays, given by their sizes, into buckets.

    Arrays with different keys share no bucket.
    """
    return plan_buckets(sizes, keys, BUCKET_ELEMENTS)


def join_bucket(values: Sequence[jax.Array], bucket: Bucket) -> jax.Array:
    """Concatenate the values of a bucket into one flat array."""
    pieces = [values[i].reshape(-1) for i in bucket.members]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def split_bucket(flat: jax.Array, bucket: Bucket) -> Arrays:
    """Split the flat array of a bucket into the flat values of its members."""
    stops = np.cumsum(bucket.sizes).tolist()
    return [flat[stop - size : stop] for stop, size in zip(stops, bucket.sizes, strict=True)]


@calling("two_phase_mean")
def two_phase_mean(
    flat: jax.Array, codec: Codec, axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of flat arrays [n] over an axis, and this device's residual.

    The mean has the same bits on all devices.
    """
    num_devices = size_of(axis_name)
    n = flat.size
    length = _chunk_length(n, num_devices, codec)
    rows = jnp.pad(flat, (0, num_devices * length - n)).reshape(num_devices, length)
    # The last chunks are padded. Zeros would lower the mean magnitude of `sign`.
    num_valid = jnp.asarray(np.clip(n - np.arange(num_devices) * length, 0, length), jnp.int32)
    valid = jnp.arange(length)[None, :] < num_valid[:, None]
    means, residual = _mean_of_rows(
        rows, valid, codec, length, axis_name, (all_to_all_packed, all_gather_packed)
    )
    return means.reshape(-1)[:n], residual.reshape(-1)[:n]


def _mean_of_rows(
    rows: jax.Array,
    valid: jax.Array,
    codec: Codec,
    length: int,
    axis_name: AxisName,
    collectives: tuple[Collective, Collective],
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of rows [N, ..., length] over an axis, and this device's residual.

    Row i of each device goes to device i. The mean of padding is 0.

    Args:
      rows: the rows.
      valid: False for padding.
      codec: how rows are written.
      length: the length of a row.
      axis_name: the axis.
      collectives: the all-to-all and the all-gather of arrays of rows.
    """
    all_to_all, all_gather = collectives
    num_devices = size_of(axis_name)
    dtype = rows.dtype
    device_index = jax.lax.axis_index(axis_name)
    # [N, 1, ...]: true for the row of this device.
    is_owned = jnp.arange(num_devices) == device_index
    is_owned = is_owned.reshape(num_devices, *[1] * (rows.ndim - 1))
    owned_row = jax.lax.dynamic_slice_in_dim(rows, device_index, 1)

    # Three devices, N = 3; x_d[c] is chunk c of device d:
    #
    #            device 0               device 1               device 2
    # has        x_0[0] x_0[1] x_0[2]   x_1[0] x_1[1] x_1[2]   x_2[0] x_2[1] x_2[2]
    # phase 1    C(x_d[0]) of all d     C(x_d[1])              C(x_d[2])              all-to-all
    # owns       m_0                    m_1                    m_2
    # phase 2    C(m_0) C(m_1) C(m_2)   the same               the same               all-gather
    parts = codec.encode(rows, valid)
    received_rows = codec.decode(all_to_all(parts, axis_name), length, dtype)
    owned_valid = jax.lax.dynamic_slice_in_dim(valid, device_index, 1)
    # A codec may decode padding to a nonzero number, which must not count in the mean.
    chunk_mean = jnp.where(
        owned_valid,
        # The own row was never sent, so it is not rounded either.
        jnp.where(is_owned, owned_row, received_rows).sum(axis=0, keepdims=True) / num_devices,
        0,
    )
    encoded_mean = codec.encode(chunk_mean, owned_valid)
    means = codec.decode(all_gather(encoded_mean, axis_name), length, dtype)

    sending_error = rows - codec.decode(parts, length, dtype)
    # Times N: the memories of all devices add up to an error of the sum, and one device alone knows
    # this error of the mean.
    mean_error = num_devices * (chunk_mean - codec.decode(encoded_mean, length, dtype))
    return means, jnp.where(is_owned, mean_error, sending_error)


def _of_last_dim(codec: Codec, ndim: int) -> Codec:
    """Return the codec of arrays with `ndim` dims, whose last dim is a row."""

    def encode_row(row: jax.Array, valid: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(part[0] for part in codec.encode(row[None], valid[None]))

    def decode(parts: Sequence[jax.Array], length: int, dtype: np.dtype) -> jax.Array:
        def decode_row(*parts: jax.Array) -> jax.Array:
            return codec.decode([part[None] for part in parts], length, dtype)[0]

        return _vmapped(decode_row, ndim - 1)(*parts)

    return codec._replace(encode=_vmapped(encode_row, ndim - 1), decode=decode)


def _vmapped(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        function = jax.vmap(function)
    return function


def two_phase_bytes(n: int, codec: Codec, axis_size: int, dtype: np.dtype) -> int:
    """Return the bytes that a device sends for n elements: N - 1 chunks in an all-to-all, N - 1 in
    an all-gather.
    """
    return 2 * (axis_size - 1) * codec.nbytes(_chunk_length(n, axis_size, codec), dtype)


def _chunk_length(n: int, axis_size: int, codec: Codec) -> int:
    return codec.padded_length(-(-n // axis_size))


def _cast_codec(wire_dtype: np.dtype) -> Codec:
    """Return the codec that rounds to a narrower floating dtype."""

    def encode(rows, valid):
        return (rows.astype(wire_dtype),)

    def decode(parts, length, dtype):
        return parts[0].astype(dtype)

    return Codec(lambda n: n, encode, decode, lambda length, dtype: length * wire_dtype.itemsize)
