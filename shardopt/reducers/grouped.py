"""`grouped`: a reducer of lists of leaves, run on each of several groups, which then share nothing on the wire."""

from collections.abc import Hashable, Sequence
from typing import Any

from shardopt.reducers.reducer import Reducer


def grouped(reducer: Reducer, keys: Sequence[Hashable], paths: Sequence[str]) -> Reducer:
    """Return a reducer of lists of leaves, of which those with different keys travel apart.

    Where leaves travel together they can share the scale of a block. That must not happen between a leaf that is split
    over some other mesh axis and one that is whole over it: each shard would scale the whole one differently.

    Args:
      reducer: any reducer.
      keys: of each leaf.
      paths: of each leaf, its key path in the parameters, which tells some reducers how to see it. All different.

    Returns:
      A `Reducer` whose state is a tuple, one of the wrapped reducer's states a group, of dicts by key path.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> from shardopt.reducers.grouped import grouped
      >>> reducer = grouped(so.reducers.int8(block_size=4), ["split", "whole"], ["kernel", "bias"])
      >>> leaves = [jnp.array([[127.0]]), jnp.array([[1.0, 2.0]])]
      >>> mean, _ = jax.vmap(lambda g: reducer.reduce(g, reducer.init(g), "data"), axis_name="data")(leaves)
      >>> print(mean[1][0])
      [1.007874 2.      ]
    """
    groups = {key: [i for i, own in enumerate(keys) if own == key] for key in dict.fromkeys(keys)}

    def pick(leaves: Sequence[Any]) -> list[dict[str, Any]]:
        return [{paths[i]: leaves[i] for i in members} for members in groups.values()]

    def put_back(parts: Sequence[dict[str, Any]]) -> list[Any]:
        found = {path: leaf for part in parts for path, leaf in part.items()}
        return [found[path] for path in paths]

    def init(params):
        return tuple(reducer.init(part) for part in pick(params))

    def reduce(grads, state, axis_name):
        done = [reducer.reduce(part, own, axis_name) for part, own in zip(pick(grads), state, strict=True)]
        return put_back([mean for mean, _ in done]), tuple(own for _, own in done)

    def transmit(grads, memory, state, axis_name):
        memories = [None] * len(groups) if memory is None else pick(memory)
        each = zip(pick(grads), memories, state, strict=True)
        means, lefts, states = [], [], []
        for mean, left, own in (reducer.transmit(part, kept, own, axis_name) for part, kept, own in each):
            means.append(mean)
            lefts.append(left)
            states.append(own)
        return put_back(means), put_back(lefts), tuple(states)

    def wire_bytes(abstract_params, axis_size):
        return sum(reducer.wire_bytes(part, axis_size) for part in pick(abstract_params))

    return Reducer(reducer.name, init, reduce, wire_bytes, transmit)
