"""Inverse roots of batches of positive matrices, computed by matrix products alone.

XLA leaves the batch dims of products sharded, so no matrix moves to another device.
"""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
_LAST = 8
"""The number of iterations after the smallest eigenvalue is near 1, where each iteration squares
the error.
"""


def inverse_root(a: jax.Array, root: int, ridge: float | jax.Array) -> jax.Array:
    """Return (A + ridge |A| I)^(-1/root) of symmetric matrices A without negative eigenvalues.

    |A| is the Frobenius norm. For a matrix of zeros, the result is the inverse root of ridge I.

    Args:
      a: matrices [..., m, m] of a floating dtype, fp32 or wider.
      root: 2 or 4.
      ridge: the number added to the diagonal, as a fraction of |A|. It must be above the rounding
        of the dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> inverse_root(jnp.diag(jnp.array([16.0, 1.0])), 4, 1e-6).round(3).tolist()
      [[0.5, 0.0], [0.0, 1.0]]

    **Method**: coupled Newton iterations

        X <- X T,  M <- T^root M  with  T = ((root + 1) I - M) / root

    from X = z^(1/root) I and M = z A. They keep X^root = M A^-1, and M converges to I.

    The number of iterations depends only on the ridge, not on the matrices. So no device waits for
    a comparison across a batch. No device factorises: XLA:TPU would gather a sharded batch for
    `jnp.linalg.eigh`.

    References:
      Higham and Iannazzo in Higham, "Functions of Matrices", 2008, section 7.3, equation 7.14;
      Anil, Gupta, Koren, Regan and Singer, "Scalable Second Order Optimization for Deep Learning",
      2020, appendix.
    """
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    norm = jnp.sqrt(jnp.sum(jnp.square(a), (-2, -1), keepdims=True))
    norm = jnp.where(norm > 0, norm, jnp.ones_like(norm))
    ridge_array = jnp.asarray(ridge, a.dtype)
    scaled = a / norm + ridge_array * eye  # its eigenvalues are between the ridge and 1 + ridge
    z = (1 + root) / (2 * (1 + ridge_array))
    # An eigenvalue of M that is far from 1 grows by ((root + 1) / root)^root per iteration.
    num_iterations = (
        jnp.ceil(-jnp.log(ridge_array) / (root * jnp.log1p(1 / root))).astype(jnp.int32) + _LAST
    )

    def iterate(_, carry):
        x, m = carry
        t = ((root + 1) * eye - m) / root
        power = product(t, t) if root == 2 else product(product(t, t), product(t, t))
        return product(x, t), product(power, m)

    x, _ = jax.lax.fori_loop(0, num_iterations, iterate, (z ** (1 / root) * eye, z * scaled))
    return x * norm ** (-1 / root)


def product(a: jax.Array, b: jax.Array, *, flip_a: bool = False, flip_b: bool = False) -> jax.Array:
    """Return A B of batches of matrices [..., m, k] and [..., k, n].

    `flip_a` and `flip_b` transpose A and B first. `jnp.matmul` and `jnp.einsum` drop batch dims of
    length 1. The update of one block would then have other equations than the update of several,
    and `opt_state="matrices"` could not separate the blocks.
    """
    batch_dims = tuple(range(a.ndim - 2))
    contracted_dims = (a.ndim - (2 if flip_a else 1),), (b.ndim - (1 if flip_b else 2),)
    return jax.lax.dot_general(a, b, (contracted_dims, (batch_dims, batch_dims)), precision=HIGHEST)
