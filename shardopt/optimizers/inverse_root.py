"""Inverse roots of batches of positive matrices by products alone, so that a batch that is sharded stays where it is."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
_LAST = 8
"""Iterations once the smallest eigenvalue is near 1: there errors are squared each time."""


def inverse_root(a: jax.Array, root: int, ridge: float | jax.Array) -> jax.Array:
    """Return (A + ridge |A| I)^(-1/root) of symmetric matrices A without negative eigenvalues, |A| the Frobenius norm.

    Coupled Newton iterations, as many as the ridge asks for whatever the matrices are: nothing is compared across a batch,
    so no device waits for another, and none factorises (`jnp.linalg.eigh` of a sharded batch is gathered by XLA:TPU). Of
    a matrix of zeros it is the root of ridge I.

        X <- X T,  M <- T^root M  with  T = ((root + 1) I - M) / root

    from X = z^(1/root) I and M = z A keep X^root = M A^-1, and M goes to I.

    Args:
      a: [..., m, m], floating, fp32 at least.
      root: 2 or 4.
      ridge: what is added to the diagonal, as a share of |A|, above the rounding of the dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> inverse_root(jnp.diag(jnp.array([16.0, 1.0])), 4, 1e-6).round(3).tolist()
      [[0.5, 0.0], [0.0, 1.0]]

    References:
      Higham and Iannazzo in Higham, "Functions of Matrices", 2008, section 7.3, equation 7.14; Anil, Gupta, Koren, Regan and
      Singer, "Scalable Second Order Optimization for Deep Learning", 2020, appendix.
    """
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    norm = jnp.sqrt(jnp.sum(jnp.square(a), (-2, -1), keepdims=True))
    norm = jnp.where(norm > 0, norm, jnp.ones_like(norm))
    share = jnp.asarray(ridge, a.dtype)
    scaled = a / norm + share * eye  # eigenvalues between the ridge and 1 + ridge
    z = (1 + root) / (2 * (1 + share))
    # Far from 1 an eigenvalue of M grows by ((root + 1) / root)^root an iteration.
    count = jnp.ceil(-jnp.log(share) / (root * jnp.log1p(1 / root))).astype(jnp.int32) + _LAST

    def iterate(_, found):
        x, m = found
        t = ((root + 1) * eye - m) / root
        power = product(t, t) if root == 2 else product(product(t, t), product(t, t))
        return product(x, t), product(power, m)

    x, _ = jax.lax.fori_loop(0, count, iterate, (z ** (1 / root) * eye, z * scaled))
    return x * norm ** (-1 / root)


def product(a: jax.Array, b: jax.Array, *, flip_a: bool = False, flip_b: bool = False) -> jax.Array:
    """Return A B of batches of matrices [..., m, k] and [..., k, n], either transposed first if asked.

    `jnp.matmul` and `jnp.einsum` drop batch dims of length 1, so that an update of one block would have other equations than
    that of several, and `opt_state_layout="matrices"` could not part them.
    """
    batch = tuple(range(a.ndim - 2))
    sums = (a.ndim - (2 if flip_a else 1),), (b.ndim - (1 if flip_b else 2),)
    return jax.lax.dot_general(a, b, (sums, (batch, batch)), precision=HIGHEST)
