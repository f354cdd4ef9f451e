"""Which dims of a batch are split: its rows over the axes of rows, positions of its sequences over the context axis."""

import re

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, leaves_with_paths, path_text
from shardopt.engine.config import StrategyConfig


def sequence_dim(config: StrategyConfig, path: str, ndim: int) -> int | None:
    """Return the dim of a batch leaf that counts positions; None if it has none, or nothing splits positions.

    Args:
      config: whose `sequence_dims` may name the leaf; else it is dim 1, of leaves with two dims or more.
      path: the key path of the leaf.
      ndim: its number of dims.
    """
    if not config.axes.positions:
        return None
    default = 1 if ndim > 1 else None
    return next((dim for pattern, dim in config.sequence_dims if re.search(pattern, path)), default)


def batch_specs(
    config: StrategyConfig,
    batch: PyTree,
    *,
    rows: tuple[str, ...] | None = None,
    leading: tuple[str | None, ...] = (),
) -> PyTree:
    """Return how batch leaves [rows, ...] are placed, as `PartitionSpec`; numbers that all rows share are on all devices.

    Args:
      config: whose axes they are placed on.
      batch: the batch.
      rows: the axes that split rows; by default all that do.
      leading: entries for dims in front of the rows, which the leaves are to get.
    """
    rows = config.axes.rows if rows is None else rows

    def one(path: jax.tree_util.KeyPath, leaf: PyTree) -> PartitionSpec:
        if not np.ndim(leaf):
            return PartitionSpec()
        dim = sequence_dim(config, path_text(path), np.ndim(leaf))
        between = () if dim is None else (*[None] * (dim - 1), config.axes.positions)
        return PartitionSpec(*leading, rows, *between)

    return jax.tree_util.tree_map_with_path(one, batch)


def lengths(config: StrategyConfig, batch: PyTree) -> frozenset[int]:
    """Return how many positions the sequences of a batch have."""
    found = ((leaf, sequence_dim(config, path, np.ndim(leaf))) for path, leaf in leaves_with_paths(batch))
    return frozenset(leaf.shape[dim] for leaf, dim in found if dim is not None)


def resized(config: StrategyConfig, batch: PyTree, *, rows: int, position_shares: int = 1) -> PyTree:
    """Return the shapes of a batch of other rows, and of sequences cut into shares."""

    def one(path: jax.tree_util.KeyPath, leaf: PyTree) -> jax.ShapeDtypeStruct:
        shape = [rows, *leaf.shape[1:]] if leaf.ndim else []
        if leaf.ndim and (dim := sequence_dim(config, path_text(path), leaf.ndim)) is not None:
            shape[dim] //= position_shares
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, batch)


def check_positions(config: StrategyConfig, batch: PyTree) -> None:
    """Refuse a batch whose sequences cannot be cut over the context axis.

    Raises:
      ValueError: if `sequence_dims` name a dim that a leaf does not have, or its rows; no leaf has positions; or their
        number is not divisible by context.
    """
    shares = config.axes.num_position_shares
    if shares == 1:
        return
    missing, uneven, lengths = [], [], set()
    for path, leaf in leaves_with_paths(batch):
        shown, dim = f"{path or 'batch'}: shape {np.shape(leaf)}", sequence_dim(config, path, np.ndim(leaf))
        if dim is None:
            continue
        if not 0 < dim < np.ndim(leaf):
            missing.append(f"{shown}; no dim {dim} for positions")
        else:
            lengths.add(leaf.shape[dim])
            if leaf.shape[dim] % shares:
                uneven.append(f"{shown}; dim {dim} is {leaf.shape[dim]}, remainder {leaf.shape[dim] % shares}")
    axis = f"mesh axis 'context' (size {shares})"
    if missing:
        fix = "name a dim of 1 or more that the leaf has, or None."
        raise ValueError(format_error(config.strategy, "sequence_dims do not fit the batch.", missing, fix))
    if not lengths:
        what = f"{axis} splits positions, and no batch leaf has any."
        raise ValueError(
            format_error(
                config.strategy,
                what,
                fix="make the mesh with context=1, or name the dim of positions in sequence_dims.",
            )
        )
    if uneven:
        what = f"{plural(len(uneven), 'batch leaf')} cannot be split over {axis}."
        fix = (
            "use a length that it divides, with inputs and targets [B, T] each rather than tokens [B, T + 1]; or "
            "sequence_dims=[(regex, None)] for leaves without positions."
        )
        raise ValueError(format_error(config.strategy, what, uneven, fix))
