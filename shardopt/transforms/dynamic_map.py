"""The 8-bit dynamic map: 256 numbers in [-1, 1] or [0, 1], seven decades of them, denser the larger they are."""

import jax
import jax.numpy as jnp

_DECADES = 7
_ZERO = 127
"""The code of zero where there are negative numbers; elsewhere it is 0."""


def encode(x: jax.Array, *, signed: bool) -> jax.Array:
    """Return the codes of the numbers of the map that are nearest to x.

    Decade i = 0, ..., 6 has n = 2^i numbers (2^(i + 1) where none is negative), 10^(i - 6) (0.1 + 0.9 (j + 1/2) / n) for
    j = 0, ..., n - 1; 0 and 1 complete them. What is above zero and may not be negative never becomes zero: an update that divides
    by the root of a second moment would explode.

    Args:
      x: floating, in [-1, 1], or [0, 1] if not `signed`.
      signed: whether there are negative numbers; then -1 is as near as 0.993.

    Returns:
      uint8, shaped as x, in the order of the numbers.

    Example:
      >>> x = jnp.array([-1.0, 0.0, 1e-6, 0.5, 1.0])
      >>> codes = encode(x, signed=True)
      >>> print(codes, decode(codes, jnp.dtype("float32"), signed=True).round(4))
      [  0 127 128 219 255] [-0.993   0.      0.      0.5008  1.    ]

    References:
      Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015, dynamic tree quantization; Dettmers, Lewis,
      Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2021, section 2.2; Li, Chen and Zhu, "Memory
      Efficient Optimizers with 4-bit States", 2023, section 4.1, on zero.
    """
    y, doubled = jnp.abs(x), 0 if signed else 1
    cells, start, unit = _spread(y, 1 << doubled), _spread(y, 1), _spread(y, 10.0**-6)
    for i in range(1, _DECADES):
        n, low = 1 << (i + doubled), 10.0 ** (i - 7)
        above = y >= low * (1 + 1.8 / n)  # half way between the last number of a decade and the first of the next
        cells, start = jnp.where(above, n, cells), jnp.where(above, n - (1 << doubled) + 1, start)
        unit = jnp.where(above, 10 * low, unit)
    position = jnp.floor((y / unit - 0.1) / 0.9 * cells)
    code = start + jnp.clip(position, 0, cells - 1)
    least, last = 1e-6 * (0.1 + 0.45 / (1 << doubled)), 1 - 0.45 / (1 << (_DECADES - 1 + doubled))
    code = jnp.where(y < least / 2, 0 if signed else jnp.where(y > 0, 1, 0), code)
    if not signed:
        return jnp.where(y >= (1 + last) / 2, 255, code).astype(jnp.uint8)
    code = jnp.where(x >= (1 + last) / 2, _ZERO + 1, jnp.where(x < 0, -code, code))
    return (_ZERO + code).astype(jnp.uint8)


def decode(codes: jax.Array, dtype: jnp.dtype, *, signed: bool) -> jax.Array:
    """Return the numbers that these codes stand for."""
    doubled = 0 if signed else 1
    c = codes.astype(jnp.int32) - (_ZERO if signed else 0)
    magnitude = jnp.abs(c).astype(dtype)
    cells, start, unit = (_spread(magnitude, value) for value in (1 << doubled, 1, 10.0**-6))
    for i in range(1, _DECADES):
        n = 1 << (i + doubled)
        above = magnitude >= n - (1 << doubled) + 1
        cells, start = jnp.where(above, n, cells), jnp.where(above, n - (1 << doubled) + 1, start)
        unit = jnp.where(above, 10.0 ** (i - 6), unit)
    y = unit * (0.1 + 0.9 * (magnitude - start + 0.5) / cells)
    y = jnp.where(magnitude == 0, 0, jnp.where(c == (_ZERO + 1 if signed else 255), 1, y)).astype(dtype)
    return jnp.where(c < 0, -y, y)


def _spread(like: jax.Array, value: float) -> jax.Array:
    return jnp.full_like(like, value)
