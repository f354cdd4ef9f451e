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
      >>> abs(orthonormal(jnp.array([[3.0, 1.0], [4.0, 7.0]]))).round(3).tolist()
      [[0.6, 0.8], [0.8, 0.6]]
    """
    return jax.lax.platform_dependent(
        x, cpu=lambda x: _gram_schmidt(_gram_schmidt(x)), default=lambda x: jnp.linalg.qr(x)[0]
    )


def _gram_schmidt(x: jax.Array) -> jax.Array:
    later = jnp.arange(x.shape[-1])

    def column(j: jax.Array, x: jax.Array) -> jax.Array:
        v = jax.lax.dynamic_index_in_dim(x, j, -1)
        v = v / jnp.sqrt(jnp.sum(jnp.square(v), -2, keepdims=True))
        shares = jnp.sum(v * x, -2, keepdims=True)
        shares = jnp.where(jnp.broadcast_to(later > j, shares.shape), shares, jnp.zeros_like(shares))
        return jax.lax.dynamic_update_slice_in_dim(x - v * shares, v, j, x.ndim - 1)

    return jax.lax.fori_loop(0, x.shape[-1], column, x)
