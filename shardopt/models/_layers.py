"""The parts of the decoder that read no config: casts, rotary positions, layouts, and how sequence
parallelism shards activations.

Suffixes: B sequences, T positions, S cached positions, D width, H heads, K width of a head, F
hidden units.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from shardopt import nn
from shardopt.core import is_floating
from shardopt.low_precision._weight import RoundedWeight

Tree = TypeVar("Tree")


def cast(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Return weights in the dtype of a model's products; None keeps the dtype of each weight.

    Keys stay as they are.
    """
    if dtype is None:
        return tree

    def cast_leaf(leaf: Array | RoundedWeight) -> Array | RoundedWeight:
        return leaf.astype(dtype) if is_floating(leaf) else leaf

    return jax.tree.map(cast_leaf, tree, is_leaf=lambda leaf: isinstance(leaf, RoundedWeight))


def places(
    length: int, positions: Int[Array, "B T"] | None, order: Int[Array, "B T"] | None
) -> Int[Array, "*B T"]:
    """Return the positions for position embeddings: `positions`, else `order`, else
    `nn.positions(length)`.
    """
    explicit_positions = order if positions is None else positions
    return nn.positions(length) if explicit_positions is None else explicit_positions


def visible(
    queries: Int[Array, "B T"], length: int, window: Int[Array, ""] | int
) -> Bool[Array, "B T S"]:
    """Return which of the first `length` positions the queries at these positions see, the last
    `window` of them.
    """
    distance = queries[:, :, None] - jnp.arange(length)[None, None]
    return (distance >= 0) & (distance < window)
