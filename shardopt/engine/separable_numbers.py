"""Where a trace cannot tell whether a loss is a mean over rows: numbers, of a few rows and of their two halves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.collectives import per_device
from shardopt.core.block_model import LossFn, call
from shardopt.core.types import PyTree
from shardopt.engine.batches import num_rows
from shardopt.engine.config import StrategyConfig
from shardopt.engine.loss import loss_parts
from shardopt.mesh import on_mesh

FEW = 4
"""Rows of each half, at most."""
MUCH = 2**31
"""Bytes of sharded parameters above which they are not put on every device for a check."""


def deviation(config: StrategyConfig, params: PyTree, batch: PyTree, shares: int) -> str | None:
    """Return by how much the loss, or a metric, of two pieces differs from that of their rows together; None if it does not.

    With P(b) the loss of rows b as total and weight, and a, b two pieces: (P(a) + P(b)) is compared with P(a and b), on
    rows of the batch as they are; at other parameters, so that gradients are compared too; and on rows in another order,
    their floating numbers drawn anew around what they are, so that a mask of ones hides nothing. A loss that takes a key
    gets none.

    Args:
      config: of the step.
      params: the parameters.
      batch: a global batch, placed.
      shares: into how many pieces it is cut.
    """
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    if config.placement.params and held > MUCH:
        return f"Numbers would need all parameters, {held:,} bytes, on every device, so they cannot tell."
    rows = num_rows(batch)
    half = min(FEW, rows // shares) if rows >= 2 * (rows // shares) else rows // 2
    half = max(half, 1)
    everywhere = PartitionSpec()  # each device runs all of these rows, where a loss of the per-device view runs
    run = functools.partial(_compare, config.loss_fn, half)
    run = per_device(run, config.mesh, in_specs=everywhere, out_specs=everywhere)

    def few(params: PyTree, batch: PyTree, *how: Any) -> dict[str, jax.Array]:
        return run(params, jax.tree.map(lambda x: x[: 2 * half] if x.ndim else x, batch), *how)

    compare = jax.jit(on_mesh(config.mesh, few))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in _floating(params))
    try:
        found = [compare(params, batch, key, *how) for key, how in enumerate([(0.0, 0.0), (0.1, 0.0), (0.1, 0.5)])]
    except Exception as error:
        return f"Run by itself it fails, so numbers cannot tell: {type(error).__name__}: {error}".splitlines()[0]
    finite = {name: [float(one[name]) for one in found if np.isfinite(one[name])] for name in found[0]}
    worst = {name: max(values, default=float("inf")) for name, values in finite.items()}
    wrong = {name: value for name, value in worst.items() if value > eps**0.5}
    if not wrong:
        return None
    listed = ", ".join(f"{name} by {value:.1e}" for name, value in wrong.items())
    return f"Numbers of two pieces of {half} rows differ, relatively, from those of their rows together: {listed}."


def _floating(params: PyTree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _compare(
    loss_fn: LossFn, half: int, params: PyTree, batch: PyTree, seed: jax.Array, params_by: jax.Array, rows_by: jax.Array
) -> dict[str, jax.Array]:
    key = jax.random.key(seed)

    def moved(leaf: jax.Array, number: int, by: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = jax.random.normal(jax.random.fold_in(key, number), leaf.shape, jnp.float32)
        return leaf * (1 + by * noise).astype(leaf.dtype)

    params = _numbered(params, lambda leaf, number: moved(leaf, number, params_by))
    order = jnp.where(rows_by > 0, jax.random.permutation(key, 2 * half), jnp.arange(2 * half))
    both = _numbered(batch, lambda leaf, number: moved(leaf[order] if leaf.ndim else leaf, 1000 + number, rows_by))

    def parts(rows: PyTree) -> dict[str, Any]:
        returned = loss_parts("loss_fn", call(loss_fn, None, 0, params, rows), num_rows(rows))
        return {"the loss": returned.loss, **returned.metrics}

    whole = parts(both)
    one, two = (parts(jax.tree.map(lambda x, at=at: x[at : at + half] if x.ndim else x, both)) for at in (0, half))
    return {name: _difference(whole[name], one[name], two[name]) for name in whole}


def _numbered(tree: PyTree, change: Any) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([change(leaf, number) for number, leaf in enumerate(leaves)])


def _difference(whole: Any, one: Any, two: Any) -> jax.Array:
    """Return how far a quotient of sums over two pieces is from that of their rows, relative to the largest entry."""
    if not hasattr(whole, "weight"):
        return jnp.zeros(())
    pairs = zip(
        *(jax.tree.leaves(part) for both in (whole, one, two) for part in (both.total, both.weight)), strict=True
    )
    worst = jnp.zeros(())
    for total, weight, total_1, weight_1, total_2, weight_2 in pairs:
        expected, found = total / weight, (total_1 + total_2) / (weight_1 + weight_2)
        scale = jnp.maximum(jnp.max(jnp.abs(expected)), jnp.max(jnp.abs(found)))
        worst = jnp.maximum(worst, jnp.max(jnp.abs(expected - found)) / jnp.where(scale > 0, scale, 1))
    return worst
