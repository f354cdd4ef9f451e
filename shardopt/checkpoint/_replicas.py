"""Stacked leaves, with one value per replica or device: read in their stored shape, then merged if
the number changes.

- The state of each replica (`PerReplica`) is [replicas, ...]. Codes of 8 bits are not numbers, and
  are not merged.
- The state of a reducer is stacked as its spec says. An error-feedback memory is [devices of the
  mean, sizes of other axes..., ...]; only the mean over the devices affects later steps. State that
  is equal on those devices is [sizes of other axes..., ...].

`merge_replicas` computes the merged value, and every new replica or device gets it. `check_match`
reports all other differences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.checkpoint._store import Leaf, StoredLeaves, describe, dtype_of
from shardopt.checkpoint._tree import LeafPath, leaves_by_path, path_of, show
from shardopt.core import CheckpointError, PyTree, error_text, merge_replicas, with_leaves
from shardopt.local_updates._state import PerReplica, ReplicaStates
from shardopt.mesh import size_along, spec_axes
from shardopt.reducers import ErrorFeedback, PerDevice
from shardopt.step._compressed import CompressedOptState
from shardopt.transforms._eight_bit import EightBitState

_REPLICA = "replica"
_CODES = "codes"
_REDUCER = "reducer"
_MEMORY = "memory"
_DEVICE = "device"
_REFUSED = {
    _DEVICE: (
        "has state that belongs to its device, which cannot be carried to another number of"
        " devices.",
        "restore on as many devices as it was saved from",
    ),
    _CODES: (
        "has moments in 8 bits of each replica, and there is no mean of codes.",
        "restore with as many replicas as it was saved from",
    ),
}
"""The kinds that are not merged: why, and what to do instead."""

_NODES = (PerReplica, ReplicaStates, CompressedOptState, ErrorFeedback, PerDevice, EightBitState)


class ResizedLeaf(NamedTuple):
    """A leaf that is stored with other sizes than the wanted ones.

    Attributes:
      dims: the dims with another size.
      wanted: the abstract leaf with the wanted sizes.
    """

    dims: tuple[int, ...]
    wanted: jax.ShapeDtypeStruct


def as_stored(
    source: str, stored: StoredLeaves, wanted: PyTree, target_name: str
) -> tuple[PyTree, dict[LeafPath, ResizedLeaf]]:
    """Return the wanted state with the stored sizes of stacked leaves, and the changed leaves by
    path.

    Args:
      source: the name of the stored state, for messages.
      stored: the stored leaves by path.
      wanted: pytree of abstract arrays.
      target_name: the name of the target, for messages.

    Raises:
      CheckpointError: if state that belongs to its device would move to other devices, or moments
        in 8 bits would be merged.
    """
    kinds = _kinds(wanted)
    changes = {}
    leaves = []
    refused: dict[str | None, list[str]] = {kind: [] for kind in _REFUSED}
    for path, leaf in leaves_by_path(wanted).items():
        dims = _changed_dims(stored.get(path), leaf, kinds.get(path))
        if dims and kinds[path] in refused:
            refused[kinds[path]].append(
                f"{show(path)}: the checkpoint holds {stored[path]}, {target_name} wants"
                f" {describe(leaf)}"
            )
        elif dims:
            changes[path] = ResizedLeaf(dims, leaf)
            leaf = _with_sizes(leaf, stored[path].shape, dims)
        leaves.append(leaf)
    for kind, (reason, instead) in _REFUSED.items():
        if refused[kind]:
            fix = (
                f"{instead}; or start the optimizer again on its parameters:"
                " new_opt.init(restore(directory, old_opt).params)."
            )
            raise CheckpointError(error_text(f"{source} {reason}", refused[kind], fix=fix))
    return with_leaves(wanted, leaves), changes


def fits(
    stored: StoredLeaves, wanted: PyTree, *, cast: bool = False
) -> Callable[[LeafPath, LeafPath], bool]:
    """Return a function: whether the wanted leaf of a path can be filled by the stored leaf of
    another path.

    Args:
      stored: the stored leaves by path.
      wanted: pytree of abstract arrays.
      cast: whether a floating leaf may have another floating dtype.
    """
    kinds = _kinds(wanted)
    leaves = leaves_by_path(wanted)

    def fits_leaf(path: LeafPath, origin: LeafPath) -> bool:
        stored_leaf = stored[origin]
        leaf = leaves[path]
        if stored_leaf == describe(leaf) or (cast and _is_cast(stored_leaf, leaf)):
            return True
        return bool(_changed_dims(stored_leaf, leaf, kinds.get(path)))

    return fits_leaf


def _is_cast(stored: Leaf, wanted: jax.ShapeDtypeStruct) -> bool:
    dtypes = dtype_of(stored), wanted.dtype
    are_floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return are_floating and stored.shape == tuple(wanted.shape)


def to_wanted(state: PyTree, changes: dict[LeafPath, ResizedLeaf]) -> PyTree:
    """Return the state with the wanted sizes, each leaf with its wanted sharding."""
    leaves = leaves_by_path(state)
    for path, change in changes.items():

        def merge(leaf: jax.Array, change: ResizedLeaf = change) -> jax.Array:
            for dim in change.dims:
                leaf = jnp.expand_dims(merge_replicas(leaf, dim), dim)
            return jnp.broadcast_to(leaf, change.wanted.shape)

        # On the devices: each holds a part of the old values, and gets its part of the new ones.
        leaves[path] = jax.jit(merge, out_shardings=change.wanted.sharding)(leaves[path])
    return with_leaves(state, list(leaves.values()))


def _kinds(wanted: PyTree) -> dict[LeafPath, str]:
    """Return the kind of each stacked leaf by path: the kind says which values are stacked."""
    kinds: dict[LeafPath, str] = {}

    def visit(path: LeafPath, tree: PyTree, kind: str | None) -> None:
        for keys, node in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: isinstance(x, _NODES)
        ):
            node_path = (*path, *path_of(keys))
            if isinstance(node, _NODES):
                for name, child in node._asdict().items():
                    visit((*node_path, name), child, _kind_of(node, name, kind))
            elif kind is not None:
                kinds[node_path] = _REPLICA if kind == _CODES and node.dtype != jnp.uint8 else kind

    visit((), wanted, None)
    return kinds


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


def _changed_dims(
    stored: Leaf | None, wanted: jax.ShapeDtypeStruct, kind: str | None
) -> tuple[int, ...]:
    """Return the dims whose stored size differs, or () if the leaf cannot be adapted.

    A leaf can be adapted if it is stacked along all these dims and its values have a known meaning
    on the other mesh.
    """
    if stored is None or kind is None or stored.dtype != describe(wanted).dtype:
        return ()
    if len(stored.shape) != len(wanted.shape):
        return ()
    pairs = enumerate(zip(stored.shape, wanted.shape, strict=True))
    dims = tuple(dim for dim, (size, wanted_size) in pairs if size != wanted_size)
    if kind in (_REPLICA, _CODES):
        return dims if set(dims) <= {0} else ()
    entries = tuple(wanted.sharding.spec) if isinstance(wanted.sharding, NamedSharding) else ()
    return dims if _keeps_parts(dims, entries, 0 if kind == _REDUCER else 1) else ()


def _keeps_parts(dims: tuple[int, ...], entries: tuple[Any, ...], first_part_dim: int) -> bool:
    """Return whether devices hold the same parts of a leaf as before, if these dims change.

    Along an axis without a mean, devices may hold different parts of a leaf. The parts are the same
    as before if their shape is the same, unless two such axes have exchanged their roles.
    """
    if any(dim >= len(entries) for dim in dims):
        return False
    # Along replica all have the same part. Along two other axes, [2, 4] may become [4, 2], and
    # nothing tells which part went where.
    part_dims = [dim for dim in dims if dim >= first_part_dim and entries[dim] != "replica"]
    return len(part_dims) < 2


def _with_sizes(
    leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...], dims: tuple[int, ...]
) -> jax.ShapeDtypeStruct:
    """Return the leaf with its stored shape.

    A changed dim keeps its sharding if the stored size is divisible, else it is replicated.
    """
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        entries = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
        for dim in dims:
            axes = spec_axes((entries[dim],))
            if shape[dim] % size_along(sharding.mesh.shape, axes):
                entries[dim] = None
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
