"""Reducers that encode a gradient in blocks, each block with its own scale: `int8` and `sign`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.collectives._buckets import Bucket
from shardopt.core import PyTree, calling, check_count, value_error
from shardopt.core._axis import AxisName
from shardopt.core._reducer import Dtypes, MessageCodec, Reducer, Values
from shardopt.reducers._codec import Codec
from shardopt.reducers._mean import buckets_of, join_bucket, means_of, split_bucket, two_phase_bytes
from shardopt.reducers._reducer import make_reducer, real_form


@calling("sign")
def sign(block_size: int = 1024) -> Reducer:
    """Average the signs of gradients, times their mean magnitude; use it with `error_feedback`.

    C(x) = mean|x| sign(x) over a block, with sign(0) = 1, packed eight signs to a byte. Each device
    owns one of N chunks. The owner averages C(g_d) of the other devices and its own exact g, and
    sends C(mean) to all devices. Leaves are joined into flat buckets, which are cut into blocks.

    Args:
      block_size: the number of elements that share a magnitude, a multiple of 8.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `block_size` is not an integer.
      ValueError: if it is not a positive multiple of 8.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.sign()
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, axis_size=4)
      792
      >>> grads = jnp.array([[1.0, -3.0], [1.0, -3.0]])
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data"))(grads)
      >>> print(mean[0])
      [ 2. -2.]

    **Equivalence**: a single call is far from the mean. With `error_feedback` nothing is lost over
    time, neither from the gradients nor from the means. A NaN or inf makes its block non-finite.

    **Placement**: no state.

    **Communication** per call and device, for Psi elements: an all-to-all and an all-gather of
    packed bits and scales, 2(N-1)/N Psi (1/8 + 4/block_size) bytes. This is about 1/31 of fp32.

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      2019, algorithm 1; Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD
      with Error-Feedback", 2019, which compresses blocks, and the mean as well.
    """
    check_count("block_size", block_size)
    if block_size % 8:
        lower = max(8, int(block_size) // 8 * 8)
        problem = (
            "block_size must be a multiple of 8, because bits are packed into bytes; got"
            f" {block_size}."
        )
        raise value_error(problem, fix=f"use {lower} or {lower + 8}.")
    size = int(block_size)

    def encode(rows, valid):
        # The padding of a bucket is 0. It adds nothing to the sum, and must not add to the count
        # either.
        num_valid = jnp.maximum(jnp.sum(_blocks(valid, size), axis=2, dtype=jnp.int32), 1)
        scales = jnp.sum(jnp.abs(_blocks(rows, size)), axis=2) / num_valid.astype(rows.dtype)
        # One bit has no third value for 0. Padding decodes to +scale, and is cut off with the
        # bucket's end.
        return jnp.packbits(rows >= 0, axis=1), scales

    def decode(parts, length, dtype):
        bits, scales = parts
        signs = jnp.unpackbits(bits, axis=1).astype(dtype) * 2 - 1
        return (_blocks(signs, size) * scales[:, :, None]).reshape(signs.shape)

    def nbytes(length, dtype):
        return length // 8 + length // min(size, length) * dtype.itemsize

    codec = Codec(lambda n: _padded(n, size, multiple=8), encode, decode, nbytes)
    return blockwise(f"sign(block_size={size})", codec)


@calling("int8")
def int8(block_size: int = 256) -> Reducer:
    """Average gradients as 8-bit integers with one scale per block.

    C(x) = s round(x / s) with s = max|x| / 127 over a block. Each device owns one of N chunks. The
    owner averages C(g_d) of the other devices and its own exact g, and sends C(mean) to all
    devices. Leaves are joined into flat buckets, which are cut into blocks.

    Args:
      block_size: the number of elements that share a scale.

    Returns:
      A `Reducer`.

    Raises:
      TypeError: if `block_size` is not an integer.
      ValueError: if it is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> reducer = so.reducers.int8(block_size=256)
      >>> reducer.wire_bytes({"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, axis_size=4)
      3120
      >>> grads = jnp.array([[127.0, 3.2], [127.0, -1.0]])
      >>> mean = jax.jit(jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data"))(grads)
      >>> print(mean[0])
      [127.    1.1]

    **Equivalence**: each rounding changes a number by at most s/2, which biases the mean. With
    `error_feedback` nothing is lost over time. The mean is exact where gradients and mean are
    multiples of their blocks' scales. A NaN or inf makes its block non-finite.

    **Placement**: no state.

    **Communication** per call and device, for Psi elements: an all-to-all and an all-gather of int8
    and scales, 2(N-1)/N Psi (1 + 4/block_size) bytes. This is about a quarter of fp32.
    In a `shard_map` over one axis, with other axes that the partitioner keeps, each gradient keeps
    its sharding and is sent by itself: N - 1 permutes and an all-reduce, 0.4 of fp32 in all. A
    gradient without a dim that the devices of all axes divide is sent in fp32.

    References:
      Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016 (the linear code with
      a scale); Wang et al., "ZeRO++", 2023 (blocks, and quantised all-to-all reductions).
    """
    check_count("block_size", block_size)
    size = int(block_size)

    def encode(rows, valid):
        blocks = _blocks(rows, size)
        scales = jnp.max(jnp.abs(blocks), axis=2, keepdims=True) / 127
        # All numbers of the block are zero, or too small: the scale underflows.
        scales = jnp.where(scales == 0, 1, scales)
        # A subnormal scale has few bits. The quotient can then exceed 127.
        codes = jnp.clip(jnp.round(blocks / scales), -127, 127).astype(jnp.int8)
        return codes.reshape(rows.shape), scales[:, :, 0]

    def decode(parts, length, dtype):
        codes, scales = parts
        # A block whose scale is NaN or inf decodes to NaN, even where its codes are zero.
        nan_scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
        return (_blocks(codes, size).astype(dtype) * nan_scales[:, :, None]).reshape(codes.shape)

    def nbytes(length, dtype):
        return length + length // min(size, length) * dtype.itemsize

    codec = Codec(lambda n: _padded(n, size), encode, decode, nbytes)
    return blockwise(f"int8(block_size={size})", codec)


def blockwise(name: str, codec: Codec) -> Reducer:
    """Return the reducer that encodes flat buckets with a codec.

    A mean over an axis takes two phases, see `two_phase_mean`. A single sender encodes each bucket
    once.
    """
    functions = _Blockwise(codec)
    message_codec = MessageCodec(functions.write, functions.read)
    return make_reducer(
        name, send=functions.send, count_bytes=functions.count_bytes, codec=message_codec
    )


@dataclasses.dataclass(frozen=True)
class _Blockwise:
    """The functions of `blockwise`, over lists of real arrays.

    The arguments are as in `make_reducer`.
    """

    codec: Codec

    def send(
        self, values: Values, dtypes: Dtypes, state: PyTree, axis_name: AxisName
    ) -> tuple[Values, Values, PyTree]:
        dtypes_of_values = [value.dtype for value in values]
        return *means_of(values, dtypes_of_values, lambda dtype: self.codec, axis_name), state

    def count_bytes(self, params: PyTree, axis_size: int) -> int:
        forms = list(map(real_form, jax.tree.leaves(params)))
        return sum(
            two_phase_bytes(bucket.size, self.codec, axis_size, bucket.key)
            for bucket in _buckets(forms)
        )

    def write(self, values: Values, dtypes: Dtypes, state: PyTree) -> tuple[PyTree, PyTree]:
        message = []
        for bucket in _buckets(values):
            length = self.codec.padded_length(bucket.size)
            row = jnp.pad(join_bucket(values, bucket), (0, length - bucket.size))[None]
            message.append(self.codec.encode(row, (jnp.arange(length) < bucket.size)[None]))
        return message, state

    def read(self, message: PyTree, shapes: Sequence[Any], dtypes: Dtypes) -> Values:
        values = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        for bucket, parts in zip(_buckets(shapes), message, strict=True):
            row = self.codec.decode(parts, self.codec.padded_length(bucket.size), bucket.key)[0]
            for i, value in zip(bucket.members, split_bucket(row, bucket), strict=True):
                values[i] = value.reshape(shapes[i].shape)
        return values


def _buckets(values: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[Bucket]:
    return buckets_of([value.size for value in values], [value.dtype for value in values])


def _padded(n: int, block_size: int, multiple: int = 1) -> int:
    """Return n rounded up to full blocks.

    A chunk smaller than one block becomes a single smaller block, whose size is rounded up to
    `multiple`.
    """
    padded = -(-n // multiple) * multiple
    return padded if padded <= block_size else -(-n // block_size) * block_size


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """Reshape rows [R, C] to [R, number of blocks, block size]."""
    width = min(block_size, x.shape[1])
    return x.reshape(x.shape[0], x.shape[1] // width, width)
