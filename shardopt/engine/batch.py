"""Checking a batch and putting its rows where they are needed."""

import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, is_array_like, leaves_with_paths
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import batch_spec
from shardopt.mesh import data_axes


def batch_sharding(recipe: StrategyConfig) -> NamedSharding:
    """Return how every batch leaf [global batch, ...] is placed: rows over replica and data."""
    return NamedSharding(recipe.mesh, batch_spec(recipe))


def check_batch(recipe: StrategyConfig, batch: PyTree) -> None:
    """Refuse a batch that cannot be cut into devices and micro-batches.

    Raises:
      TypeError: if a leaf is not an array.
      ValueError: if there is no leaf, a leaf has no dims, sizes differ, or the size is not divisible by
        replica * data * micro_batches.
    """
    leaves = leaves_with_paths(batch)
    if strange := [f"{path}: {type(leaf).__name__}" for path, leaf in leaves if not is_array_like(leaf)]:
        raise TypeError(format_error(recipe.who, "batch leaves must be arrays [global batch, ...].", strange))
    sizes = {leaf.shape[0] if leaf.shape else None for _, leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        listed = [f"{path or 'batch'}: shape {leaf.shape}" for path, leaf in leaves]
        what = "batch leaves must share their first dim, the global batch."
        raise ValueError(format_error(recipe.who, what, listed, "give every leaf the shape [global batch, ...]."))
    size = leaves[0][1].shape[0]
    axes, micro_batches = data_axes(recipe.mesh), recipe.micro_batches
    devices = math.prod(recipe.mesh.shape[axis] for axis in axes)
    pieces = devices * micro_batches
    if size == 0 or size % pieces:
        cut = f"{plural(devices, 'device')} along {' x '.join(axes)}"
        if micro_batches > 1:
            cut += f" x {micro_batches} micro-batches"
        nearest = sorted({max(size // pieces, 1) * pieces, (size // pieces + 1) * pieces})
        what = f"a global batch of {size} is not divisible by {cut} = {pieces}."
        fix = f"use a batch of {' or '.join(map(str, nearest))}, or another mesh or micro_batches."
        raise ValueError(format_error(recipe.who, what, fix=fix))


def place_batch(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """Put each leaf's rows on the devices that need them; leaves already placed so are returned as they are.

    A numpy leaf holds the whole global batch on every process; only rows for local devices are copied.
    """

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and (leaf.sharding == sharding or not leaf.is_fully_addressable):
            return leaf
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        rows = np.asarray(leaf)
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    return jax.tree.map(place, batch)
