"""64-bit sums of the bits of arrays: equal arrays have equal sums, on any mesh.

Any changed element changes the sum.

A sum is two uint32 numbers, because jax has no 64-bit integers by default. Element p of an array
has the bits b_p, and

    first = sum_p f(b_p ^ f(p)),    second = sum_p g(f(b_p ^ f(p)) + p)    (both modulo 2^32)

with bijections f and g that look random. So a single changed element always changes both numbers,
and other changes go unseen with probability 2^-64. A product with an odd weight is not enough,
because two changed sign bits cancel. The sums of the shards of an array add up to the sum of the
array, in any order, if p counts the elements of the whole array.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shardopt.core._types import is_key

LIMBS = 8
"""A sum as floats: eight of 8 bits each, whose additions are exact for up to 2^16 sums."""


def checksum(
    x: jax.Array, starts: Sequence[ArrayLike] = (), shape: Sequence[int] = ()
) -> jax.Array:
    """Return the sum of an array, or of a shard of it, as uint32[2].

    Args:
      x: an array of any dtype.
      starts: where the shard starts in each dim of the whole array; empty if x is the whole array.
      shape: the shape of the whole array; empty if x is the whole array.
    """
    words = _words(x)
    if not x.size:
        return jnp.zeros(2, jnp.uint32)
    total = jnp.zeros(2, jnp.uint32)
    stored_shape = words[0].shape  # of the integers of a key, if x is a key
    shape = (*shape, *stored_shape[len(shape) :]) if shape else stored_shape
    starts = [*starts, *[0] * (len(shape) - len(starts))]
    position = jnp.zeros(stored_shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = jax.lax.broadcasted_iota(jnp.uint32, stored_shape, dim) + jnp.asarray(
            starts[dim]
        ).astype(jnp.uint32)
        position = position + index * np.uint32(stride % 2**32)
        stride *= shape[dim]
    for number, word in enumerate(words):
        place = position * np.uint32(len(words)) + np.uint32(number)
        first = _scrambled(word ^ _scrambled(place, *_F), *_F)
        second = _scrambled(first + place, *_G)
        total = total + jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in (first, second)])
    return total


def checksum_of(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return one sum of several arrays, which depends on their order."""
    return joined([checksum(leaf) for leaf in leaves])


def joined(sums: Sequence[jax.Array], numbers: Sequence[int] | None = None) -> jax.Array:
    """Return one sum of the sums of several arrays.

    Array i has the number i, unless `numbers` says otherwise.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, leaf_sum in zip(
        range(len(sums)) if numbers is None else numbers, sums, strict=True
    ):
        total = total + leaf_sum * np.uint32(2 * number + 1)
    return total


def to_limbs(total: jax.Array) -> jax.Array:
    """Return a sum as float32[8], which may be added like a gradient."""
    return ((total[:, None] >> _SHIFTS) & np.uint32(255)).astype(jnp.float32).reshape(LIMBS)


def from_limbs(limbs: jax.Array) -> jax.Array:
    """Return the sum whose limbs were added."""
    return jnp.sum(limbs.reshape(2, 4).astype(jnp.uint32) << _SHIFTS, axis=1, dtype=jnp.uint32)


def _words(x: jax.Array) -> list[jax.Array]:
    """Return the bits of each element as one or more arrays of uint32."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    bits = 1 if x.dtype == bool else (jnp.iinfo if is_integer else jnp.finfo)(x.dtype).bits
    if bits < 8 and (is_integer or x.dtype == bool):
        return [x.astype(jnp.int8).astype(jnp.uint32)]
    if bits == 64:
        pairs = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [pairs[..., 0], pairs[..., 1]]
    if bits < 8:  # floats of 4 or 6 bits, which fp32 holds exactly
        return _words(x.astype(jnp.float32))
    return [jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)]


_F = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_G = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
"""Factors of the two bijections: those of Chris Wellons' lowbias32, and of MurmurHash3."""
_SHIFTS = np.arange(0, 32, 8, dtype=np.uint32)[None]


def _scrambled(x: jax.Array, factor: np.uint32, other_factor: np.uint32) -> jax.Array:
    """Return numbers that look random, another one for each x: xorshifts and products with odd
    factors.
    """
    x = (x ^ (x >> np.uint32(16))) * factor
    x = (x ^ (x >> np.uint32(15))) * other_factor
    return x ^ (x >> np.uint32(16))
