"""A chunk, the blocks that a stage runs one after another, forwards and backwards, with what it keeps in rings."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.pipeline import rings
from shardopt.pipeline.passes import Passes
from shardopt.pipeline.rings import Arrays


class Chunk(NamedTuple):
    """The blocks of one chunk of one micro-batch, for the tick at hand.

    Attributes:
      passes: a block taken apart.
      num_blocks: k, how many there are in a chunk.
      first: where the first of them lies in this stage's weights and gradients, [chunks * k, ...].
      given: `given(j)`: the weights and other arguments of block j of the chunk.
      reduce: what a block's weight gradient goes through before it is added up.
    """

    passes: Passes
    num_blocks: int
    first: Any
    given: Callable[[Any], Arrays]
    reduce: Callable[[Arrays], Arrays]


def forward(chunk: Chunk, block: Callable[[Arrays, Arrays], Arrays], x: Arrays) -> Arrays:
    """Run the blocks, keeping nothing."""
    return _over(chunk, x, lambda j, x: block(chunk.given(j), x))


def forward_keeping(chunk: Chunk, x: Arrays, ring: Arrays, slot: Any) -> tuple[Arrays, Arrays]:
    """Run the blocks, and put into the ring what the backward pass needs of each; a slot is k places long."""

    def one(j, carry):
        x, ring = carry
        y, kept = chunk.passes.forward(chunk.given(j), x)
        return y, rings.put(ring, slot * chunk.num_blocks + j, kept)

    return _over(chunk, (x, ring), one)


def backward(chunk: Chunk, ring: Arrays, slot: Any, dy: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and add those of the weights to `grads`."""

    def one(j, carry):
        dy, grads = carry
        kept = rings.take(ring, slot * chunk.num_blocks + j)
        dx, dw = chunk.passes.both(chunk.given(j), kept, dy)
        return dx, rings.add(grads, chunk.first + j, chunk.reduce(dw))

    return _over(chunk, (dy, grads), one, reverse=True)


def backward_deferring(
    chunk: Chunk, ring: Arrays, slot: Any, dy: Arrays, later: Arrays, later_slot: Any, *, keep: Sequence[int]
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and put into `later` what the weight pass needs, of `keep` in the ring too."""

    def one(j, carry):
        dy, later = carry
        kept = rings.take(ring, slot * chunk.num_blocks + j)
        dx, deferred = chunk.passes.backward(chunk.given(j), kept, dy)
        left = [*deferred, *(kept[i] for i in keep)]
        return dx, rings.put(later, later_slot * chunk.num_blocks + j, left)

    return _over(chunk, (dy, later), one, reverse=True)


def weight(chunk: Chunk, kept: Callable[[Any], Arrays], deferred: Callable[[Any], Arrays], grads: Arrays) -> Arrays:
    """Add the gradients of the weights to `grads`; `kept(j)` and `deferred(j)` read the rings at block j."""

    def one(j, grads):
        dw = chunk.passes.weight(chunk.given(j), kept(j), deferred(j))
        return rings.add(grads, chunk.first + j, chunk.reduce(dw))

    return _over(chunk, grads, one)


def _over(chunk: Chunk, carry: Any, one: Callable[[Any, Any], Any], *, reverse: bool = False) -> Any:
    body = lambda carry, j: (one(j, carry), None)  # noqa: E731
    return jax.lax.scan(body, carry, jnp.arange(chunk.num_blocks), reverse=reverse)[0]
