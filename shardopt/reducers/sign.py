"""`sign`: one bit a number and a scale a block."""

import jax.numpy as jnp

from shardopt.core.errors import complaint
from shardopt.reducers.blockwise import blockwise
from shardopt.reducers.reducer import Reducer, check_size
from shardopt.reducers.two_phase import Codec, blocks_of


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
      >>> mean = jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data")(grads)
      >>> print(mean[0])
      [ 2. -2.]

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019, algorithm 1;
      Zheng et al., "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", 2019, which
      compresses blocks, and the mean as well.
    """
    check_size("sign", "block_size", block_size)
    if block_size % 8:
        near = max(8, int(block_size) // 8 * 8)
        what = f"block_size must be a multiple of 8, because bits are packed into bytes; got {block_size}."
        raise ValueError(complaint("sign", what, fix=f"use {near} or {near + 8}."))
    size = int(block_size)

    def blocked(x):
        width = min(size, x.shape[1])
        return x.reshape(x.shape[0], x.shape[1] // width, width)

    def encode(rows, valid):
        present = jnp.maximum(jnp.sum(blocked(valid), axis=2, dtype=jnp.int32), 1)
        scales = jnp.sum(jnp.abs(blocked(rows)), axis=2) / present.astype(rows.dtype)
        return jnp.packbits(rows >= 0, axis=1), scales

    def decode(parts, length, dtype):
        bits, scales = parts
        signs = jnp.unpackbits(bits, axis=1).astype(dtype) * 2 - 1
        return (blocked(signs) * scales[:, :, None]).reshape(signs.shape)

    def nbytes(length, dtype):
        return length // 8 + length // min(size, length) * dtype.itemsize

    codec = Codec(lambda n: blocks_of(n, size, multiple=8), encode, decode, nbytes)
    return blockwise(f"sign(block_size={size})", codec)
