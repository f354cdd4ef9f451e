"""Arguments of a program that share memory: the state gets copies, since a buffer can be donated once.

XLA ends the process (jaxlib 0.10.2) or refuses the call (0.12) where two arguments are one buffer and one is donated.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from shardopt.core.types import PyTree
from shardopt.engine.inputs import copied
from shardopt.engine.user_mesh import on_auto_axes
from shardopt.mesh import on_mesh


class DonatedState:
    """Gives each leaf of a donated state a buffer of its own, before every call.

    The leaves that a program returned share no memory with each other. So only leaves that were put into the state since
    are looked at, and those of the batch. Addresses are compared where sizes are equal. A state that is handed back as it
    came costs a fraction of a microsecond a leaf.

    Args:
      mesh: of the programs that the state goes through.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._returned: list[weakref.ref[Any]] = []
        self._sizes: list[int] = []

    def remember(self, state: PyTree) -> None:
        """Remember what a program returned, without keeping it alive."""
        self._returned = list(map(weakref.ref, jax.tree.leaves(state)))

    def distinct(self, state: PyTree, leaves: Sequence[jax.Array], others: Sequence[Any]) -> PyTree:
        """Return the state, with copies in place of leaves that share memory with another argument.

        Args:
          state: the state to be donated.
          leaves: its leaves.
          others: the leaves of the arguments that are not donated.
        """
        if len(self._returned) != len(leaves):  # the first call
            self._sizes = [leaf.nbytes for leaf in leaves]
            new = leaves
        else:
            new = [leaf for ref, leaf in zip(self._returned, leaves, strict=True) if ref() is not leaf]
        arrays = [leaf for leaf in others if isinstance(leaf, jax.Array)]
        sizes = {leaf.nbytes for leaf in [*new, *arrays]}
        taken = (
            {address for leaf in arrays for address in _addresses(leaf)} if sizes.intersection(self._sizes) else set()
        )
        shared: list[int] = []
        for i, size in enumerate(self._sizes):
            if size in sizes:
                addresses = _addresses(leaves[i])
                if not taken.isdisjoint(addresses):
                    shared.append(i)
                taken.update(addresses)
        if not shared:
            return state
        copies = dict(zip(shared, self._copied([leaves[i] for i in shared]), strict=True))
        return jax.tree.unflatten(jax.tree.structure(state), [copies.get(i, leaf) for i, leaf in enumerate(leaves)])

    def _copied(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        where = tuple(leaf.sharding for leaf in leaves)
        with jax.set_mesh(None):
            placed = jax.device_put(list(leaves), [on_auto_axes(one) for one in where])
            return _copy_program(self._mesh, where)(placed)


@functools.lru_cache(maxsize=8)
def _copy_program(mesh: Mesh, where: tuple[Sharding, ...]) -> jax.stages.Wrapped:
    return jax.jit(on_mesh(mesh, copied), out_shardings=list(where))


def _addresses(leaf: jax.Array | np.ndarray) -> set[tuple[Sharding, int]]:
    """Return where the shards of this process lie; nothing of a numpy array, or of one without elements."""
    if not isinstance(leaf, jax.Array) or not leaf.size or leaf.is_deleted():
        return set()
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    shards = (data.addressable_data(i) for i in range(len(data.sharding.addressable_devices)))
    return {(shard.sharding, shard.unsafe_buffer_pointer()) for shard in shards}
