"""The sums of the bits of a state, which a checkpoint or snapshot stores: a copy that is not the
state is not restored.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.checkpoint._tree import LeafPath, leaves_by_path, show
from shardopt.core import Arrays, DamagedCheckpointError, PyTree, error_text
from shardopt.core._checksum import checksum
from shardopt.mesh import without_mesh

LeafSums = dict[LeafPath, str]
"""The sum of each leaf in hexadecimal, by key path. It does not depend on the mesh."""


def leaf_sums(state: PyTree) -> LeafSums:
    """Return the sums of the leaves of a state. With several processes all must call it."""
    leaves = leaves_by_path(state)
    arrays = list(leaves.values())
    meshes = [
        leaf.sharding.mesh
        for leaf in arrays
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    with without_mesh():
        # One program for all leaves, and 8 bytes a leaf come to the host.
        sums = np.asarray(jax.jit(_sums, out_shardings=replicated)(arrays))
    return {
        path: f"{int(first):08x}{int(second):08x}"
        for path, (first, second) in zip(leaves, sums, strict=True)
    }


def _sums(leaves: Arrays) -> jax.Array:
    return jnp.stack([checksum(leaf) for leaf in leaves])


def total_of(sums: LeafSums) -> tuple[int, int]:
    """Return the sum of all leaves, as `core._checksum.joined` does."""
    halves = [(int(text[:8], 16), int(text[8:], 16)) for text in sums.values()]
    first, second = (
        sum((2 * i + 1) * pair[k] for i, pair in enumerate(halves)) % 2**32 for k in (0, 1)
    )
    return first, second


def check_sums(source: str, state: PyTree, sums: Mapping[LeafPath, str] | None) -> None:
    """Refuse a state whose sums are not the stored ones; with several processes all must call it.

    The state may be a part of the stored one.

    Raises:
      DamagedCheckpointError: if a leaf has another sum.
    """
    if sums is None:
        return
    changed = [
        f"{show(path)}: sum {text}, not {sums[path]}"
        for path, text in leaf_sums(state).items()
        if sums[path] != text
    ]
    if changed:
        problem = f"{source} does not hold the state that it was saved from."
        raise DamagedCheckpointError(
            error_text(problem, changed, fix="go back to an earlier step.")
        )
