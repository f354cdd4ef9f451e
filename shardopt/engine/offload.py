"""What waits in host memory between steps: optimizer state in `pinned_host`; `streamed_update` is how it is updated."""

import jax

from shardopt.core.types import PyTree, TrainState
from shardopt.engine.config import StrategyConfig

HOST = "pinned_host"


def on_host(config: StrategyConfig, state: TrainState, shardings: TrainState) -> TrainState:
    """Return the shardings of a train state, with those of what is offloaded in host memory.

    Args:
      config: of the strategy.
      state: the train state as shapes.
      shardings: of its leaves, in device memory.
    """
    if "opt_state" not in config.offload:
        return shardings
    return shardings._replace(opt_state=host_shardings(state.opt_state, shardings.opt_state))


def host_shardings(state: PyTree, shardings: PyTree) -> PyTree:
    """Return the shardings of an optimizer state in host memory.

    Counts and other scalars stay on the device: a copy of one costs as much as one of a moment.
    """
    return jax.tree.map(lambda leaf, where: where.with_memory_kind(HOST) if leaf.shape else where, state, shardings)


def to_device(config: StrategyConfig, state: PyTree, shardings: PyTree) -> PyTree:
    """Bring state to the device, its shardings there."""
    return jax.device_put(state, shardings) if "opt_state" in config.offload else state


def to_host(config: StrategyConfig, state: PyTree, shardings: PyTree) -> PyTree:
    """Bring it back, its shardings those in host memory."""
    return jax.device_put(state, shardings) if "opt_state" in config.offload else state
