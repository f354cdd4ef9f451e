"""Which dims of a batch are split: rows over the axes of rows, positions of sequences over the
context axis.
"""

import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._options import BatchDims, LeafDims
from shardopt.core import Arrays, PyTree, format_error, leaves_with_paths, path_text, plural
from shardopt.mesh import size_along
from shardopt.partition._divisible import not_divided

FIX_ROWS = (
    "name the dim of rows of a leaf, or None if all rows share it: batch_dims=[(regex, dim or"
    " None)]"
)
"""The remedy if leaves do not agree on a number of rows, for messages."""

CutBatch = tuple[Arrays, Callable[[Sequence[jax.Array]], PyTree]]
"""The leaves with rows as pieces [pieces, ...], and a function that assembles a batch of one piece."""


def row_dim(config: StrategyConfig, path: str, ndim: int) -> int | None:
    """Return the dim of a batch leaf that counts rows.

    None if the leaf has no rows, so that all rows share it.

    Args:
      config: its `batch_dims` may name the leaf; otherwise dim 0 counts rows.
      path: the key path of the leaf.
      ndim: its number of dims.
    """
    return row_dim_by_rules(config.batch_dims, path, ndim)


def row_dims(config: StrategyConfig, batch: PyTree) -> list[int | None]:
    """Return the `row_dim` of each leaf of a batch."""
    return [row_dim(config, path, np.ndim(leaf)) for path, leaf in leaves_with_paths(batch)]


def row_dim_by_rules(batch_dims: BatchDims, path: str, ndim: int) -> int | None:
    """Return the dim of a batch leaf that counts rows, see `row_dim`."""
    if not ndim:
        return None
    dims = _dims(batch_dims, path)
    return dims[0] if isinstance(dims, tuple) else dims


def sequence_dim(config: StrategyConfig, path: str, ndim: int) -> int | None:
    """Return the dim of a batch leaf that counts positions.

    None if it has none, or no axis splits positions.

    Args:
      config: its `batch_dims` may name the dim; otherwise it is the first dim that does not count
        rows.
      path: the key path of the leaf.
      ndim: its number of dims.
    """
    if not config.axes.positions:
        return None
    dims = _dims(config.batch_dims, path)
    if isinstance(dims, tuple):
        return dims[1]
    return None if dims is None or ndim < 2 else int(dims == 0)


def _dims(batch_dims: BatchDims, path: str) -> LeafDims:
    """Return the dims that `batch_dims` give a leaf: by default dim 0 counts rows."""
    return next((dims for pattern, dims in batch_dims if re.search(pattern, path)), 0)


def map_rows(
    config: StrategyConfig, change: Callable[[PyTree, int], PyTree], batch: PyTree
) -> PyTree:
    """Return the batch with `change(leaf, row_dim)` in place of each leaf that has rows."""

    def change_leaf(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        dim = row_dim(config, path_text(path), np.ndim(leaf))
        return leaf if dim is None else change(leaf, dim)

    return jax.tree_util.tree_map_with_path(change_leaf, batch)


def cut_batch(
    config: StrategyConfig, cut: Callable[[jax.Array, str, int], jax.Array], batch: PyTree
) -> CutBatch:
    """Return the leaves with rows cut into pieces [pieces, ...], and a function that assembles a
    batch.

    The function takes one piece of each leaf with rows. The batch holds every leaf that rows share
    in full, without a copy.

    Args:
      config: its `batch_dims` may name leaves.
      cut: `cut(leaf, key path, row_dim)`, which returns the pieces of a leaf.
      batch: the batch.
    """
    leaves = leaves_with_paths(batch)
    treedef = jax.tree.structure(batch)
    dims = row_dims(config, batch)

    def assemble(parts: Sequence[jax.Array]) -> PyTree:
        remaining_parts = iter(parts)
        leaves_and_dims = zip(leaves, dims, strict=True)
        return treedef.unflatten(
            [leaf if dim is None else next(remaining_parts) for (_, leaf), dim in leaves_and_dims]
        )

    return [
        cut(leaf, path, dim)
        for (path, leaf), dim in zip(leaves, dims, strict=True)
        if dim is not None
    ], assemble


def row_counts(config: StrategyConfig, batch: PyTree) -> frozenset[int]:
    """Return the numbers of rows that the leaves of a batch have: a single number if they agree."""
    if not config.batch_dims:  # no rule, so no key paths
        leaves = jax.tree.leaves(batch)
        shapes = [leaf.shape if hasattr(leaf, "shape") else np.shape(leaf) for leaf in leaves]
        return frozenset([shape[0] for shape in shapes if shape])
    return _sizes_of_dim(config, batch, row_dim)


def _sizes_of_dim(
    config: StrategyConfig, batch: PyTree, dim_of: Callable[[StrategyConfig, str, int], int | None]
) -> frozenset[int]:
    leaves_and_dims = (
        (leaf, dim_of(config, path, np.ndim(leaf))) for path, leaf in leaves_with_paths(batch)
    )
    return frozenset(
        leaf.shape[dim]
        for leaf, dim in leaves_and_dims
        if dim is not None and dim < len(leaf.shape)
    )


def num_rows(config: StrategyConfig, batch: PyTree) -> int:
    """Return the number of rows of a batch.

    1 if its leaves do not agree, so that the batch counts as one row.
    """
    counts = row_counts(config, batch)
    return next(iter(counts)) if len(counts) == 1 else 1


def shown_leaves(config: StrategyConfig, batch: PyTree) -> list[str]:
    """Return each leaf of a batch with its shape and its rows, for messages."""

    def describe(path: str, leaf: PyTree) -> str:
        shape = np.shape(leaf)
        dim = row_dim(config, path, np.ndim(leaf))
        rows = "no rows" if dim is None else f"dim {dim} has {plural(shape[dim], 'row')}"
        return f"{path or 'batch'}: shape {shape}; {rows}"

    return [describe(path, leaf) for path, leaf in leaves_with_paths(batch)]


def batch_specs(config: StrategyConfig, batch: PyTree) -> PyTree:
    """Return how batch leaves are placed, as `PartitionSpec`: split along their rows.

    Leaves without rows on all devices.
    """

    def spec_of(path: jax.tree_util.KeyPath, leaf: PyTree) -> PartitionSpec:
        name = path_text(path)
        ndim = np.ndim(leaf)
        return leaf_spec(config, name, ndim, row_dim(config, name, ndim))

    return jax.tree_util.tree_map_with_path(spec_of, batch)


def placed_specs(config: StrategyConfig, batch: PyTree) -> PyTree:
    """Return where the leaves of a step's batch live, as `PartitionSpec`.

    In the global view leaves need not agree on a number of rows; the leaves of a graph do not. Nor
    need the devices divide it. Each leaf is then split along its rows if the devices divide them,
    else along its first dim that they divide, else not at all.
    """
    devices = size_along(config.axes.sizes, config.axes.rows)
    counts = row_counts(config, batch)
    if len(counts) < 2 and not any(count % devices for count in counts):
        return batch_specs(config, batch)

    def spec_of(path: jax.tree_util.KeyPath, leaf: PyTree) -> PartitionSpec:
        name = path_text(path)
        shape = np.shape(leaf)
        rows = row_dim(config, name, len(shape))
        positions = sequence_dim(config, name, len(shape))
        dims = (
            [] if rows is None else [rows, *(dim for dim in range(len(shape)) if dim != positions)]
        )
        divisible_dim = next(
            (dim for dim in dims if shape[dim] and shape[dim] % devices == 0), None
        )
        return leaf_spec(config, name, len(shape), divisible_dim)

    return jax.tree_util.tree_map_with_path(spec_of, batch)


def leaf_spec(
    config: StrategyConfig,
    path: str,
    ndim: int,
    dim: int | None,
    *,
    rows: tuple[str, ...] | None = None,
    leading: tuple[str | None, ...] = (),
) -> PartitionSpec:
    """Return the spec of a batch leaf that is split along a dim, and along its positions.

    Args:
      config: defines the axes.
      path: the key path of the leaf.
      ndim: its number of dims.
      dim: the dim that the axes of rows split, or None.
      rows: the axes of rows; by default all of them.
      leading: entries for dims that are added in front of the leaf.
    """
    position_dim = sequence_dim(config, path, ndim) if ndim else None
    axes_of_dim = {
        position_dim: config.axes.positions,
        dim: config.axes.rows if rows is None else rows,
    }
    last_dim = max((index for index in axes_of_dim if index is not None), default=-1)
    return PartitionSpec(*leading, *(axes_of_dim.get(index) for index in range(last_dim + 1)))


def sequence_lengths(config: StrategyConfig, batch: PyTree) -> frozenset[int]:
    """Return the numbers of positions that the sequences of a batch have."""
    return _sizes_of_dim(config, batch, sequence_dim)


def resized(
    config: StrategyConfig, batch: PyTree, *, rows: int, position_shares: int = 1
) -> PyTree:
    """Return the shapes of a batch with `rows` rows, and with sequences cut into `position_shares`
    shares.
    """

    def resize(path: jax.tree_util.KeyPath, leaf: PyTree) -> jax.ShapeDtypeStruct:
        name = path_text(path)
        shape = list(leaf.shape)
        dim = row_dim(config, name, leaf.ndim)
        if dim is not None:
            shape[dim] = rows
        if shape and (dim := sequence_dim(config, name, leaf.ndim)) is not None:
            shape[dim] //= position_shares
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(resize, batch)


def check_row_dims(config: StrategyConfig, batch: PyTree) -> None:
    """Refuse `batch_dims` that name a dim of rows that a leaf does not have.

    Raises:
      ValueError: if there is such a leaf.
    """
    dims = [
        (path, np.shape(leaf), row_dim(config, path, np.ndim(leaf)))
        for path, leaf in leaves_with_paths(batch)
    ]
    missing = [
        f"{path or 'batch'}: shape {shape}; no dim {dim} for rows"
        for path, shape, dim in dims
        if dim is not None and not 0 <= dim < len(shape)
    ]
    if missing:
        fix = "name a dim that the leaf has, or None for a leaf that all rows share."
        raise ValueError(
            format_error(config.strategy, "batch_dims do not fit the batch.", missing, fix)
        )


def check_positions(config: StrategyConfig, batch: PyTree) -> None:
    """Refuse a batch whose sequences cannot be cut over the context axis.

    Raises:
      ValueError: if `batch_dims` name a dim of positions that a leaf does not have, or its row dim.
        If no leaf has positions, or if context does not divide the number of positions.
    """
    shares = config.axes.num_position_shares
    if shares == 1:
        return
    missing = []
    uneven = []
    lengths = set()
    for path, leaf in leaves_with_paths(batch):
        description = f"{path or 'batch'}: shape {np.shape(leaf)}"
        dim = sequence_dim(config, path, np.ndim(leaf))
        if dim is None:
            continue
        if not 0 <= dim < np.ndim(leaf):
            missing.append(f"{description}; no dim {dim} for positions")
        elif dim == row_dim(config, path, np.ndim(leaf)):
            missing.append(f"{description}; dim {dim} counts rows")
        else:
            lengths.add(leaf.shape[dim])
            if leaf.shape[dim] % shares:
                reason = not_divided(dim, leaf.shape[dim], "context", shares)
                uneven.append(f"{description}; {reason}")
    axis = f"mesh axis 'context' (size {shares})"
    if missing:
        fix = "name a dim that the leaf has and that does not count rows, or None."
        raise ValueError(
            format_error(config.strategy, "batch_dims do not fit the batch.", missing, fix)
        )
    if not lengths:
        problem = f"{axis} splits positions, and no batch leaf has any."
        fix = "make the mesh with context=1, or name the dim of positions in batch_dims."
        raise ValueError(format_error(config.strategy, problem, fix=fix))
    if uneven:
        problem = f"{plural(len(uneven), 'batch leaf')} cannot be split over {axis}."
        fix = (
            "use a length that it divides, with inputs and targets [B, T] each rather than tokens"
            " [B, T + 1]; or batch_dims=[(regex, (0, None))] for leaves without positions."
        )
        raise ValueError(format_error(config.strategy, problem, uneven, fix))
