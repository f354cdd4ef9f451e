"""Copies leaves of a donated state that share memory with another argument, because a buffer can be
donated only once.

If two arguments are one buffer and one of them is donated, XLA ends the process (jaxlib 0.10.2) or
refuses the call (0.12).
"""

import functools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from shardopt.config._user_mesh import on_auto_axes
from shardopt.core import Arrays, PyTree, is_key, with_leaves
from shardopt.mesh import on_mesh, without_mesh
from shardopt.step._inputs import copied

_KNOWN_ARRAYS = 256
"""How many arrays of earlier calls are remembered before those that are gone are forgotten."""


class DonatedState:
    """Gives each leaf of a donated state its own buffer, before every call.

    The leaves that a program returned share no memory with each other, nor with an array that was
    an argument of the program and still exists. So two kinds of arrays are checked:

    - leaves that were put into the state after the last call;
    - arrays among the other arguments that no earlier call had.

    Only arrays of one dtype, with as many bytes on a device, can be one buffer. A view of other
    dtype is a reference from outside of XLA, which then donates a copy. A state that comes back
    unchanged, with numpy arrays or arrays of earlier calls, costs a fraction of a microsecond per
    leaf on any number of devices.

    Args:
      mesh: the mesh of the programs that take the state.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._returned: list[weakref.ref[Any]] = []
        self._structure: Any = None
        self._buffers: list[tuple[int, Any]] = []
        self._kinds: set[tuple[int, Any]] = set()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._most_known = _KNOWN_ARRAYS

    def remember(self, state: PyTree) -> None:
        """Remember the state that a program returned, without keeping it alive."""
        leaves, self._structure = jax.tree.flatten(state)
        self.remember_leaves(leaves)

    def remember_leaves(self, leaves: Sequence[Any]) -> None:
        """Remember the leaves of a state with the structure of the last one."""
        self._returned = list(map(weakref.ref, leaves))

    def returned_leaves(self, state: PyTree) -> list[Any] | None:
        """Return the leaves of a state; None unless a program returned it last, with these leaves."""
        leaves, structure = jax.tree.flatten(state)
        returned = map(operator.call, self._returned)
        is_same = structure == self._structure and all(map(operator.is_, returned, leaves))
        return leaves if is_same else None

    def apart(self, leaves: list[Any], arrays: Sequence[jax.Array]) -> list[Any]:
        """Return the `returned_leaves` of a state so that they share no memory with the arrays of a
        call.

        An array that no earlier call had, and that may be memory of the state, gets memory of its
        own. That costs a copy of it, and nothing for each leaf of the state.
        """
        unknown_arrays = [array for array in arrays if not self._is_known(array)]
        if not unknown_arrays:
            return leaves
        self._know(unknown_arrays)
        suspects = [array for array in unknown_arrays if _buffer_of(array) in self._kinds]
        if not set(map(id, leaves)).isdisjoint(map(id, suspects)):
            # The array is itself a leaf of the state. Memory of its own would be donated with it,
            # so the leaf is copied instead.
            return self.distinct(leaves, leaves, arrays)
        for array in suspects:
            sharding = array.sharding if array.committed else None
            with without_mesh():
                own_copy = _copy_to(sharding)(array)
            # In place: the user's array itself leaves memory that may be donated. So later calls
            # need no copy of it.
            cast(Any, array)._replace_with(own_copy)
        return leaves

    def distinct(
        self, state: PyTree, leaves: Sequence[jax.Array], other_leaves: Sequence[Any]
    ) -> PyTree:
        """Return the state, with copies in place of leaves that share memory with another argument.

        Args:
          state: the state to be donated.
          leaves: its leaves.
          other_leaves: the leaves of the arguments that are not donated.
        """
        other_arrays = [leaf for leaf in other_leaves if isinstance(leaf, jax.Array)]
        if len(self._returned) != len(leaves):  # the first call
            self._buffers = list(map(_buffer_of, leaves))
            self._kinds = set(self._buffers)
            new_leaves = leaves
        else:
            new_leaves = [
                leaf for ref, leaf in zip(self._returned, leaves, strict=True) if ref() is not leaf
            ]
        self._know(other_arrays)
        buffers = {_buffer_of(leaf) for leaf in [*new_leaves, *other_arrays]}
        # an address costs more to read than a size
        suspects = [i for i, buffer in enumerate(self._buffers) if buffer in buffers]
        if not suspects:
            return state
        shared_leaves = _sharing(leaves, suspects, other_arrays)
        if not shared_leaves:
            return state
        copies = dict(zip(shared_leaves, self._copied([*shared_leaves.values()]), strict=True))
        return with_leaves(state, [copies.get(i, leaf) for i, leaf in enumerate(leaves)])

    def _is_known(self, array: jax.Array) -> bool:
        known_array = self._known.get(id(array))
        return known_array is not None and known_array() is array

    def _know(self, arrays: Sequence[jax.Array]) -> None:
        self._known.update((id(array), weakref.ref(array)) for array in arrays)
        if len(self._known) > self._most_known:
            self._known = {key: ref for key, ref in self._known.items() if ref() is not None}
            self._most_known = max(_KNOWN_ARRAYS, 2 * len(self._known))

    def _copied(self, leaves: Sequence[jax.Array]) -> Arrays:
        shardings = tuple(leaf.sharding for leaf in leaves)
        with without_mesh():
            leaves_on_auto_axes = jax.device_put(
                list(leaves), [on_auto_axes(sharding) for sharding in shardings]
            )
            return _copy_program(self._mesh, shardings)(leaves_on_auto_axes)


@functools.lru_cache(maxsize=8)
def _copy_program(mesh: Mesh, shardings: tuple[Sharding, ...]) -> jax.stages.Wrapped:
    return jax.jit(on_mesh(mesh, copied), out_shardings=list(shardings))


@functools.lru_cache(maxsize=64)
def _copy_to(sharding: Sharding | None) -> jax.stages.Wrapped:
    return jax.jit(jnp.copy, out_shardings=sharding)


def _sharing(
    leaves: Sequence[jax.Array], suspects: Sequence[int], other_arrays: Sequence[jax.Array]
) -> dict[int, jax.Array]:
    """Return the suspects that share memory with another array, or with a suspect before them."""
    taken_addresses = {address for array in other_arrays for address in _addresses(array)}
    shared_leaves = {}
    for i in suspects:
        addresses = _addresses(leaves[i])
        if not taken_addresses.isdisjoint(addresses):
            shared_leaves[i] = leaves[i]
        taken_addresses.update(addresses)
    return shared_leaves


def _buffer_of(leaf: jax.Array | np.ndarray) -> tuple[int, Any]:
    """Return the bytes of an array on one device, and their dtype."""
    shape = leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape
    dtype = np.dtype(np.uint32) if is_key(leaf) else leaf.dtype
    return math.prod(shape) * leaf.dtype.itemsize, dtype


def _addresses(leaf: jax.Array | np.ndarray) -> set[tuple[Sharding, int]]:
    """Return the addresses of an array's shards in this process.

    There are none for a numpy array or an array without elements. An array that is whole on each
    device has the address of its first copy alone.
    """
    if not isinstance(leaf, jax.Array) or not leaf.size or leaf.is_deleted():
        return set()
    array = jax.random.key_data(leaf) if is_key(leaf) else leaf
    is_replicated = array.sharding.is_fully_replicated
    num_shards = 1 if is_replicated else len(array.sharding.addressable_devices)
    shards = map(array.addressable_data, range(num_shards))
    return {(shard.sharding, shard.unsafe_buffer_pointer()) for shard in shards}
