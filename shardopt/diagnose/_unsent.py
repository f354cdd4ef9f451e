"""Two promises of a reducer that compresses: nothing is lost, and a message is what its formula
says.
"""

import math
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardopt.config._layout import Layout
from shardopt.core import PyTree
from shardopt.core._reducer import Reducer
from shardopt.diagnose._difference import Difference, as_numbers, compare
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


def compare_messages(
    reducer: Reducer, paths: Sequence[str], values: Sequence[PyTree], tolerance: float
) -> list[Difference]:
    """Compare what one sender writes with the formula of the reducer, in plain numpy.

    A reducer with another formula, or without a message of one sender, is not compared.
    """
    named = re.search(r"(int8|sign|top_k|power_sgd)\(\w+=([\d.e+-]+)\)", reducer.name)
    if named is None or reducer.codec is None:
        return []
    formula = FORMULAS[named[1]]
    codec = reducer.codec
    differences = []
    for path, value in zip(paths, values, strict=True):
        if np.iscomplexobj(value) or value.dtype.itemsize < 4 or not value.size:
            continue
        sent = _rank_one(value) if named[1] == "power_sgd" else value
        leaf = [jax.numpy.asarray(sent)]
        message, _ = codec.write(leaf, [sent.dtype], codec.init({path: leaf[0]}) or ())
        (received,) = codec.read(message, leaf, [sent.dtype])
        expected = formula(sent.reshape(-1), float(named[2])).reshape(sent.shape)
        differences.append(compare(f"message of {path}", received, expected, tolerance))
    return differences


def _blocks(values: np.ndarray, size: float) -> np.ndarray:
    """Return values as blocks [blocks, size], padded with zeros."""
    width = min(int(size), values.size)
    return np.pad(values, (0, -values.size % width)).reshape(-1, width)


def _int8(values: np.ndarray, block_size: float) -> np.ndarray:
    blocks = _blocks(values, block_size)
    scales = np.max(np.abs(blocks), axis=1, keepdims=True) / 127
    scales = np.where(scales == 0, 1, scales).astype(values.dtype)
    return (np.round(blocks / scales) * scales).reshape(-1)[: values.size]


def _sign(values: np.ndarray, block_size: float) -> np.ndarray:
    blocks = _blocks(values, block_size)
    counts = np.sum(_blocks(np.ones_like(values), block_size), axis=1, keepdims=True)
    scales = np.sum(np.abs(blocks), axis=1, keepdims=True) / counts
    return (np.where(blocks >= 0, scales, -scales)).reshape(-1)[: values.size]


def _top_k(values: np.ndarray, density: float) -> np.ndarray:
    count = min(values.size, max(1, math.ceil(density * values.size - 1e-9 * values.size)))
    sent = np.argsort(-np.abs(values), kind="stable")[:count]
    entries = np.zeros_like(values)
    entries[sent] = values[sent]
    return entries


def _power_sgd(values: np.ndarray, rank: float) -> np.ndarray:
    return values  # of a rank that it sends without loss


def _rank_one(value: np.ndarray) -> np.ndarray:
    """Return an array of rank 1 in any two of its dims, as large as a gradient."""
    product = np.full((), np.max(np.abs(value)), value.dtype)
    for dim in value.shape:
        product = product[..., None] * np.linspace(-0.5, 1, dim, dtype=value.dtype)
    return product


FORMULAS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "int8": _int8,
    "sign": _sign,
    "top_k": _top_k,
    "power_sgd": _power_sgd,
}
