"""Stacked leaves, one value a replica or a device: read as they are stored, merged where their number changes.

- Each replica's own state (`PerReplica`) is [replicas, ...]. Codes of 8 bits are no numbers, and are not merged.
- The state of a reducer is stacked as its spec says: error-feedback memories [devices of the mean, sizes of other
  axes..., ...], of which only the mean matters to what is to come; [sizes of other axes..., ...] for what is the same
  on those devices.

`merge_replicas` says what stands for several values, and every new replica or device gets it. Whatever else differs is
left to `check_match`, which names it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.checkpoint.store import Leaf, describe
from shardopt.checkpoint.tree import LeafPath, escape, leaves_by_path, show
from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import PyTree, merge_replicas
from shardopt.engine.compression import CompressedOptState
from shardopt.local_updates.state import PerReplica, Replicas
from shardopt.reducers import ErrorFeedback, PerDevice
from shardopt.transforms.eight_bit import EightBitState

_REPLICA, _CODES, _REDUCER, _MEMORY, _DEVICE = "replica", "codes", "reducer", "memory", "device"
_NODES = (PerReplica, Replicas, CompressedOptState, ErrorFeedback, PerDevice, EightBitState)


class Change(NamedTuple):
    """A leaf that is stored with other sizes, in these dims, than it is wanted with."""

    dims: tuple[int, ...]
    wanted: jax.ShapeDtypeStruct


def as_stored(
    who: str, what: str, stored: dict[LeafPath, Leaf], wanted: PyTree, name: str
) -> tuple[PyTree, dict[LeafPath, Change]]:
    """Return the wanted state, stacked as it is stored where only that differs, and those changes by path.

    Raises:
      CheckpointError: if state that belongs to its device would have to be moved to others, or moments in 8 bits merged.
    """
    kinds = _kinds(wanted)
    changes, tied, codes, leaves = {}, [], [], []
    for path, leaf in leaves_by_path(wanted).items():
        dims = _changed_dims(stored.get(path), leaf, kinds.get(path))
        if dims and kinds[path] in (_DEVICE, _CODES):
            some = tied if kinds[path] == _DEVICE else codes
            some.append(f"{show(path)}: the checkpoint holds {stored[path]}, {name} wants {describe(leaf)}")
        elif dims:
            changes[path] = Change(dims, leaf)
            leaf = _with_sizes(leaf, stored[path].shape, dims)
        leaves.append(leaf)
    tied_to = "has state that belongs to its device, which cannot be carried to another number of devices."
    no_mean = "has moments in 8 bits of each replica, and there is no mean of codes."
    for where, why, instead in (
        (tied, tied_to, "restore on as many devices as it was saved from"),
        (codes, no_mean, "restore with as many replicas as it was saved from"),
    ):
        if where:
            again = "or start the optimizer again on its parameters: new_opt.init(restore(directory, old_opt).params)."
            raise CheckpointError(format_error(who, f"{what} {why}", where, fix=f"{instead}; {again}"))
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves), changes


def to_wanted(state: PyTree, changes: dict[LeafPath, Change]) -> PyTree:
    """Return the state stacked as it is wanted, each leaf placed where it is wanted."""
    leaves = leaves_by_path(state)
    for path, change in changes.items():

        def merge(leaf: jax.Array, change: Change = change) -> jax.Array:
            for dim in change.dims:
                leaf = jnp.expand_dims(merge_replicas(leaf, dim), dim)
            return jnp.broadcast_to(leaf, change.wanted.shape)

        leaves[path] = jax.jit(merge, out_shardings=change.wanted.sharding)(leaves[path])
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def _kinds(wanted: PyTree) -> dict[LeafPath, str]:
    """Return what the stacked leaves are stacked over, by path."""
    found: dict[LeafPath, str] = {}

    def visit(path: LeafPath, tree: PyTree, kind: str | None) -> None:
        for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, _NODES)):
            here = (*path, *(escape(jax.tree_util.keystr((key,), simple=True)) for key in keys))
            if isinstance(node, _NODES):
                for name, child in node._asdict().items():
                    visit((*here, name), child, _kind_of(node, name, kind))
            elif kind is not None:
                found[here] = _REPLICA if kind == _CODES and node.dtype != jnp.uint8 else kind

    visit((), wanted, None)
    return found


def _kind_of(node: NamedTuple, field: str, kind: str | None) -> str | None:
    if isinstance(node, PerReplica):
        return _REPLICA
    if isinstance(node, EightBitState):
        return _CODES if kind == _REPLICA and field == "state" else kind
    if isinstance(node, ErrorFeedback):
        return _MEMORY if kind == _REDUCER else kind
    if isinstance(node, PerDevice):
        return _DEVICE if kind == _REDUCER else kind
    return _REDUCER if field in ("reducer", "inner_reducer") else kind


def _changed_dims(stored: Leaf | None, wanted: jax.ShapeDtypeStruct, kind: str | None) -> tuple[int, ...]:
    """Return the dims that differ, if the leaf is stacked along all of them, and it is known what that means elsewhere."""
    if stored is None or kind is None or len(stored.shape) != len(wanted.shape):
        return ()
    if stored.dtype != describe(wanted).dtype:
        return ()
    dims = tuple(dim for dim, (a, b) in enumerate(zip(stored.shape, wanted.shape, strict=True)) if a != b)
    entries = tuple(wanted.sharding.spec) if isinstance(wanted.sharding, NamedSharding) else ()
    replica = kind in (_REPLICA, _CODES)
    if any(dim >= (1 if replica else len(entries)) for dim in dims):
        return ()
    if not replica:
        # Along an axis that no mean is taken over there may be other parts of a leaf. They are the same ones where the
        # parts have kept their shape, unless two such axes have exchanged their roles.
        first = 0 if kind == _REDUCER else 1
        if len([dim for dim in dims if dim >= first and entries[dim] != "replica"]) > 1:
            return ()
    return dims


def _with_sizes(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...], dims: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return the leaf as it is stored, its changed dims sharded as before where they can be, else replicated."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        entries = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
        for dim in dims:
            axes = entries[dim] if isinstance(entries[dim], tuple) else (entries[dim],)
            if shape[dim] % math.prod(sharding.mesh.shape[axis] for axis in axes if axis is not None):
                entries[dim] = None
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
