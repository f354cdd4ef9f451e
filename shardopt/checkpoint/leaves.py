"""One leaf: what is recorded of it, and how typed random keys are kept as plain integers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardopt.checkpoint.paths import leaves_by_path, show
from shardopt.core.errors import complaint
from shardopt.core.types import is_array_like


class Leaf(NamedTuple):
    """What is recorded of a leaf: its logical shape, and its dtype, "key<threefry2x32>" for typed random keys."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def describe(leaf: Any) -> Leaf:
    """Return the record of a concrete or abstract leaf."""
    if not _is_key(leaf):
        return Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name)
    # key_impl wants an array, and takes a traced one: so abstract keys can be asked as well.
    seen: list[Any] = []
    jax.eval_shape(lambda key: seen.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return Leaf(tuple(leaf.shape), f"key<{seen[0]}>")


def dtype_of(leaf: Leaf) -> Any:
    """Return the dtype that a record speaks of.

    Raises:
      ValueError: if it is not one that an array on a device can have.
    """
    if implementation := _implementation(leaf):
        return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError as error:
        raise ValueError(f"unknown dtype {leaf.dtype!r}") from error
    if dtype.kind not in "biufcV" or dtype.hasobject or dtype.name != leaf.dtype or dtype.itemsize == 0:
        raise ValueError(f"dtype {leaf.dtype!r} is not one of an array")
    return dtype


def plain(leaf: Any) -> Any:
    """Return what is stored of an array, concrete or abstract: the integers of a typed key, else itself."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):  # the spec speaks of the leading dims, the integers of a key follow
            sharding = NamedSharding(sharding.mesh, sharding.spec)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return jax.random.key_data(leaf)


def unplain(data: Any, leaf: Leaf) -> Any:
    """Return the array whose stored form is `data`."""
    implementation = _implementation(leaf)
    return jax.random.wrap_key_data(data, impl=implementation) if implementation else data


def place(target: jax.ShapeDtypeStruct, read: Callable[[Any], np.ndarray]) -> jax.Array:
    """Return a global array with the target's sharding, from `read(index)` for each shard held here."""
    # Copied, because a CPU array may otherwise live on in memory that belongs to the caller.
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: np.array(read(index)))


def check_leaves(who: str, tree: Any) -> None:
    """Refuse leaves that cannot be stored.

    Raises:
      TypeError: if a leaf is not an array.
      ValueError: if an array was donated to a step, and so deleted.
    """
    leaves = leaves_by_path(tree)
    if strange := [f"{show(path)}: {type(leaf).__name__}" for path, leaf in leaves.items() if not is_array_like(leaf)]:
        fix = "make them arrays (jnp.asarray), or keep them out of the state."
        raise TypeError(complaint(who, "the state must be a pytree of arrays.", strange, fix=fix))
    gone = [show(path) for path, leaf in leaves.items() if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if gone:
        fix = "use the state that the last step returned: a step takes over the buffers of the state it is given."
        raise ValueError(complaint(who, "these arrays of the state were deleted, probably donated.", gone, fix=fix))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _implementation(leaf: Leaf) -> str:
    return leaf.dtype[4:-1] if leaf.dtype.startswith("key<") and leaf.dtype.endswith(">") else ""
