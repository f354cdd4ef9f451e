"""The promise of a reducer that compresses: nothing is lost."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import NamedSharding

from shardopt.config._layout import Layout
from shardopt.core import PyTree
from shardopt.core._reducer import Reducer
from shardopt.diagnose._difference import as_numbers
from shardopt.diagnose._pieces import values_on_host
from shardopt.partition import LeafPlan
from shardopt.reducers import error_feedback
from shardopt.step._compressed import CompressedMean, CompressionPlan


def with_memory(reducer: Reducer) -> Reducer:
    """Return the reducer with error feedback, so that its state holds the values that it did not
    send.
    """
    return reducer if reducer.name.startswith("error_feedback(") else error_feedback(reducer)


def unsent(layout: Layout, opt_state: PyTree) -> list[np.ndarray]:
    """Return for each trained leaf the unsent part of its gradients, summed over devices.

    Args:
      layout: of the parameters.
      opt_state: of a strategy whose reducer is `with_memory`.
    """
    _, state = layout.reduce.split(opt_state)
    memories = {path: leaf for group in state for path, leaf in group.memory.value.items()}
    return [
        _assembled(_plan(layout), leaf, as_numbers(values_on_host(memories[leaf.path])).sum(0))
        for leaf in layout.trained
    ]


def exact_gradients(
    layout: Layout,
    means: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Return the gradients whose means a reducer sent.

    N mean + the unsent part after a step = N gradient + the unsent part before it.
    """
    size = _plan(layout).size
    return [
        as_numbers(mean) + (new - old) / size
        for mean, old, new in zip(means, before, after, strict=True)
    ]


def _plan(layout: Layout) -> CompressionPlan:
    assert isinstance(layout.reduce, CompressedMean)
    return layout.reduce.plan


def _assembled(plan: CompressionPlan, leaf: LeafPlan, pieces: np.ndarray) -> np.ndarray:
    """Return a whole leaf from its pieces [sizes of the axes without a mean..., local shape...]."""
    sharding = NamedSharding(plan.mesh, leaf.spec(sharded=False))
    indices = sharding.devices_indices_map(tuple(leaf.shape))
    assembled = np.zeros(leaf.shape, pieces.dtype)
    for place in np.ndindex(*(plan.mesh.shape[axis] for axis in plan.others)):
        position = dict(zip(plan.others, place, strict=True))
        device = plan.mesh.devices[tuple(position.get(axis, 0) for axis in plan.mesh.axis_names)]
        assembled[indices[device]] = pieces[place]
    return assembled
