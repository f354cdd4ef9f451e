"""Which parameter leaves are trained: the floating ones. The rest stay as they are."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import complaint, plural
from shardopt.core.types import PyTree, TrainState, abstract, is_array_like
from shardopt.partition.paths import leaves_with_paths


def trained(params: PyTree) -> PyTree:
    """Return the parameters with None in place of the leaves that are not trained."""
    return jax.tree.map(lambda leaf: leaf if _is_trained(leaf) else None, params)


def merge(params: PyTree, new: PyTree) -> PyTree:
    """Return the parameters with their trained leaves replaced by those of `new`."""
    values = iter(jax.tree.leaves(new))
    return jax.tree.map(lambda leaf: next(values) if _is_trained(leaf) else leaf, params)


def check_params(who: str, params: Any) -> None:
    """Refuse what is no pytree of arrays with something to train in it.

    Raises:
      TypeError: if it is a train state, or a leaf is not an array or a number.
      ValueError: if no leaf is floating.
    """
    if isinstance(params, TrainState):
        raise TypeError(complaint(who, "parameters were expected, got a TrainState.", fix="pass its .params."))
    leaves = leaves_with_paths(params)
    strange = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves
        if not (is_array_like(leaf) or isinstance(leaf, int | float)) or isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if strange:
        raise TypeError(complaint(who, "parameters must be a pytree of arrays.", strange, "pass arrays with values."))
    if not any(_is_trained(leaf) for leaf in jax.tree.leaves(abstract(params))):
        what = f"nothing is trainable among {plural(len(leaves), 'parameter leaf')}."
        raise ValueError(complaint(who, what, fix="pass floating leaves."))


def digest(params: PyTree) -> str:
    """Return a checksum of names, shapes, dtypes and bits, which tells two sets of parameters apart."""
    total = 0
    for path, leaf in leaves_with_paths(params):
        if is_array_like(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            leaf = jax.random.key_data(leaf)
        value = np.ascontiguousarray(jax.device_get(leaf))
        total = zlib.crc32(f"{path}:{value.dtype}{list(np.shape(leaf))}".encode(), total)
        total = zlib.crc32(value.view(np.uint8).data if value.ndim else value.tobytes(), total)
    return f"{total:08x}"


def _is_trained(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
