"""What waits in host memory between steps: optimizer state in `pinned_host`, on the device while it is updated."""

import jax

from shardopt.core.types import PyTree, TrainState
from shardopt.engine.config import StrategyConfig

HOST = "pinned_host"


def on_host(config: StrategyConfig, state: TrainState, shardings: TrainState) -> TrainState:
    """Return the shardings of a train state, with those of what is offloaded in host memory.

    Counts and other scalars stay on the device: a copy of one costs as much as one of a moment.

    Args:
      config: of the strategy.
      state: the train state as shapes.
      shardings: of its leaves, in device memory.
    """
    if "opt_state" not in config.offload:
        return shardings
    move = lambda leaf, where: where.with_memory_kind(HOST) if leaf.shape else where  # noqa: E731
    return shardings._replace(opt_state=jax.tree.map(move, state.opt_state, shardings.opt_state))


def to_device(config: StrategyConfig, opt_state: PyTree, shardings: PyTree) -> PyTree:
    """Bring an optimizer state to where it is updated, its shardings in device memory."""
    return jax.device_put(opt_state, shardings) if "opt_state" in config.offload else opt_state


def to_host(config: StrategyConfig, opt_state: PyTree, shardings: PyTree) -> PyTree:
    """Bring it back, its shardings those of `on_host`."""
    return jax.device_put(opt_state, shardings) if "opt_state" in config.offload else opt_state
