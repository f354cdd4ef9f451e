"""Micro-batches: the rows cut into equal parts, and what each gives summed in a scan."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, wide_dtype
from shardopt.engine.batch_dims import cut_batch
from shardopt.engine.config import StrategyConfig
from shardopt.engine.loss import LossParts


def cut(config: StrategyConfig, batch: PyTree, count: int) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """Return the rows as micro-batches, as `cut_batch` does."""
    return cut_batch(config, functools.partial(_cut, count), batch)


def _cut(count: int, x: jax.Array, path: str, dim: int) -> jax.Array:
    """Return x [..., rows, ...] as [count, ..., rows / count, ...]."""
    del path  # on one device there is nothing to place
    parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def numbers(count: int) -> jax.Array:
    """Return the numbers of the micro-batches."""
    return jnp.arange(count, dtype=jnp.int32)


def accumulate(
    run_micro_batch: Callable[..., tuple[list[jax.Array], LossParts]],
    batch: PyTree,
    count: int,
    keep: Callable[[list[jax.Array]], list[jax.Array]],
    sum_weights: Callable[[], Sequence[jax.Array]],
    cut: Callable[[PyTree, int], tuple[list[jax.Array], Callable[..., PyTree]]],
) -> tuple[list[jax.Array], LossParts]:
    """Sum gradients over micro-batches in a scan, in fp32 at least; parts come stacked [count, ...].

    Args:
      one_micro_batch: gives the gradients and the parts of the loss of a micro-batch and its number.
      batch: the rows.
      count: into how many micro-batches they are cut.
      keep: constrains the sums to where they live.
      sum_weights: of a loss of several terms, evaluates it once more, of which the compiler leaves what the weights
        follow from, and returns these summed; each micro-batch then is given them.
      cut: how they are cut.
    """
    if count == 1:
        grads, parts = run_micro_batch(batch, jnp.int32(0))
        return grads, jax.tree.map(lambda x: x[None], parts)

    leaves, assembled = cut(batch, count)

    def run(leaves, index, *weights):
        return run_micro_batch(assembled(leaves), index, *weights)

    def body(sums, leaves_and_index):
        grads, parts = run(*leaves_and_index, *weights)
        return keep([total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]), parts

    micro_batches = leaves, numbers(count)
    shapes, found = jax.eval_shape(run, *jax.tree.map(lambda x: x[0], micro_batches))
    weights = [sum_weights()] if isinstance(found.loss.weight, tuple) else []
    zeros = keep([jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in shapes])
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    return [total.astype(one.dtype) for total, one in zip(sums, shapes, strict=True)], parts
