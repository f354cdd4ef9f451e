"""Ids of tokens: integers on a device, where those out of range stay out of range."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from shardopt.core import format_error

IGNORED = -100
"""The target that no loss counts, as in torch and transformers."""


def integers(
    caller: str, name: str, ids: ArrayLike, shapes: dict[str, tuple[int, ...]] | None = None
) -> jax.Array | np.ndarray:
    """Return ids as an array of integers, of one of the shapes.

    Args:
      caller: the function that the user called.
      name: the name of the ids, as "targets".
      ids: an array, a list or a number.
      shapes: the dims, as "[B, T]", with their sizes; None is any shape.

    Raises:
      TypeError: if they are not integers.
      ValueError: if they have another shape.
    """
    array = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{caller}: {name} must be integers, got {array.dtype}.")
    if shapes is not None and array.shape not in shapes.values():
        expected = " or ".join(f"{dims} = {shape}" for dims, shape in shapes.items())
        problem = f"{name} have shape {array.shape}."
        raise ValueError(format_error(caller, problem, fix=f"give {expected}."))
    return array


def as_int32(ids: jax.Array | np.ndarray) -> jax.Array:
    """Return ids as int32; an id beyond int32 becomes the nearest int32, and never wraps.

    A cast would make 2^32 - 100 the target that is ignored, and 2^32 + 1 the token 1.
    """
    limits = jnp.iinfo(jnp.int32)
    dtype_limits = jnp.iinfo(ids.dtype)
    if dtype_limits.max > limits.max:
        library = np if isinstance(ids, np.ndarray) else jnp
        ids = library.clip(ids, max(limits.min, dtype_limits.min), limits.max)
    return jnp.asarray(ids, jnp.int32)
