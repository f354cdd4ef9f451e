"""How leaves are stored on disk: as nested dicts of arrays, read back shard by shard.

Only this file calls orbax.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardopt.checkpoint._tree import LeafPath, leaves_by_path, nest, show, unnest
from shardopt.core import (
    PyTree,
    is_array_like,
    is_key,
    num_bytes,
    type_error,
    value_error,
    with_leaves,
)
from shardopt.runtime._progress import waiting

ArrayLeaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct
A = TypeVar("A", jax.Array, np.ndarray, jax.ShapeDtypeStruct)

_ITEM = "state"
"""The subfolder of a step for the arrays; `orbax.checkpoint.CheckpointManager` calls it the name of
the item.
"""

_BARRIERS = 2
"""Barriers of orbax in a write: after each process has written, and after the first process has
finished.
"""

_CHUNK_BYTES = 16 * 2**20
"""The largest chunk in which arrays are stored.

Reading one shard of an array that was saved replicated then needs memory for the shard, not for the
array."""


class Leaf(NamedTuple):
    """The record of a leaf.

    Attributes:
      shape: the logical shape.
      dtype: the name of the dtype; "key<threefry2x32>" for typed random keys.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


StoredLeaves = dict[LeafPath, Leaf]
"""The record of each leaf, by path."""


def describe(leaf: ArrayLeaf) -> Leaf:
    """Return the record of a concrete or abstract leaf."""
    if not is_key(leaf):
        return Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name)
    # key_impl needs an array, and accepts a traced one, so this works for abstract keys too.
    implementations: list[object] = []
    jax.eval_shape(
        lambda key: implementations.append(jax.random.key_impl(key)),
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
    )
    return Leaf(tuple(leaf.shape), f"key<{implementations[0]}>")


def dtype_of(leaf: Leaf) -> np.dtype:
    """Return the dtype of a record.

    Raises:
      ValueError: if arrays on a device cannot have this dtype.
    """
    implementation = _implementation(leaf)
    if implementation:
        return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError as error:
        raise ValueError(f"unknown dtype {leaf.dtype!r}") from error
    if (
        dtype.kind not in "biufcV"
        or dtype.hasobject
        or dtype.name != leaf.dtype
        or dtype.itemsize == 0
    ):
        raise ValueError(f"dtype {leaf.dtype!r} is not one of an array")
    return dtype


def to_storable(leaf: A) -> A:
    """Return the stored form of a concrete or abstract array: the integers of a typed random key,
    else the array.
    """
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        key_data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        sharding = leaf.sharding
        # the integers of a key are trailing dims, which the spec leaves out
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, sharding.spec)
        return jax.ShapeDtypeStruct(key_data.shape, key_data.dtype, sharding=sharding)
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else leaf


def from_storable(stored: jax.Array, leaf: Leaf) -> jax.Array:
    """Return the array with this stored form; `to_storable` reversed."""
    implementation = _implementation(leaf)
    return jax.random.wrap_key_data(stored, impl=implementation) if implementation else stored


def place(target: jax.ShapeDtypeStruct, read: Callable[..., np.ndarray]) -> jax.Array:
    """Return a global array with the shape and sharding of the target.

    Args:
      target: shape, dtype and sharding.
      read: returns the values at an index; called for each shard of this process.
    """
    # Without a copy, an array on a CPU device could share memory with the caller.
    return jax.make_array_from_callback(
        target.shape, target.sharding, lambda index: np.array(read(index))
    )


def check_leaves(tree: PyTree) -> None:
    """Refuse leaves that cannot be stored.

    Raises:
      TypeError: if a leaf is not an array.
      ValueError: if a leaf was donated to a step.
    """
    leaves = leaves_by_path(tree)
    not_arrays = [
        f"{show(path)}: {type(leaf).__name__}"
        for path, leaf in leaves.items()
        if not is_array_like(leaf)
    ]
    if not_arrays:
        fix = (
            "make them arrays (jnp.asarray; so.replace sets hyperparameters and the step of a train"
            " state), or keep them out of the state."
        )
        raise type_error("the state must be a pytree of arrays.", not_arrays, fix=fix)
    deleted = [
        show(path)
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and leaf.is_deleted()
    ]
    if deleted:
        fix = (
            "use the state that the last step returned: a step takes over the buffers of the state"
            " it is given."
        )
        raise value_error(
            "these arrays of the state were deleted, probably donated.", deleted, fix=fix
        )


def _implementation(leaf: Leaf) -> str:
    return leaf.dtype[4:-1] if leaf.dtype.startswith("key<") and leaf.dtype.endswith(">") else ""


class Writer:
    """An orbax checkpointer that writes in the background.

    No process waits for another one that failed.

    While orbax writes, it makes all processes wait for each other. A process that failed would not
    come, and the others would wait for twenty minutes. Here a failed process also comes to all
    remaining barriers.
    """

    def __init__(self):
        import orbax.checkpoint as ocp

        self._folder = ""
        self._passed = 0
        # By default orbax also writes metadata about shards, into a folder for which all other
        # processes wait: ten minutes, if somebody deleted it. Reading does not need this metadata.
        # If several devices hold a leaf, each writes a slice of it. But jax compiles a program to
        # cut each shape on each device, so one device writes a small leaf whole.
        options = {"array_metadata_store": None, "min_slice_bytes_for_replica_parallel": 2**20}
        handlers = [(jax.Array, ocp.type_handlers.ArrayHandler(**options))]
        handlers += [
            (kind, ocp.type_handlers.get_type_handler(kind)) for kind in (np.ndarray, np.number)
        ]
        registry = ocp.type_handlers.create_type_handler_registry(*handlers)
        handler = ocp.CompositeCheckpointHandler(
            state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        )
        async_options = ocp.options.AsyncOptions(barrier_sync_fn=self._barrier)
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=async_options)

    def start(self, folder: Path, state: PyTree) -> None:
        """Copy the state to the host and start writing it to a new folder.

        All processes must call it.
        """
        import orbax.checkpoint as ocp

        self._folder = str(folder)
        self._passed = 0
        leaves = {path: to_storable(leaf) for path, leaf in leaves_by_path(state).items()}
        # orbax takes no empty arrays
        nested = nest({path: leaf for path, leaf in leaves.items() if leaf.size})
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), nested)
        self._orbax.save(
            folder, ocp.args.Composite(state=ocp.args.PyTreeSave(nested, save_args=save_args))
        )

    def wait(self, failures: list[Exception]) -> None:
        """Wait until this process has written all; add its error to `failures` if it failed."""
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            failures.append(error)
        # orbax left these out when it failed. The other processes wait at them.
        while self._passed < _BARRIERS:
            self._barrier()

    def close(self) -> None:
        """Wait until all is written, and end the threads."""
        self._orbax.close()

    def _barrier(self, **_: object) -> None:
        self._passed += 1
        barrier(f"{self._folder}.orbax-{self._passed}")


def barrier(name: str) -> None:
    """Wait until all processes have called this; works on any thread."""
    import orbax.checkpoint as ocp

    with waiting("barrier"):
        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=20 * 60 * 1000)


def read_arrays(folder: Path, target: PyTree) -> PyTree:
    """Return a state with the arrays of a step's folder.

    Each process reads only the shards of its own devices.

    Args:
      folder: the step's folder.
      target: pytree of `jax.ShapeDtypeStruct` with shardings. Its leaves are known to fit the
        folder.
    """
    import orbax.checkpoint as ocp

    wanted = leaves_by_path(target)
    stored_leaves = {path: to_storable(leaf) for path, leaf in wanted.items()}
    # Empty leaves were not stored. Their shape says all, so they are made below.
    nonempty_leaves = {path: leaf for path, leaf in stored_leaves.items() if leaf.size}
    handler = ocp.PyTreeCheckpointHandler(
        restore_concurrent_gb=_gigabytes_at_once(nonempty_leaves.values())
    )
    with ocp.Checkpointer(handler) as reader:
        nested = nest(nonempty_leaves)
        args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
            ),
            nested,
        )
        # partial: other arrays of the folder are not read
        restored = reader.restore(
            folder / _ITEM,
            ocp.args.PyTreeRestore(item=nested, restore_args=args, partial_restore=True),
        )
    arrays = dict(zip(nonempty_leaves, unnest(restored, list(nonempty_leaves)), strict=True))
    for path, leaf in stored_leaves.items():
        if path not in arrays:
            arrays[path] = place(
                leaf, lambda index, leaf=leaf: np.zeros(leaf.shape, leaf.dtype)[index]
            )
    leaves = [from_storable(arrays[path], describe(leaf)) for path, leaf in wanted.items()]
    return with_leaves(target, leaves)


def _gigabytes_at_once(leaves: Iterable[ArrayLeaf]) -> int:
    """Return a bound of the host memory of reads in flight.

    One read, rounded up to chunks, must always fit.
    """
    largest_bytes = max(map(num_bytes, leaves), default=0)
    return max(4, math.ceil(2 * largest_bytes / 1e9))
