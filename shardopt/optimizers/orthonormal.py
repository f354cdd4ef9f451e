"""Orthonormal columns of batches of matrices, so that a batch that is sharded stays where it is."""

import jax
import jax.numpy as jnp


def orthonormal(x: jax.Array) -> jax.Array:
    """Return Q of X = Q R, for X [..., m, m] of full rank; columns may come with either sign.

    `jnp.linalg.qr`, which XLA:TPU leaves sharded over its batch. Not on CPU: there it is LAPACK, which shares out a batch to the
    threads on which other devices wait in collectives, and with several simulated devices the step hangs. So there it is
    Gram and Schmidt's, modified, and twice, since once loses as many digits as X is ill-conditioned.

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
    which = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)

    def column(j: jax.Array, x: jax.Array) -> jax.Array:
        v = jnp.sum(jnp.where(which == j, x, jnp.zeros_like(x)), -1, keepdims=True)
        v = v / jnp.sqrt(jnp.sum(jnp.square(v), -2, keepdims=True))
        rest = x - v * jnp.sum(v * x, -2, keepdims=True)
        return jnp.where(which > j, rest, jnp.where(which == j, v, x))

    return jax.lax.fori_loop(0, x.shape[-1], column, x)
