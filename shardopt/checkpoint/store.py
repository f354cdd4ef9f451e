"""How leaves are stored, and the only file that calls orbax: nested dicts of arrays out, and back shard by shard."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardopt.checkpoint.tree import leaves_by_path, nest, show, unnest
from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import PyTree, is_array_like
from shardopt.runtime.progress import waiting

ArrayLeaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct
A = TypeVar("A", jax.Array, np.ndarray, jax.ShapeDtypeStruct)

_ITEM = "state"
"""The folder of the arrays in a step's folder; for `orbax.checkpoint.CheckpointManager`, the name of the item."""

_BARRIERS = 2
"""How often orbax has all processes wait while it writes: when each has written, and when the first has finished."""

_CHUNK_BYTES = 16 * 2**20
"""Arrays are stored in chunks of at most this size, so that reading a shard of an array that was saved replicated
takes memory for the shard and not for the array."""


class Leaf(NamedTuple):
    """What is recorded of a leaf: its logical shape, and its dtype, "key<threefry2x32>" for typed random keys."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def describe(leaf: ArrayLeaf) -> Leaf:
    """Return the record of a concrete or abstract leaf."""
    if not _is_key(leaf):
        return Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name)
    # key_impl wants an array, and takes a traced one: so abstract keys can be asked as well.
    seen: list[object] = []
    jax.eval_shape(lambda key: seen.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return Leaf(tuple(leaf.shape), f"key<{seen[0]}>")


def dtype_of(leaf: Leaf) -> np.dtype:
    """Return the dtype that a record speaks of; ValueError if it is not one that an array on a device can have."""
    if implementation := _implementation(leaf):
        return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError as error:
        raise ValueError(f"unknown dtype {leaf.dtype!r}") from error
    if dtype.kind not in "biufcV" or dtype.hasobject or dtype.name != leaf.dtype or dtype.itemsize == 0:
        raise ValueError(f"dtype {leaf.dtype!r} is not one of an array")
    return dtype


def plain(leaf: A) -> A:
    """Return what is stored of an array, concrete or abstract: the integers of a typed key, else itself."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):  # the spec speaks of the leading dims, the integers of a key follow
            sharding = NamedSharding(sharding.mesh, sharding.spec)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else leaf


def unplain(data: jax.Array, leaf: Leaf) -> jax.Array:
    """Return the array whose stored form is `data`."""
    implementation = _implementation(leaf)
    return jax.random.wrap_key_data(data, impl=implementation) if implementation else data


def place(target: jax.ShapeDtypeStruct, read: Callable[..., np.ndarray]) -> jax.Array:
    """Return a global array with the target's sharding, from `read(index)` for each shard held here."""
    # Copied, because a CPU array may otherwise live on in memory that belongs to the caller.
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: np.array(read(index)))


def check_leaves(who: str, tree: PyTree) -> None:
    """Refuse leaves that cannot be stored: TypeError if one is not an array, ValueError if one was donated to a step."""
    leaves = leaves_by_path(tree)
    if strange := [f"{show(path)}: {type(leaf).__name__}" for path, leaf in leaves.items() if not is_array_like(leaf)]:
        fix = "make them arrays (jnp.asarray), or keep them out of the state."
        raise TypeError(format_error(who, "the state must be a pytree of arrays.", strange, fix=fix))
    gone = [show(path) for path, leaf in leaves.items() if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if gone:
        fix = "use the state that the last step returned: a step takes over the buffers of the state it is given."
        raise ValueError(format_error(who, "these arrays of the state were deleted, probably donated.", gone, fix=fix))


def _is_key(leaf: ArrayLeaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _implementation(leaf: Leaf) -> str:
    return leaf.dtype[4:-1] if leaf.dtype.startswith("key<") and leaf.dtype.endswith(">") else ""


class Writer:
    """An orbax checkpointer that writes in the background; with several processes none waits for one that failed.

    While it writes orbax has all processes wait for each other, and one that fails does not come: the others would
    wait for twenty minutes. Here it comes all the same, to as many barriers as are left.
    """

    def __init__(self):
        import orbax.checkpoint as ocp

        self._folder, self._passed = "", 0
        # By itself it also writes how arrays were cut, into a folder that all but the first wait for: for ten minutes,
        # where somebody deleted it. It is not needed: a checkpoint can be read without.
        handlers = [(jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))]
        handlers += [(kind, ocp.type_handlers.get_type_handler(kind)) for kind in (np.ndarray, np.number)]
        registry = ocp.type_handlers.create_type_handler_registry(*handlers)
        handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
        options = ocp.options.AsyncOptions(barrier_sync_fn=self._barrier)
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)

    def start(self, folder: Path, state: PyTree) -> None:
        """Copy the state to the host and begin to write it to a new folder; all processes must call it."""
        import orbax.checkpoint as ocp

        self._folder, self._passed = str(folder), 0
        leaves = {path: plain(leaf) for path, leaf in leaves_by_path(state).items()}
        nested = nest({path: leaf for path, leaf in leaves.items() if leaf.size})  # orbax takes no empty arrays
        how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), nested)
        self._orbax.save(folder, ocp.args.Composite(state=ocp.args.PyTreeSave(nested, save_args=how)))

    def wait(self, failures: list[Exception]) -> None:
        """Wait until all is written here; add why it was not."""
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            failures.append(error)
        while self._passed < _BARRIERS:
            self._barrier()

    def close(self) -> None:
        """Wait, and end the threads."""
        self._orbax.close()

    def _barrier(self, **_: object) -> None:
        self._passed += 1
        barrier(f"{self._folder}.orbax-{self._passed}")


def barrier(name: str) -> None:
    """Wait until all processes are here; may be called on any thread."""
    import orbax.checkpoint as ocp

    with waiting("barrier"):
        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=20 * 60 * 1000)


def read_arrays(folder: Path, target: PyTree) -> PyTree:
    """Fill a pytree of `jax.ShapeDtypeStruct` with shardings, known to fit, from a step's folder.

    Each process reads the shards of its own devices.
    """
    import orbax.checkpoint as ocp

    wanted = leaves_by_path(target)
    stored = {path: plain(leaf) for path, leaf in wanted.items()}
    filled = {path: leaf for path, leaf in stored.items() if leaf.size}
    nested = nest(filled)
    how = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
        ),
        nested,
    )
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_gigabytes_at_once(filled.values()))
    with ocp.Checkpointer(handler) as reader:
        found = reader.restore(folder / _ITEM, ocp.args.PyTreeRestore(item=nested, restore_args=how))
    arrays = dict(zip(filled, unnest(found, list(filled)), strict=True))
    for path, leaf in stored.items():
        if path not in arrays:
            arrays[path] = place(leaf, lambda index, leaf=leaf: np.zeros(leaf.shape, leaf.dtype)[index])
    leaves = [unplain(arrays[path], describe(leaf)) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def read_orbax(who: str, folder: Path, target: PyTree) -> PyTree:
    """Fill a pytree of `jax.ShapeDtypeStruct` with shardings from a folder of orbax, which may hold more.

    Raises:
      CheckpointError: if an array is missing, or of another shape.
    """
    import orbax.checkpoint as ocp

    how = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
        ),
        target,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            return reader.restore(folder, ocp.args.PyTreeRestore(item=target, restore_args=how, partial_restore=True))
        except (ValueError, KeyError, TypeError) as error:
            what = f"{folder}, written by orbax, does not fit the abstract tree: {error}"
            fix = "pass the containers, key paths and shapes that were saved; parts of them are enough."
            raise CheckpointError(format_error(who, what, fix=fix)) from error


def _gigabytes_at_once(leaves: Iterable[ArrayLeaf]) -> int:
    """Bound the host memory of reads in flight; one read, rounded up to chunks, must always fit."""
    largest = max((leaf.size * leaf.dtype.itemsize for leaf in leaves), default=0)
    return max(4, math.ceil(2 * largest / 1e9))
