"""Leaves go through a reducer together if they are split over the same axes, apart from the axes of
the mean.
"""

import jax


def groups_of(leaves, over):
    """Return positions of leaves (arrays or shapes, with shardings), a list a group, in order of
    appearance.
    """
    groups = {}
    for i, leaf in enumerate(leaves):
        mesh = leaf.sharding.mesh
        named = jax.tree.leaves(
            [list(e) if isinstance(e, tuple) else e for e in leaf.sharding.spec]
        )
        groups.setdefault(
            frozenset(a for a in named if mesh.shape[a] > 1 and a not in over), []
        ).append(i)
    return list(groups.values())


def stated_bytes(reducer, leaves, over, paths=None):
    """Return the bytes that a reducer states for leaves as each device holds them, group by group.

    Some look at key paths.
    """
    paths = paths or [f"leaf{i}" for i in range(len(leaves))]
    size = 1
    for axis in over:
        size *= leaves[0].sharding.mesh.shape[axis]
    held = [
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves
    ]
    return sum(
        reducer.wire_bytes({paths[i]: held[i] for i in group}, size)
        for group in groups_of(leaves, over)
    )
