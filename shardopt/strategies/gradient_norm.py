"""The norm of a gradient whose leaves are split: one sum for each set of axes, not one a leaf."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.collectives import per_device, sum_over
from shardopt.core.types import PyTree, wide_dtype
from shardopt.strategies.gradients import grad_specs
from shardopt.strategies.layout import Layout
from shardopt.strategies.recipe import Recipe


def gradient_norm(recipe: Recipe, layout: Layout, grads: PyTree) -> Any:
    """Return the Euclidean norm of all leaves together, summed in fp32 at least; a row each of replicas that train apart.

    In the per-device view: the partitioner would sum leaf by leaf, and between processes on CPU each is a round trip.
    """
    specs = grad_specs(recipe, layout)

    def local(leaves):
        totals: dict[tuple[str, ...], Any] = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            axes = tuple(axis for axis in spec if axis is not None and axis not in recipe.rows)
            total = jnp.sum(jnp.square(jnp.abs(leaf.astype(wide_dtype(leaf.dtype)))))
            totals[axes] = totals[axes] + total if axes in totals else total
        square = sum(sum_over([total], axes)[0] for axes, total in totals.items())
        return jnp.sqrt(square).reshape([1 for _ in recipe.rows])

    run = per_device(local, recipe.mesh, in_specs=(specs,), out_specs=PartitionSpec(*recipe.rows))
    return run(jax.tree.leaves(grads))
