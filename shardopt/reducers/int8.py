"""`int8`: eight bits a number and a scale a block."""

import jax.numpy as jnp

from shardopt.reducers.blockwise import blockwise
from shardopt.reducers.reducer import Reducer, check_size
from shardopt.reducers.two_phase import Codec, blocks_of


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
      >>> mean = jax.vmap(lambda g: reducer.reduce(g, (), "data")[0], axis_name="data")(grads)
      >>> print(mean[0])
      [127.    1.1]

    References:
      Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016 (the linear code with a scale);
      Wang et al., "ZeRO++", 2023 (blocks, and quantised all-to-all reductions).
    """
    check_size("int8", "block_size", block_size)
    size = int(block_size)

    def blocked(x):
        width = min(size, x.shape[1])
        return x.reshape(x.shape[0], x.shape[1] // width, width)

    def encode(rows, valid):
        blocks = blocked(rows)
        scales = jnp.max(jnp.abs(blocks), axis=2, keepdims=True) / 127
        scales = jnp.where(scales == 0, 1, scales)  # a block of zeros, or of numbers too small to have a scale
        codes = jnp.clip(jnp.round(blocks / scales), -127, 127).astype(jnp.int8)
        return codes.reshape(rows.shape), scales[:, :, 0]

    def decode(parts, length, dtype):
        codes, scales = parts
        # where a scale is NaN or inf, so is what becomes of the block: no code can hide it
        broken = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
        return (blocked(codes).astype(dtype) * broken[:, :, None]).reshape(codes.shape)

    def nbytes(length, dtype):
        return length + length // min(size, length) * dtype.itemsize

    codec = Codec(lambda n: blocks_of(n, size), encode, decode, nbytes)
    return blockwise(f"int8(block_size={size})", codec)
