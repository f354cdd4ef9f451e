"""Micro-batches: the rows cut into equal parts, and their results summed in a scan."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.core._types import PyTree, wide_dtype
from shardopt.engine._batch_dims import cut_batch
from shardopt.engine._config import StrategyConfig
from shardopt.engine._loss import LossParts


def cut(config: StrategyConfig, batch: PyTree, count: int) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """Return the rows as micro-batches, as `cut_batch` does."""
    return cut_batch(config, functools.partial(_cut, count), batch)


def _cut(count: int, x: jax.Array, path: str, dim: int) -> jax.Array:
    """Return x [..., rows, ...] as [count, ..., rows / count, ...]."""
    del path  # arrays in the per-device view need no placement
    parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def numbers(count: int) -> jax.Array:
    """Return the indices of the micro-batches."""
    return jnp.arange(count, dtype=jnp.int32)


def accumulate(
    run_micro_batch: Callable[..., tuple[list[jax.Array], LossParts]],
    batch: PyTree,
    count: int,
    constrain_sums: Callable[[list[jax.Array]], list[jax.Array]],
    sum_weights: Callable[[], Sequence[jax.Array]],
    cut: Callable[[PyTree, int], tuple[list[jax.Array], Callable[..., PyTree]]],
) -> tuple[list[jax.Array], LossParts]:
    """Sum gradients over micro-batches in a scan, in fp32 at least; loss parts are stacked [count, ...].

    Args:
      run_micro_batch: takes a micro-batch and its number, and returns its gradients and loss parts.
      batch: the rows.
      count: the number of micro-batches.
      constrain_sums: constrains the shardings of the sums.
      sum_weights: returns the summed weights of a loss of several terms, which each micro-batch then gets. It evaluates
        the loss once more; the compiler removes all computations that the weights do not need.
      cut: cuts the rows.
    """
    if count == 1:
        grads, parts = run_micro_batch(batch, jnp.int32(0))
        return grads, jax.tree.map(lambda x: x[None], parts)

    leaves, assemble = cut(batch, count)

    def run(leaves, index, *weights):
        return run_micro_batch(assemble(leaves), index, *weights)

    def body(sums, leaves_and_index):
        grads, parts = run(*leaves_and_index, *weights)
        return constrain_sums(
            [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
        ), parts

    micro_batches = leaves, numbers(count)
    grad_shapes, part_shapes = jax.eval_shape(run, *jax.tree.map(lambda x: x[0], micro_batches))
    weights = [sum_weights()] if isinstance(part_shapes.loss.weight, tuple) else []
    zeros = constrain_sums([jnp.zeros(grad.shape, wide_dtype(grad.dtype)) for grad in grad_shapes])
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    return [total.astype(grad.dtype) for total, grad in zip(sums, grad_shapes, strict=True)], parts
