"""Leaves that hold a row a replica or a row a device: read as they are stored, carried over to another number of rows.

- Each replica's own state (`PerReplica`) is [replicas, ...]. Floating leaves take the mean over the old replicas, which
  is what replicas agree on; signed integers the maximum; other leaves (such as random keys) the first row.
- What the reducer of gradients keeps has rows as its spec says: [devices of the mean, sizes of other axes..., ...] for
  error memories, of which only the mean matters to what is to come, so every new row takes it (as
  `shardopt.reducers.resize_state` does); [sizes of other axes..., ...] for what is the same on those devices.

Anything else that differs is left to `check_match`, which names it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.checkpoint.store import Leaf, describe
from shardopt.checkpoint.tree import LeafPath, escape, leaves_by_path, show
from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import wide_dtype
from shardopt.engine.compression import CompressedOptState
from shardopt.local_updates.state import PerReplica, Replicas
from shardopt.reducers import ErrorFeedback, PerDevice

_REPLICA, _REDUCER, _MEMORY, _DEVICE = "replica", "reducer", "memory", "device"
_NODES = (PerReplica, Replicas, CompressedOptState, ErrorFeedback, PerDevice)


class Change(NamedTuple):
    """How a leaf is carried over.

    Attributes:
      kind: what it is a row of.
      dims: the dims whose sizes differ.
      target: what is wanted.
    """

    kind: str
    dims: tuple[int, ...]
    target: jax.ShapeDtypeStruct


def as_stored(who: str, what: str, stored: dict[LeafPath, Leaf], target: Any) -> tuple[Any, dict[LeafPath, Change]]:
    """Return the target with the stored number of rows where only that differs, and those changes by path.

    Args:
      who: the function that complains.
      what: what is stored, for instance "step 3 in /runs/a".
      stored: the records of the stored leaves.
      target: the wanted pytree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      CheckpointError: if state that belongs to its device would have to be carried to others.
    """
    kinds = _kinds(target)
    changes, tied, leaves = {}, [], []
    for path, leaf in leaves_by_path(target).items():
        dims = _changed_rows(stored.get(path), leaf, kinds.get(path))
        if dims and kinds[path] == _DEVICE:
            tied.append(f"{show(path)}: the checkpoint holds {stored[path]}, opt wants {describe(leaf)}")
        elif dims:
            changes[path] = Change(kinds[path], dims, leaf)
            leaf = _with_rows(leaf, stored[path].shape, dims)
        leaves.append(leaf)
    if tied:
        what = f"{what} has state that belongs to its device, which cannot be carried to another number of devices."
        fix = (
            "restore on as many devices as it was saved from; or start the optimizer anew on its parameters: "
            "new_opt.init(restore(directory, old_opt).params)."
        )
        raise CheckpointError(format_error(who, what, tied, fix=fix))
    return jax.tree.unflatten(jax.tree.structure(target), leaves), changes


def carry_over(state: Any, changes: dict[LeafPath, Change]) -> Any:
    """Return the state with the wanted number of rows, each leaf placed where it is wanted."""
    if not changes:
        return state
    leaves = []
    for path, leaf in leaves_by_path(state).items():
        if path in changes:
            change = changes[path]
            leaf = jax.jit(lambda x, c=change: _carry(c, x), out_shardings=change.target.sharding)(leaf)
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _carry(change: Change, leaf: Any) -> Any:
    for dim in change.dims:
        leaf = _one_row(change.kind, leaf, dim)
    return jnp.broadcast_to(leaf, change.target.shape)


def _one_row(kind: str, leaf: Any, dim: int) -> Any:
    if kind != _REDUCER and jnp.issubdtype(leaf.dtype, jnp.inexact):
        mean = jnp.mean(leaf.astype(wide_dtype(leaf.dtype)), axis=dim, keepdims=True)
        return mean.astype(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.signedinteger):
        return jnp.max(leaf, axis=dim, keepdims=True)
    return leaf[(slice(None),) * dim + (slice(0, 1),)]


def _changed_rows(stored: Leaf | None, leaf: Any, kind: str | None) -> tuple[int, ...]:
    """Return the dims that differ, if they all count rows, and it is known what the rows mean elsewhere."""
    if stored is None or kind is None or len(stored.shape) != len(leaf.shape) or stored.dtype != describe(leaf).dtype:
        return ()
    dims = tuple(dim for dim, (a, b) in enumerate(zip(stored.shape, leaf.shape, strict=True)) if a != b)
    entries = () if leaf.sharding is None else tuple(leaf.sharding.spec)
    count = 1 if kind == _REPLICA else len(entries)
    if any(dim >= count for dim in dims):
        return ()
    if kind != _REPLICA:
        # Along an axis that no mean is taken over there may be other parts of a leaf. They are the same ones where the
        # parts have kept their shape, unless two such axes have exchanged their roles.
        first = 1 if kind in (_MEMORY, _DEVICE) else 0
        others = [dim for dim in dims if dim >= first and entries[dim] != "replica"]
        if len(others) > 1:
            return ()
    return dims


def _with_rows(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...], dims: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return the leaf as it is stored, its changed dims split as before where that is possible, else whole."""
    entries = list(leaf.sharding.spec) + [None] * (len(shape) - len(leaf.sharding.spec))
    sizes = leaf.sharding.mesh.shape
    for dim in dims:
        axes = entries[dim] if isinstance(entries[dim], tuple) else (entries[dim],)
        count = 1
        for axis in axes:
            count *= 1 if axis is None else sizes[axis]
        if shape[dim] % count:
            entries[dim] = None
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _kinds(target: Any) -> dict[LeafPath, str]:
    """Return what the leaves with rows are rows of, by path."""
    found: dict[LeafPath, str] = {}

    def visit(path, tree, kind):
        for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, _NODES)):
            here = (*path, *(escape(jax.tree_util.keystr((key,), simple=True)) for key in keys))
            if not isinstance(node, _NODES):
                if kind is not None:
                    found[here] = kind
                continue
            for name, child in node._asdict().items():
                visit((*here, name), child, _kind_of(node, name, kind))

    visit((), target, None)
    return found


def _kind_of(node: Any, field: str, kind: str | None) -> str | None:
    if isinstance(node, PerReplica):
        return _REPLICA
    if isinstance(node, ErrorFeedback):
        return _MEMORY if kind == _REDUCER else kind
    if isinstance(node, PerDevice):
        return _DEVICE if kind == _REDUCER else kind
    return _REDUCER if field in ("reducer", "inner_reducer") else kind
