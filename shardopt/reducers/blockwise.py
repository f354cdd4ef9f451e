"""Reducers that write a gradient as blocks, each with a scale of its own: `int8` and `sign`."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardopt.collectives.buckets import Bucket
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import wide_dtype
from shardopt.reducers.mean import (
    Codec,
    buckets_of,
    in_buckets,
    join_bucket,
    split_bucket,
    two_phase_bytes,
    two_phase_mean,
)
from shardopt.reducers.reducer import MessageCodec, Reducer, make_reducer, real_dtype, real_shape


def sign(block_size: int = 1024) -> Reducer:
    """Average the signs of gradients, times their mean magnitude; use it with `error_feedback`.

    C(x) = mean|x| sign(x) over a block, sign(0) = 1, packed eight to a byte. The owner of each of N chunks adds up
    C(g_d) of the other devices and its own g, and shows C(mean). Blocks run over flat buckets, leaf after leaf.

    **Equivalence**: far from the mean by itself; with `error_feedback` nothing is lost over time, neither of the
    gradients nor of the means. A NaN or inf makes its block non-finite.

    **Placement**: no state.

    **Communication** a call, per device, for Psi elements: an all-to-all and an all-gather of packed bits and
    scales, 2(N-1)/N Psi (1/8 + 4/block_size) bytes; about 1/31 of fp32.

    Args:
      block_size: elements that share a magnitude, a multiple of 8.

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

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019, algorithm 1;
      Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", 2019, which
      compresses blocks, and the mean as well.
    """
    check_count("sign", "block_size", block_size)
    if block_size % 8:
        near = max(8, int(block_size) // 8 * 8)
        what = f"block_size must be a multiple of 8, because bits are packed into bytes; got {block_size}."
        raise ValueError(format_error("sign", what, fix=f"use {near} or {near + 8}."))
    size = int(block_size)

    def encode(rows, valid):
        present = jnp.maximum(jnp.sum(_blocks(valid, size), axis=2, dtype=jnp.int32), 1)
        scales = jnp.sum(jnp.abs(_blocks(rows, size)), axis=2) / present.astype(rows.dtype)
        return jnp.packbits(rows >= 0, axis=1), scales

    def decode(parts, length, dtype):
        bits, scales = parts
        signs = jnp.unpackbits(bits, axis=1).astype(dtype) * 2 - 1
        return (_blocks(signs, size) * scales[:, :, None]).reshape(signs.shape)

    def nbytes(length, dtype):
        return length // 8 + length // min(size, length) * dtype.itemsize

    codec = Codec(lambda n: _padded(n, size, multiple=8), encode, decode, nbytes)
    return blockwise(f"sign(block_size={size})", codec)


def int8(block_size: int = 256) -> Reducer:
    """Average gradients as 8-bit integers with one scale a block.

    C(x) = s round(x / s) with s = max|x| / 127 over a block. The owner of each of N chunks adds up C(g_d) of the
    other devices and its own g, and shows C(mean). Blocks run over flat buckets, leaf after leaf.

    **Equivalence**: biased by rounding, at most s/2 each time; with `error_feedback` nothing is lost over time. Exact
    where gradients and mean are multiples of their blocks' scales. A NaN or inf makes its block non-finite.

    **Placement**: no state.

    **Communication** a call, per device, for Psi elements: an all-to-all and an all-gather of int8 and scales,
    2(N-1)/N Psi (1 + 4/block_size) bytes; about a quarter of fp32.

    Args:
      block_size: elements that share a scale.

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

    References:
      Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016 (the linear code with a scale);
      Wang et al., "ZeRO++", 2023 (blocks, and quantised all-to-all reductions).
    """
    check_count("int8", "block_size", block_size)
    size = int(block_size)

    def encode(rows, valid):
        blocks = _blocks(rows, size)
        scales = jnp.max(jnp.abs(blocks), axis=2, keepdims=True) / 127
        scales = jnp.where(scales == 0, 1, scales)  # a block of zeros, or of numbers too small to have a scale
        codes = jnp.clip(jnp.round(blocks / scales), -127, 127).astype(jnp.int8)
        return codes.reshape(rows.shape), scales[:, :, 0]

    def decode(parts, length, dtype):
        codes, scales = parts
        # where a scale is NaN or inf, so is what becomes of the block: no code can hide it
        broken = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
        return (_blocks(codes, size).astype(dtype) * broken[:, :, None]).reshape(codes.shape)

    def nbytes(length, dtype):
        return length + length // min(size, length) * dtype.itemsize

    codec = Codec(lambda n: _padded(n, size), encode, decode, nbytes)
    return blockwise(f"int8(block_size={size})", codec)


def blockwise(name: str, codec: Codec) -> Reducer:
    """Return the reducer that sends flat buckets through a codec, in two phases over an axis, in one from a sender."""

    def send(values, dtypes, state, axis_name):
        def move(flat, key):
            return two_phase_mean(flat, codec, axis_name)

        means, lefts = in_buckets(values, [value.dtype for value in values], move)
        return means, lefts, state

    def count(params, axis_size):
        leaves = jax.tree.leaves(params)
        sizes = [math.prod(real_shape(leaf)) for leaf in leaves]
        buckets = buckets_of(sizes, [real_dtype(wide_dtype(leaf.dtype)) for leaf in leaves])
        return sum(two_phase_bytes(bucket.size, codec, axis_size, bucket.key) for bucket in buckets)

    def write(values, dtypes, state):
        message = []
        for bucket in _buckets(values):
            length = codec.length(bucket.size)
            row = jnp.pad(join_bucket(values, bucket), (0, length - bucket.size))[None]
            message.append(codec.encode(row, (jnp.arange(length) < bucket.size)[None]))
        return message, state

    def read(message, shapes, dtypes):
        values = [jnp.zeros(like.shape, like.dtype) for like in shapes]
        for bucket, parts in zip(_buckets(shapes), message, strict=True):
            row = codec.decode(parts, codec.length(bucket.size), bucket.key)[0]
            for i, value in zip(bucket.members, split_bucket(row, bucket), strict=True):
                values[i] = value.reshape(shapes[i].shape)
        return values

    return make_reducer(name, send=send, count=count, codec=MessageCodec(write, read))


def _buckets(values: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[Bucket]:
    return buckets_of([value.size for value in values], [value.dtype for value in values])


def _padded(n: int, block_size: int, multiple: int = 1) -> int:
    """Return n padded to full blocks; a chunk below one block is one block of its own size, up to a multiple."""
    padded = -(-n // multiple) * multiple
    return padded if padded <= block_size else -(-n // block_size) * block_size


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """Return rows [R, C] as [R, blocks, block size]."""
    width = min(block_size, x.shape[1])
    return x.reshape(x.shape[0], x.shape[1] // width, width)
