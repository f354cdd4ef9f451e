"""Optimizer state in host memory (`pinned_host`) between steps; `streamed_update` updates it."""

import jax

from shardopt.core._types import PyTree, TrainState
from shardopt.engine._config import StrategyConfig

HOST = "pinned_host"


def on_host(config: StrategyConfig, state: TrainState, shardings: TrainState) -> TrainState:
    """Return the shardings of a train state, with offloaded leaves in host memory.

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

    Counts and other scalars stay on the device: copying a scalar costs as much as copying a moment.
    """
    return jax.tree.map(
        lambda leaf, sharding: sharding.with_memory_kind(HOST) if leaf.shape else sharding, state, shardings
    )


def to_device(config: StrategyConfig, state: PyTree, shardings: PyTree) -> PyTree:
    """Copy offloaded state to the device; `shardings` are in device memory."""
    return jax.device_put(state, shardings) if "opt_state" in config.offload else state


def to_host(config: StrategyConfig, state: PyTree, shardings: PyTree) -> PyTree:
    """Copy offloaded state to host memory; `shardings` are in host memory."""
    return jax.device_put(state, shardings) if "opt_state" in config.offload else state
