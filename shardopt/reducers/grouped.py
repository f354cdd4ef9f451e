"""`grouped`: a reducer run on each of several groups of leaves, which then share nothing on the wire."""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

from shardopt.reducers.reducer import Reducer


def grouped(reducer: Reducer, keys: Sequence[Hashable]) -> Reducer:
    """Return a reducer of lists of leaves, of which those with different keys travel apart.

    Where leaves travel together they can share the scale of a block. That must not happen between a leaf that is split
    over some other mesh axis and one that is whole over it: each shard would scale the whole one differently.

    Args:
      reducer: any reducer.
      keys: of each leaf.

    Returns:
      A `Reducer` whose state is a tuple, one of the wrapped reducer's states a group; `reducer` itself if all keys are
      equal.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> from shardopt.reducers.grouped import grouped
      >>> reducer = grouped(so.reducers.int8(block_size=4), ["split", "whole"])
      >>> leaves = [jnp.array([[127.0]]), jnp.array([[1.0, 2.0]])]
      >>> mean, _ = jax.vmap(lambda g: reducer.reduce(g, reducer.init(g), "data"), axis_name="data")(leaves)
      >>> print(mean[1][0])
      [1.007874 2.      ]
    """
    groups = {key: [i for i, own in enumerate(keys) if own == key] for key in dict.fromkeys(keys)}
    if len(groups) < 2:
        return reducer

    def pick(leaves: Sequence[Any]) -> list[list[Any]]:
        return [[leaves[i] for i in members] for members in groups.values()]

    def put_back(parts: Sequence[Sequence[Any]]) -> list[Any]:
        found = dict(zip(chain(*groups.values()), chain(*parts), strict=True))
        return [found[i] for i in range(len(keys))]

    def init(params):
        return tuple(reducer.init(part) for part in pick(params))

    def reduce(grads, state, axis_name):
        done = [reducer.reduce(part, own, axis_name) for part, own in zip(pick(grads), state, strict=True)]
        return put_back([mean for mean, _ in done]), tuple(own for _, own in done)

    def transmit(grads, memory, state, axis_name):
        memories = [None] * len(groups) if memory is None else pick(memory)
        each = zip(pick(grads), memories, state, strict=True)
        done = [reducer.transmit(part, kept, own, axis_name) for part, kept, own in each]
        return (
            put_back([mean for mean, _, _ in done]),
            put_back([left for _, left, _ in done]),
            tuple(s for *_, s in done),
        )

    def wire_bytes(abstract_params, axis_size):
        return sum(reducer.wire_bytes(part, axis_size) for part in pick(abstract_params))

    return Reducer(reducer.name, init, reduce, wire_bytes, transmit)
