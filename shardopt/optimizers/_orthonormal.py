"""Orthonormal columns of batches of matrices; a sharded batch stays sharded."""

import jax
import jax.numpy as jnp


def orthonormal(x: jax.Array) -> jax.Array:
    """Return Q of X = Q R, for X [..., m, m] of full rank; the signs of columns are arbitrary.

    The method depends on the backend. TPU and GPU use `jnp.linalg.qr`, which XLA:TPU leaves sharded
    over its batch. On CPU that would be LAPACK, which spreads a batch over threads on which other
    simulated devices wait in collectives: with several simulated devices the step hangs. So CPU
    runs modified Gram-Schmidt twice. A single run loses more digits the worse X is conditioned.

    Example:
      >>> import jax.numpy as jnp
      >>> print(abs(orthonormal(jnp.array([[3.0, 1.0], [4.0, 7.0]]))).round(3))
      [[0.6 0.8]
       [0.8 0.6]]
    """
    return jax.lax.platform_dependent(
        x, cpu=lambda x: _gram_schmidt(_gram_schmidt(x)), default=lambda x: jnp.linalg.qr(x)[0]
    )


def _gram_schmidt(x: jax.Array) -> jax.Array:
    column_index = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)

    def normalize_column(j: jax.Array, x: jax.Array) -> jax.Array:
        v = jnp.sum(jnp.where(column_index == j, x, jnp.zeros_like(x)), -1, keepdims=True)
        v = v / jnp.sqrt(jnp.sum(jnp.square(v), -2, keepdims=True))
        projected = x - v * jnp.sum(v * x, -2, keepdims=True)
        return jnp.where(column_index > j, projected, jnp.where(column_index == j, v, x))

    return jax.lax.fori_loop(0, x.shape[-1], normalize_column, x)
