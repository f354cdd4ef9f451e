"""What to restore into: the optimizer's own abstract state, or one made from the stored structure."""

from typing import Any

import jax

from shardopt.checkpoint.leaves import dtype_of
from shardopt.checkpoint.meta import Meta
from shardopt.checkpoint.tree import rebuild
from shardopt.core.optimizer import ShardedOptimizer


def target_state(who: str, opt: ShardedOptimizer, meta: Meta, abstract_params: Any = None) -> Any:
    """Return `opt.abstract_state`, of the given parameters, of those that opt has seen, or of the stored ones.

    Raises:
      CheckpointError: if opt has seen no parameters and the stored structure cannot be rebuilt.
    """
    if abstract_params is not None:
        return opt.abstract_state(abstract_params)
    try:
        return opt.abstract_state()
    except ValueError:  # the contract's word for "no parameters seen"
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf))
            for path, leaf in meta.leaves.items()
            if path[0] == "params"
        ]
        return opt.abstract_state(rebuild(who, meta.params, leaves))
