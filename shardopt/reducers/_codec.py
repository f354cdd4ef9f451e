"""`Codec`: how rows of numbers are written in few bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np


class Codec(NamedTuple):
    """Functions that encode rows of numbers in few bytes.

    Attributes:
      padded_length: `padded_length(n)`: the length of a chunk of n elements after padding.
      encode: `encode(rows, valid) -> parts`: rows [R, C] to arrays [R, k]; `valid` [R, C] is False
        for padding.
      decode: `decode(parts, length, dtype) -> rows`.
      nbytes: `nbytes(length, dtype)`: the bytes of one encoded row.
    """

    padded_length: Callable[[int], int]
    encode: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]
    decode: Callable[[Sequence[jax.Array], int, np.dtype], jax.Array]
    nbytes: Callable[[int, np.dtype], int]
