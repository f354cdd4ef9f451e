"""Optimizer state in host memory (`pinned_host`) between steps; `streamed_update` updates it."""

from collections.abc import Sequence

import jax

from shardopt.core import PyTree, TrainState

HOST = "pinned_host"


def on_host(offload: Sequence[str], state: TrainState, shardings: TrainState) -> TrainState:
    """Return the shardings of a train state, with offloaded leaves in host memory.

    Args:
      offload: the option; it names the parts of the state in host memory.
      state: the train state as shapes.
      shardings: of its leaves, in device memory.
    """
    if "opt_state" not in offload:
        return shardings
    return shardings._replace(opt_state=host_shardings(state.opt_state, shardings.opt_state))


def host_shardings(state: PyTree, shardings: PyTree) -> PyTree:
    """Return the shardings of an optimizer state in host memory.

    Counts and other scalars stay on the device: copying a scalar costs as much as copying a moment.
    """
    return jax.tree.map(
        lambda leaf, sharding: sharding.with_memory_kind(HOST) if leaf.shape else sharding,
        state,
        shardings,
    )


def to_device(offload: Sequence[str], state: PyTree, shardings: PyTree) -> PyTree:
    """Copy offloaded state to the device; `shardings` are in device memory."""
    return jax.device_put(state, shardings) if "opt_state" in offload else state


def to_host(offload: Sequence[str], abstract: PyTree, state: PyTree, shardings: PyTree) -> PyTree:
    """Copy offloaded state to host memory.

    `abstract` are its shapes, `shardings` are in device memory.
    """
    return (
        jax.device_put(state, host_shardings(abstract, shardings))
        if "opt_state" in offload
        else state
    )
