"""Which parameters weight decay is for, where blocks are stacked."""

import re

import jax
import jax.numpy as jnp

from shardopt.core import PyTree, path_text

# not the paths of a list or dict of blocks, which are numbered
_STACKED = r"(^|/)(first_)?blocks(/(?!\d+(/|$))|$)"


def decay_mask(params: PyTree, *, stacked: str = _STACKED) -> PyTree:
    """Return a tree of booleans: True for weights, False for norms, biases and scalars.

    Pass it as the `mask` of `optax.adamw`, which calls it with the parameters. A mask by `x.ndim > 1`
    decays the norms and biases of stacked blocks too: they are [L, D].

    Args:
      params: the parameters.
      stacked: a regex of the key paths whose first dim counts blocks, and not a dim of the weight.
        By default below "blocks" and "first_blocks", but not the paths of a list, such as
        "blocks/0/w".

    Returns:
      A tree like the parameters. A leaf is True if one block of it has two dims or more, and its
      name does not end in "bias", "scale" or "norm". The "/value" of a variable of flax is no name.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"blocks": {"norm": jnp.ones((3, 4)), "up": jnp.ones((3, 4, 8))}, "head": jnp.ones((9, 4))}
      >>> decay_mask(params)
      {'blocks': {'norm': False, 'up': True}, 'head': True}
    """

    def is_weight(path: jax.tree_util.KeyPath, leaf: jax.Array) -> bool:
        name = path_text(path)
        num_dims = jnp.ndim(leaf) - (re.search(stacked, name) is not None)
        return num_dims > 1 and not name.removesuffix("/value").endswith(("bias", "scale", "norm"))

    return jax.tree_util.tree_map_with_path(is_weight, params)
