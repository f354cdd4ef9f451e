"""The 8-bit dynamic map: 256 numbers in [-1, 1] or [0, 1].

The numbers cover seven decades, and larger decades have more numbers.
"""

import jax
import jax.numpy as jnp

_DECADES = 7
_ZERO = 127
"""The code of the number zero in the signed map; in the unsigned map it is 0."""


def encode(x: jax.Array, *, signed: bool) -> jax.Array:
    """Return the codes of the numbers of the map that are nearest to x.

    Decade i = 0, ..., 6 has n numbers: n = 2^i in the signed map, n = 2^(i + 1) in the unsigned
    map. They are 10^(i - 6) (0.1 + 0.9 (j + 1/2) / n) for j = 0, ..., n - 1. The numbers 0 and 1
    complete the map.

    In the unsigned map, a positive number never gets the code of zero: an update that divides by
    the root of a second moment would explode.

    Args:
      x: a floating array in [-1, 1], or in [0, 1] if not `signed`.
      signed: whether the map has negative numbers. The signed map has no -1; the nearest number is
        -0.993.

    Returns:
      Codes in uint8, in the shape of x. Larger numbers have larger codes.

    Example:
      >>> x = jnp.array([-1.0, 0.0, 1e-6, 0.5, 1.0])
      >>> codes = encode(x, signed=True)
      >>> print(codes, decode(codes, jnp.dtype("float32"), signed=True).round(4))
      [  0 127 128 219 255] [-0.993   0.      0.      0.5008  1.    ]

    References:
      Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015, dynamic tree
      quantization; Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise
      Quantization", 2021, section 2.2; Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit
      States", 2023, section 4.1, on zero.
    """
    magnitude = jnp.abs(x)
    extra_bit = 0 if signed else 1
    num_cells, first_code, decade_top = (
        _full_like(magnitude, value) for value in (1 << extra_bit, 1, 10.0**-6)
    )
    for i in range(1, _DECADES):
        n = 1 << (i + extra_bit)
        decade_bottom = 10.0 ** (i - 7)
        # The bound is half way between the last number of a decade and the first number of the next
        # decade.
        is_above = magnitude >= decade_bottom * (1 + 1.8 / n)
        num_cells = jnp.where(is_above, n, num_cells)
        first_code = jnp.where(is_above, n - (1 << extra_bit) + 1, first_code)
        decade_top = jnp.where(is_above, 10 * decade_bottom, decade_top)
    cell = jnp.floor((magnitude / decade_top - 0.1) / 0.9 * num_cells)
    code = first_code + jnp.clip(cell, 0, num_cells - 1)
    smallest = 1e-6 * (0.1 + 0.45 / (1 << extra_bit))
    below_one = 1 - 0.45 / (1 << (_DECADES - 1 + extra_bit))
    code = jnp.where(
        magnitude < smallest / 2, 0 if signed else jnp.where(magnitude > 0, 1, 0), code
    )
    if not signed:
        return jnp.where(magnitude >= (1 + below_one) / 2, 255, code).astype(jnp.uint8)
    code = jnp.where(x >= (1 + below_one) / 2, _ZERO + 1, jnp.where(x < 0, -code, code))
    return (_ZERO + code).astype(jnp.uint8)


def decode(codes: jax.Array, dtype: jnp.dtype, *, signed: bool) -> jax.Array:
    """Return the numbers of the map with these codes."""
    extra_bit = 0 if signed else 1
    signed_codes = codes.astype(jnp.int32) - (_ZERO if signed else 0)
    code = jnp.abs(signed_codes).astype(dtype)
    num_cells, first_code, decade_top = (
        _full_like(code, value) for value in (1 << extra_bit, 1, 10.0**-6)
    )
    for i in range(1, _DECADES):
        n = 1 << (i + extra_bit)
        is_above = code >= n - (1 << extra_bit) + 1
        num_cells = jnp.where(is_above, n, num_cells)
        first_code = jnp.where(is_above, n - (1 << extra_bit) + 1, first_code)
        decade_top = jnp.where(is_above, 10.0 ** (i - 6), decade_top)
    magnitude = decade_top * (0.1 + 0.9 * (code - first_code + 0.5) / num_cells)
    code_of_one = _ZERO + 1 if signed else 255
    magnitude = jnp.where(
        code == 0, 0, jnp.where(signed_codes == code_of_one, 1, magnitude)
    ).astype(dtype)
    return jnp.where(signed_codes < 0, -magnitude, magnitude)


def _full_like(array: jax.Array, value: float) -> jax.Array:
    return jnp.full_like(array, value)
