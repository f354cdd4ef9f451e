"""What XLA:CPU needs to be told: this file alone asks whether a layer runs there."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.kernels._devices import is_local
from shardopt.low_precision._einsum import parse_subscripts
from shardopt.mesh import device_kind, device_kind_or_default, is_analysed


def runs_on_cpu() -> bool:
    """Return whether the program under trace is for a CPU, and one device holds each array whole.

    An analysis sees the plain form of a layer.
    """
    return device_kind_or_default() == "cpu" and is_local() and not is_analysed()


def queries_at_a_time(length: int) -> int:
    """Return how many queries of a causal row attend together: on CPU 64, or a 16th of the row.

    Their scores stay in the cache, and scores that the mask hides are not computed.
    """
    return max(64, math.ceil(length / 16)) if runs_on_cpu() else length


def takes_matrices(subscripts: str) -> bool:
    """Return whether a product runs as `product_of_matrices`: under the mesh of a strategy on CPU,
    if it multiplies rows of tokens by a matrix, and all dims are in order.

    A strategy differentiates in reverse. Elsewhere a user may differentiate forward, as for a
    product with the Hessian, and `custom_vjp` refuses that.
    """
    if not (runs_on_cpu() and device_kind() == "cpu"):
        return False
    of_x, of_weight, out = parse_subscripts(subscripts)
    tokens = out[:2]
    return of_x.startswith(tokens) and of_x[2:] + out[2:] == of_weight


def _product_of_matrices(
    num_summed: int, x: Float[Array, "B T ..."], weight: Float[Array, "..."]
) -> Float[Array, "B T ..."]:
    """Return the product of tokens with a weight, whose first dims are summed, by two-dimensional
    weights and gradients.

    XLA:CPU copies a weight of more dims in the backward pass. It also copies the gradient of a
    weight, because jax computes its transpose.
    """
    rows, matrix = _rows(x), _matrix(num_summed, weight)
    product = jnp.einsum("btd,df->btf", rows, matrix)
    return product.reshape(*x.shape[:2], *weight.shape[num_summed:])


product_of_matrices = jax.custom_vjp(_product_of_matrices, nondiff_argnums=(0,))


def _rows(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)


def _matrix(num_summed: int, weight: Array) -> Array:
    return weight.reshape(math.prod(weight.shape[:num_summed]), -1)


def _with_residuals(num_summed: int, x: Array, weight: Array) -> Any:
    # the weight as it is: a scan would stack its reshaped copies
    return product_of_matrices(num_summed, x, weight), (x, weight)


def _gradients(num_summed: int, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = residuals
    dy = _rows(grad)
    dx = jnp.einsum("btf,df->btd", dy, _matrix(num_summed, weight))
    dw = jnp.einsum("btd,btf->df", _rows(x), dy)
    return dx.reshape(x.shape).astype(x.dtype), dw.reshape(weight.shape).astype(weight.dtype)


product_of_matrices.defvjp(_with_residuals, _gradients)
