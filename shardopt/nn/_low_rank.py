"""`LowRank`: a weight plus a small product of two matrices, as one node of a pytree."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.core import format_error, wide_dtype
from shardopt.low_precision._weight import RoundedWeight
from shardopt.optimizers import Matrix

FACTORS = ("lora_a", "lora_b")
"""The names of A and B in key paths."""

_LETTERS = "ABCDEFGHIJKLMNOPQSTUVWXYZ"  # without R, the letter of the rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A weight W + scale A B. W is a stack of matrices, and each matrix has its own A and B.

    The order of dims in `lora_a` is: dims that count matrices, row dims, rank. In `lora_b` it is:
    dims that count matrices, rank, column dims. So A is sharded as the input of W, and B as its
    output.

    Attributes:
      base: W, an array, or its quantised form while it is stored.
      lora_a: A.
      lora_b: B.
      key: a random key for dropout; None drops nothing.
      matrix: the row and column dims of W, as negative numbers, so that a block and a stack of
        blocks have the same.
      scale: the factor of A B.
      dropout: the probability with which a component of the input of A is 0.

    References:
      Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, equation 3.
    """

    base: Any
    lora_a: Array
    lora_b: Array
    key: Array | None = None
    matrix: Matrix = dataclasses.field(default=Matrix(), metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of W."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """The number of dims of W."""
        return len(self.base.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of W."""
        return self.base.dtype

    def astype(self, dtype: Any) -> "LowRank":
        """Return the node with W, A and B in another dtype."""
        weights = (weight.astype(dtype) for weight in (self.base, self.lora_a, self.lora_b))
        return dataclasses.replace(
            self, **dict(zip(("base", "lora_a", "lora_b"), weights, strict=True))
        )

    def merged(self) -> Float[Array, "..."]:
        """Return W + scale A B as an array, in the dtype of W.

        Raises:
          ValueError: if the node has a key for dropout.
        """
        if self.key is not None and self.dropout:
            problem = "dropout acts on the input of A, which a merged weight does not have."
            fix = (
                "leave dropout out; or set low_rank_products=True, and target weights that blocks"
                " multiply by so.nn.quantized_einsum."
            )
            raise ValueError(format_error("lora", problem, fix=fix))
        weight = _LETTERS[: self.ndim]
        first, second = self._factor_letters(weight)
        wide = wide_dtype(self.lora_a.dtype)
        update = jnp.einsum(
            f"{first},{second}->{weight}", self.lora_a, self.lora_b, preferred_element_type=wide
        )
        return (self.base + self.scale * update).astype(self.base.dtype)

    def einsum(self, x: Float[Array, "..."], letters: tuple[str, str, str]) -> Float[Array, "..."]:
        """Return the product of x with scale A B; x is multiplied by one factor, then by the other.

        Args:
          x: activations.
          letters: the letters of x, weight and result, as in `jnp.einsum`.
        """
        x_letters, weight, out = letters
        factors = list(zip((self.lora_a, self.lora_b), self._factor_letters(weight), strict=True))
        summed = set(x_letters) & set(weight)
        if not summed <= set(factors[0][1]):  # the product sums over columns, as x W^T does
            factors.reverse()
        (near, near_letters), (far, far_letters) = factors
        middle = "".join(
            letter
            for letter in dict.fromkeys(x_letters + near_letters)
            if letter in out + far_letters
        )
        if self.key is not None and self.dropout:
            mask = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
            x = jnp.where(mask, x / (1 - self.dropout), 0).astype(x.dtype)
        near_product = jnp.einsum(f"{x_letters},{near_letters}->{middle}", x, near)
        return self.scale * jnp.einsum(f"{middle},{far_letters}->{out}", near_product, far)

    def _factor_letters(self, weight: str) -> tuple[str, str]:
        counting, rows, columns = (
            "".join(weight[dim] for dim in dims) for dims in self.matrix.order(len(weight))
        )
        return f"{counting}{rows}R", f"{counting}R{columns}"


Weight = Array | LowRank | RoundedWeight
"""A weight of a model: an array, with an adapter, or rounded to 8 bits."""
Weights = Mapping[str, Any]
"""The weights of a part of a block by name."""


def as_array(weight: Any) -> Any:
    """Return a weight as an array: W + scale A B of a `LowRank`, any other weight as it is."""
    return weight.merged() if isinstance(weight, LowRank) else weight


def low_rank_shapes(
    shape: tuple[int, ...], matrix: Matrix, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A and B for a weight."""
    counting, rows, columns = ([shape[dim] for dim in dims] for dims in matrix.order(len(shape)))
    return (*counting, *rows, rank), (*counting, rank, *columns)
