"""Micro-batches: the rows cut into equal parts, and what each gives summed in a scan."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from shardopt.core.types import PyTree, wide_dtype
from shardopt.engine.loss import LossParts


def cut(batch: PyTree, count: int) -> PyTree:
    """Return rows as micro-batches [count, rows, ...]; each gets the numbers that all rows share."""

    def one(x: jax.Array) -> jax.Array:
        return x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else jnp.broadcast_to(x, (count,))

    return jax.tree.map(one, batch)


def numbers(count: int) -> jax.Array:
    """Return the numbers of the micro-batches."""
    return jnp.arange(count, dtype=jnp.int32)


def accumulate(
    one_micro_batch: Callable[..., tuple[list[jax.Array], LossParts]],
    batch: PyTree,
    count: int,
    keep: Callable[[list[jax.Array]], list[jax.Array]],
    sum_weights: Callable[[], Sequence[jax.Array]],
    cut: Callable[[PyTree, int], PyTree] = cut,
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
        grads, parts = one_micro_batch(batch, jnp.int32(0))
        return grads, jax.tree.map(lambda x: x[None], parts)

    def body(sums, micro_batch_and_index):
        grads, parts = one_micro_batch(*micro_batch_and_index, *weights)
        return keep([total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]), parts

    micro_batches = cut(batch, count), numbers(count)
    shapes, found = jax.eval_shape(one_micro_batch, *jax.tree.map(lambda x: x[0], micro_batches))
    weights = [sum_weights()] if isinstance(found.loss.weight, tuple) else []
    zeros = keep([jnp.zeros(one.shape, wide_dtype(one.dtype)) for one in shapes])
    sums, parts = jax.lax.scan(body, zeros, micro_batches)
    return [total.astype(one.dtype) for total, one in zip(sums, shapes, strict=True)], parts
