"""Where optimizer state lives, for any optax transformation: by likeness to the parameters."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardopt.partition.plan import LeafPlan, data_dim


def state_specs(
    abstract_state: Any, plans: Sequence[tuple[Any, LeafPlan]], *, split: bool, data_size: int, min_shard_elements: int
) -> Any:
    """Give every leaf of an optimizer state its `PartitionSpec`.

    A leaf whose key path ends in that of a parameter of the same shape (a moment) lives as the parameter would.
    Any other leaf (Adafactor's factored moments, SM3's accumulators, a count) is a leaf of its own: split over
    data on the largest dim that it divides. The update runs in the global view, so this choice never changes
    the numbers, only the bytes.

    Args:
      abstract_state: the state, of which only shapes are read.
      plans: the trainable parameters' key paths (as jax gives them) and plans.
      split: whether the placement splits optimizer state over data.
      data_size: size of the data axis.
      min_shard_elements: leaves with fewer elements stay whole.

    Returns:
      A tree like the state, of `PartitionSpec`.
    """
    by_path = {tuple(path): plan for path, plan in plans}

    def place(path, leaf):
        for start in range(len(path) + 1):  # the longest ending first
            plan = by_path.get(tuple(path[start:]))
            if plan is not None and plan.shape == leaf.shape:
                return plan.spec(split=split)
        free = PartitionSpec(*[None] * len(leaf.shape))
        dim, _ = data_dim(leaf.shape, free, data_size, min_shard_elements) if split else (None, "")
        return PartitionSpec(*("data" if one == dim else None for one in range(len(leaf.shape))))

    return jax.tree_util.tree_map_with_path(place, abstract_state)
