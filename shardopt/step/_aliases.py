"""Copies leaves of a donated state that share memory with another argument, because a buffer can be
donated only once.

If two arguments are one buffer and one of them is donated, XLA ends the process (jaxlib 0.10.2) or
refuses the call (0.12).
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from shardopt.config._user_mesh import on_auto_axes
from shardopt.core._types import PyTree
from shardopt.mesh import on_mesh
from shardopt.step._inputs import copied


class DonatedState:
    """Gives each leaf of a donated state its own buffer, before every call.

    The leaves that a program returned share no memory with each other. So only two kinds of leaves
    are checked: leaves that were put into the state after the last call, and leaves of the other
    arguments. Addresses are compared if sizes are equal. A state that comes back unchanged costs a
    fraction of a microsecond per leaf.

    Args:
      mesh: the mesh of the programs that take the state.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._returned: list[weakref.ref[Any]] = []
        self._sizes: list[int] = []

    def remember(self, state: PyTree) -> None:
        """Remember the state that a program returned, without keeping it alive."""
        self._returned = list(map(weakref.ref, jax.tree.leaves(state)))

    def distinct(
        self, state: PyTree, leaves: Sequence[jax.Array], other_leaves: Sequence[Any]
    ) -> PyTree:
        """Return the state, with copies in place of leaves that share memory with another argument.

        Args:
          state: the state to be donated.
          leaves: its leaves.
          other_leaves: the leaves of the arguments that are not donated.
        """
        if len(self._returned) != len(leaves):  # the first call
            self._sizes = [leaf.nbytes for leaf in leaves]
            new_leaves = leaves
        else:
            new_leaves = [
                leaf for ref, leaf in zip(self._returned, leaves, strict=True) if ref() is not leaf
            ]
        other_arrays = [leaf for leaf in other_leaves if isinstance(leaf, jax.Array)]
        sizes = {leaf.nbytes for leaf in [*new_leaves, *other_arrays]}
        holders = other_arrays if sizes.intersection(self._sizes) else []
        taken_addresses = {address for leaf in holders for address in _addresses(leaf)}
        shared_indices: list[int] = []
        for i, size in enumerate(self._sizes):
            if size in sizes:
                addresses = _addresses(leaves[i])
                if not taken_addresses.isdisjoint(addresses):
                    shared_indices.append(i)
                taken_addresses.update(addresses)
        if not shared_indices:
            return state
        copies = dict(
            zip(shared_indices, self._copied([leaves[i] for i in shared_indices]), strict=True)
        )
        return jax.tree.unflatten(
            jax.tree.structure(state), [copies.get(i, leaf) for i, leaf in enumerate(leaves)]
        )

    def _copied(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        shardings = tuple(leaf.sharding for leaf in leaves)
        with jax.set_mesh(None):
            leaves_on_auto_axes = jax.device_put(
                list(leaves), [on_auto_axes(sharding) for sharding in shardings]
            )
            return _copy_program(self._mesh, shardings)(leaves_on_auto_axes)


@functools.lru_cache(maxsize=8)
def _copy_program(mesh: Mesh, shardings: tuple[Sharding, ...]) -> jax.stages.Wrapped:
    return jax.jit(on_mesh(mesh, copied), out_shardings=list(shardings))


def _addresses(leaf: jax.Array | np.ndarray) -> set[tuple[Sharding, int]]:
    """Return the addresses of an array's shards in this process.

    None for a numpy array or an array without elements.
    """
    if not isinstance(leaf, jax.Array) or not leaf.size or leaf.is_deleted():
        return set()
    array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    shards = (array.addressable_data(i) for i in range(len(array.sharding.addressable_devices)))
    return {(shard.sharding, shard.unsafe_buffer_pointer()) for shard in shards}
