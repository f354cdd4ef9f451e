"""`RoundedWeight`: a weight that devices rounded to int8 before they gathered it, as one node of a pytree."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

LARGEST = 127
"""The largest number in int8; -128 is not used."""


class Rounding(NamedTuple):
    """How `so.nn.quantized_einsum` rounds a weight that nothing else reads.

    Attributes:
      dtype: the dtype that the model casts the weight to before it is rounded.
      summed: how many of its first dims the product sums over. The others count channels, and each channel has a scale.
      parts: the size of the first dim of channels if the result of the product begins with this dim, such as gate and up; else 1.
    """

    dtype: DTypeLike
    summed: int = 1
    parts: int = 1


class Form(NamedTuple):
    """How a weight is a matrix whose rows are shared out among devices.

    With K summed dims together, C parts and N channels of a part, the matrix is [K, C N], or [N, C K] by channel.

    Attributes:
      shape: the shape of the weight.
      rounding: how it is rounded.
      by_channel: whether rows are channels, and else summed.
    """

    shape: tuple[int, ...]
    rounding: Rounding
    by_channel: bool

    def matrix(self, weight: Array) -> Array:
        """Return a weight, or a shard of it, as a matrix, or the rows of a matrix."""
        summed, num_dims = self.rounding.summed, len(self.shape)
        if not self.by_channel:
            return weight.reshape(-1, math.prod(self.shape[summed:]))
        order = (num_dims - 1, *range(summed, num_dims - 1), *range(summed))
        return jnp.transpose(weight, order).reshape(weight.shape[-1], -1)

    def weight(self, matrix: Array) -> Array:
        """Return the weight, or a shard of it, from a matrix or rows of it."""
        summed, num_dims = self.rounding.summed, len(self.shape)
        if not self.by_channel:
            return matrix.reshape(-1, *self.shape[1:])
        rows = matrix.reshape(-1, *self.shape[summed:-1], *self.shape[:summed])
        return jnp.transpose(rows, (*range(num_dims - summed, num_dims), *range(1, num_dims - summed), 0))

    def round_rows(self, rows: Float[Array, "r S"], maximum: Any) -> tuple[Int8[Array, "r S"], Array]:
        """Return rows of the matrix rounded, and the scales of their channels: [1, S], or [r, C] by channel.

        Args:
          rows: the rows of this device.
          maximum: returns the maximum over the devices; called if a channel has rows of several devices.
        """
        wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
        if self.by_channel:
            wide = wide.reshape(len(rows), self.rounding.parts, -1)
            scale = jnp.max(jnp.abs(wide), axis=2, keepdims=True) / LARGEST
        else:
            scale = maximum(jnp.max(jnp.abs(wide), axis=0, keepdims=True)) / LARGEST
        numbers = jnp.round(wide * inverse(scale)).astype(jnp.int8)
        return numbers.reshape(rows.shape), scale.reshape(-1, self.rounding.parts) if self.by_channel else scale


def inverse(scale: Array) -> Array:
    """Return 1 / scale, or 0 for a scale of 0: one division for many numbers."""
    return jnp.where(scale == 0, 0, 1 / scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedWeight:
    """A weight in int8, as the matrix of a form.

    Attributes:
      numbers: the matrix.
      scale: the factors of its channels, [1, C N], or [N, C] by channel.
      zeros: a matrix of zeros for each part, [K, N], or [N, K] by channel. No product reads them. Their gradients are the
        gradients of the weight.
      form: how the matrix is the weight.
    """

    numbers: Int8[Array, "R S"]
    scale: Float[Array, "..."]
    zeros: tuple[Float[Array, "R S/C"], ...]
    form: Form = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, numbers: Array, scale: Array, dtype: DTypeLike, form: Form) -> "RoundedWeight":
        """Return the weight of gathered numbers and scales, for products in a dtype."""
        parts = form.rounding.parts
        zeros = jnp.zeros((len(numbers), numbers.shape[1] // parts), dtype)
        return cls(numbers, scale, (zeros,) * parts, form)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """The number of dims of the weight."""
        return len(self.form.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weight in a product."""
        return self.zeros[0].dtype

    def astype(self, dtype: DTypeLike) -> "RoundedWeight":
        """Return the weight for products in another dtype."""
        return dataclasses.replace(self, zeros=tuple(zeros.astype(dtype) for zeros in self.zeros))

    def unpacked(self) -> tuple[Int8[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
        """Return the numbers in the shape of the weight, the scales in the shape of its channels, and the zeros as a weight."""
        scale = self.scale.T if self.form.by_channel else self.scale
        channels = scale.reshape(self.shape[self.form.rounding.summed :])
        return self.form.weight(self.numbers), channels, self.form.weight(joined(self.zeros))


def joined(parts: Sequence[Array]) -> Array:
    """Return the matrix of its parts."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
