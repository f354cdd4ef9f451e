"""Frozen weights in 8 or 4 bits, which are turned into floats where they are used."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Base = Literal["float", "int8", "nf4"]

BLOCK = 64
"""The most weights that share a scale in nf4, along the last dim."""

# fmt: off
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on
"""The 16 values of NormalFloat4: quantiles of a normal distribution (Dettmers et al., 2023,
appendix E).
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight of n numbers in 8 or 4 bits, and one scale for each group of neighbours along the
    last dim.

    Attributes:
      codes: int8, or uint8 with two codes of 4 bits each; as W, but for nf4 the last dim is half as
        long.
      scales: float32; as W, but the last dim counts groups.
      dtype: the dtype of W as a float.
    """

    codes: Array
    scales: Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of W."""
        *dims, last = self.codes.shape
        return (*dims, last * (2 if self.codes.dtype == jnp.uint8 else 1))

    def dequantized(self) -> Float[Array, "..."]:
        """Return W as floats."""
        codes = self.codes
        if codes.dtype == jnp.uint8:
            pairs = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(self.shape)
            values = jnp.asarray(NF4)[pairs]
        else:
            values = codes.astype(jnp.float32)
        groups = values.reshape(*self.scales.shape, -1) * self.scales[..., None]
        return groups.reshape(self.shape).astype(self.dtype)


def quantize(weight: Array, base: Base) -> Array | QuantizedWeight:
    """Return a weight in the form of `base`: an array, or a `QuantizedWeight`.

    int8 has one scale for each vector along the last dim. nf4 has one scale for each 64 numbers of
    the last dim. If 64 does not divide it, groups are as large as the largest power of two that
    does.
    """
    if base == "float":
        return weight
    last = weight.shape[-1]
    group = last if base == "int8" else min(BLOCK, last & -last)
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], last // group, group)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    divisor = jnp.where(largest == 0, 1, largest)
    if base == "int8":
        codes = jnp.round(groups / divisor[..., None] * 127).astype(jnp.int8).reshape(weight.shape)
        return QuantizedWeight(codes, divisor / 127, weight.dtype)
    middles = (NF4[1:] + NF4[:-1]) / 2
    indices = jnp.searchsorted(jnp.asarray(middles), groups / divisor[..., None]).astype(jnp.uint8)
    pairs = indices.reshape(*weight.shape[:-1], last // 2, 2)
    return QuantizedWeight((pairs[..., 0] << 4) | pairs[..., 1], divisor, weight.dtype)
