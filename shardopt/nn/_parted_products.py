"""Products with the parts of one weight, such as gate and up, whose gradients are single products.

Suffixes: B sequences, T positions, D width.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.low_precision._einsum import parse_subscripts
from shardopt.nn._memory_layout import split_parts


class Parts(NamedTuple):
    """How a weight is parted for products of their own.

    Attributes:
      part_product: the einsum formula of the product with a part.
      weight_product: the einsum formula of the product with the whole weight.
      letter: of `weight_product`: the dim that is parted. If `part_product` does not have it, each
        of its indices is a part.
      number: of parts.
    """

    part_product: str
    weight_product: str
    letter: str
    number: int

    def of(self, weight: Array) -> list[Array]:
        """Return the parts of a weight."""
        dim = parse_subscripts(self.weight_product)[1].index(self.letter)
        return (
            split_parts(weight, dim)
            if self.are_indices
            else jnp.split(weight, self.number, axis=dim)
        )

    def joined(self, grads: list[Array]) -> Array:
        """Return the gradient of the whole product."""
        dim = parse_subscripts(self.weight_product)[2].index(self.letter)
        return jnp.stack(grads, axis=dim) if self.are_indices else jnp.concatenate(grads, axis=dim)

    @property
    def are_indices(self) -> bool:
        """Whether each index of the parted dim is a part."""
        return self.letter not in self.part_product


def products_with_parts(parts: Parts, x: Float[Array, "B T D"], weight: Array) -> list[Array]:
    """Return the product with each part of a weight.

    The gradients are single products with the whole weight.

    XLA:TPU may copy a single product that is kept, to read its parts in the backward pass. The copy
    takes 0.9 of the 54 ms of a block of Llama 3 70B (v5p:8x8x8, 4096 tokens a chip).
    """
    return cast(list[Array], _products_with_parts(parts, x, weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products_with_parts(parts: Parts, x: Array, weight: Array) -> list[Array]:
    return [jnp.einsum(parts.part_product, x, part) for part in parts.of(weight)]


def _parts_with_residuals(parts: Parts, x: Array, weight: Array) -> Any:
    return _products_with_parts(parts, x, weight), (x, weight)


def _gradients_of_parts(
    parts: Parts, residuals: tuple[Array, Array], grads: list[Array]
) -> tuple[Array, Array]:
    (of_x, of_weight, out), (x, weight) = parse_subscripts(parts.weight_product), residuals
    grad = parts.joined(grads)
    dx = jnp.einsum(f"{out},{of_weight}->{of_x}", grad, weight)
    dw = jnp.einsum(f"{of_x},{out}->{of_weight}", x, grad)
    return dx.astype(x.dtype), dw.astype(weight.dtype)


_products_with_parts.defvjp(_parts_with_residuals, _gradients_of_parts)
