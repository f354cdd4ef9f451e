"""Ids of tokens: integers on a device, where those out of range stay out of range."""

import jax
import jax.numpy as jnp
import numpy as np

IGNORED = -100
"""The target that no loss counts, as in torch and transformers."""


def as_int32(ids: jax.Array | np.ndarray) -> jax.Array:
    """Return ids as int32; an id beyond int32 becomes the nearest int32, and never wraps.

    A cast would make 2^32 - 100 the target that is ignored, and 2^32 + 1 the token 1.
    """
    limits, dtype_limits = jnp.iinfo(jnp.int32), jnp.iinfo(ids.dtype)
    if dtype_limits.max > limits.max:
        library = np if isinstance(ids, np.ndarray) else jnp
        ids = library.clip(ids, max(limits.min, dtype_limits.min), limits.max)
    return jnp.asarray(ids, jnp.int32)
