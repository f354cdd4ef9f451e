"""A chunk, the blocks that a stage runs one after another, forwards and backwards, with what it keeps in rings."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.pipeline import rings
from shardopt.pipeline.passes import Passes
from shardopt.pipeline.rings import Arrays

Reduce = Callable[[Arrays], Arrays]
"""What a block's weight gradient goes through before it is added up."""


class Chunk(NamedTuple):
    """The blocks of one chunk of one micro-batch, for the tick at hand.

    Attributes:
      num_blocks: k, how many there are in a chunk.
      first: where the first of them lies in this stage's weights and gradients, [chunks * k, ...].
      given: `given(j)`: the weights and other arguments of block j of the chunk.
    """

    num_blocks: int
    first: Any
    given: Callable[[Any], Arrays]


class Place(NamedTuple):
    """Where a chunk keeps what its blocks leave for later: of each ring, one slot of k places.

    Attributes:
      rings: arrays [slots * k, ...].
      slots: which slot, of each.
    """

    rings: Arrays
    slots: Sequence[Any]


def forward(chunk: Chunk, block: Callable[[Arrays, Arrays], Arrays], x: Arrays) -> Arrays:
    """Run the blocks, keeping nothing."""
    return _over(chunk, x, lambda j, x: block(chunk.given(j), x))


def forward_keeping(chunk: Chunk, passes: Passes, x: Arrays, kept: Place) -> tuple[Arrays, Arrays]:
    """Run the blocks, and put down what the backward pass needs of each; return the output and the rings."""

    def one(j, carry):
        x, ring = carry
        y, left = passes.forward(chunk.given(j), x)
        return y, _put(chunk, kept._replace(rings=ring), j, left)

    return _over(chunk, (x, kept.rings), one)


def backward(
    chunk: Chunk, passes: Passes, kept: Place, dy: Arrays, grads: Arrays, reduce: Reduce
) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and add those of the weights to `grads`."""

    def one(j, carry):
        dy, grads = carry
        dx, dw = passes.both(chunk.given(j), _take(chunk, kept, j), dy)
        return dx, rings.add(grads, chunk.first + j, reduce(dw))

    return _over(chunk, (dy, grads), one, reverse=True)


def backward_deferring(chunk: Chunk, passes: Passes, kept: Place, dy: Arrays, deferred: Place) -> tuple[Arrays, Arrays]:
    """Compute the gradient of the input, and put down what the weight pass needs; return it and the rings."""

    def one(j, carry):
        dy, ring = carry
        dx, left = passes.backward(chunk.given(j), _take(chunk, kept, j), dy)
        return dx, _put(chunk, deferred._replace(rings=ring), j, left)

    return _over(chunk, (dy, deferred.rings), one, reverse=True)


def weight(chunk: Chunk, passes: Passes, kept: Place, deferred: Place, grads: Arrays, reduce: Reduce) -> Arrays:
    """Add the gradients of the weights to `grads`; `kept` is of what the weight pass reads alone."""

    def one(j, grads):
        dw = passes.weight(chunk.given(j), _take(chunk, kept, j), _take(chunk, deferred, j))
        return rings.add(grads, chunk.first + j, reduce(dw))

    return _over(chunk, grads, one)


def _put(chunk: Chunk, place: Place, j: Any, values: Arrays) -> Arrays:
    each = zip(place.rings, place.slots, values, strict=True)
    return [rings.put([ring], slot * chunk.num_blocks + j, [x])[0] for ring, slot, x in each]


def _take(chunk: Chunk, place: Place, j: Any) -> Arrays:
    each = zip(place.rings, place.slots, strict=True)
    return [rings.take([ring], slot * chunk.num_blocks + j)[0] for ring, slot in each]


def _over(chunk: Chunk, carry: Any, one: Callable[[Any, Any], Any], *, reverse: bool = False) -> Any:
    body = lambda carry, j: (one(j, carry), None)  # noqa: E731
    return jax.lax.scan(body, carry, jnp.arange(chunk.num_blocks), reverse=reverse)[0]
