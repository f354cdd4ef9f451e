"""Values of the host in a train state, such as `state._replace(step=0)`: they are placed where the
strategy keeps the leaf, or refused.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardopt.config._config import StrategyConfig
from shardopt.core import (
    PyTree,
    TrainState,
    format_error,
    is_array_like,
    is_key,
    leaves_with_paths,
    with_leaves,
)
from shardopt.step._batches import as_array
from shardopt.step._cache import LayoutCache
from shardopt.step._inputs import check_placement, check_state, check_structure, put
from shardopt.step._programs import CompiledStep

_FIX = "so.replace(state, params=..., hyperparams=..., step=...) places values in a state."


class States:
    """Checks the states that a strategy gets, and places their values of the host.

    A step returns all leaves in their places. So a state is checked before the first call for its
    parameters, and after a call that failed. Other calls take no time for it.

    Args:
      config: of the strategy.
      cache: the programs by parameters.
    """

    def __init__(self, config: StrategyConfig, cache: LayoutCache[CompiledStep]):
        self._config = config
        self._cache = cache
        self._checked: set[int] = set()

    def call(
        self, run: Callable[[TrainState, PyTree], PyTree], state: TrainState, batch: PyTree
    ) -> PyTree:
        """Call a function of a state and a batch. If it fails because of values of the host in the
        state, place them and call it again.

        Raises:
          TypeError: if a leaf is no number or array.
          ValueError: if the state belongs to another optimizer, strategy or mesh, or a value does
            not fit.
        """
        try:
            return run(state, batch)
        # A call without such values pays nothing: values of the host are looked for only after a
        # failure.
        except (AttributeError, TypeError, ValueError) as error:
            failure = error
        placed = self.ready(state)
        if placed is state:
            raise failure
        return run(placed, batch)

    def first_ready(self, state: TrainState) -> TrainState:
        """Return a live state; it is `ready` if it is the first one of its parameters."""
        check_state(self._config, state)
        last = self._cache.last_or_none()
        is_checked = id(self._cache.of(state.params)) in self._checked
        return state if is_checked else self._ready(state, last)

    def ready(self, state: TrainState) -> TrainState:
        """Return a live state of the strategy with all leaves on its devices."""
        check_state(self._config, state)
        return self._ready(state, self._cache.last_or_none())

    def _ready(self, state: TrainState, last: CompiledStep | None) -> TrainState:
        """Return `ready` of a state; `last` are the programs that were used before it."""
        try:
            return self._placed_state(state)
        except ValueError:
            if last is not None:
                self._cache.use(last)
                check_params_of_state(self._config, last.abstract, state)
            raise

    def _placed_state(self, state: TrainState) -> TrainState:
        kinds = set(map(type, jax.tree.leaves(state)))
        if not any(issubclass(kind, Tracer | jax.ShapeDtypeStruct) for kind in kinds):
            state = _placed(self._config, state, self._cache)
        compiled = self._cache.of(state.params)
        check_placement(self._config, compiled.abstract, compiled.shardings, state)
        self._checked.add(id(compiled))
        return state


def check_params_of_state(config: StrategyConfig, expected: TrainState, state: TrainState) -> None:
    """Refuse, by a ValueError, parameters that the optimizer state does not belong to.

    Args:
      config: of the strategy.
      expected: the last state of the strategy, as shapes.
      state: a state that does not fit; if it is the optimizer state that differs from the last one,
        nothing is raised.
    """
    if _shapes(state.opt_state) != _shapes(expected.opt_state):
        return
    leaves, expected_leaves = (
        {path: f"shape {np.shape(leaf)}" for path, leaf in leaves_with_paths(params)}
        for params in (state.params, expected.params)
    )
    misfits = [
        f"params/{path}: {leaves.get(path, 'nothing')}, not {expected_leaves.get(path, 'nothing')}"
        for path in expected_leaves | leaves
        if leaves.get(path) != expected_leaves.get(path)
    ]
    structure, expected_structure = map(jax.tree.structure, (state.params, expected.params))
    if not misfits and structure != expected_structure:
        misfits = [f"params: {structure}, not {expected_structure}"]
    if misfits:
        problem = "the parameters do not fit the optimizer state, which belongs to others."
        fix = "keep the containers, names and shapes; call opt.init for other parameters."
        raise ValueError(format_error(config.strategy, problem, misfits, fix)) from None


def _is_unplaced(leaf: Any) -> bool:
    """Return whether a leaf has no place yet: a number, an array of the host, or an array that jax
    has put on its default device.
    """
    return not isinstance(leaf, jax.Array) or not leaf.committed


def params_as_arrays(params: PyTree) -> PyTree:
    """Return parameters with numpy arrays in place of torch tensors, and of other objects with
    `__array__`.
    """

    def convert(leaf):
        if is_array_like(leaf) and not isinstance(
            leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
        ):
            array = as_array(leaf)
            return leaf if array is None else array
        return leaf

    return jax.tree.map(convert, params)


def _placed(
    config: StrategyConfig, state: TrainState, cache: LayoutCache[CompiledStep]
) -> TrainState:
    """Return a state with all leaves on the devices of a strategy.

    Args:
      config: of the strategy.
      state: a train state. Numbers, numpy arrays, torch tensors and arrays that jax has put on its
        default device are placed; other leaves stay.
      cache: the programs by parameters.

    Raises:
      TypeError: if a leaf is no number or array, or of a kind that the leaf cannot hold.
      ValueError: if the structure, a shape or a value does not fit.
    """
    paths_and_leaves = leaves_with_paths(state)
    if not any(_is_unplaced(leaf) for _, leaf in paths_and_leaves):
        return state
    arrays = [_host_array(leaf) if _is_unplaced(leaf) else leaf for _, leaf in paths_and_leaves]
    wrong_types = [
        f"{path}: {type(leaf).__name__} {leaf!r:.40}"
        for (path, leaf), array in zip(paths_and_leaves, arrays, strict=True)
        if array is None
    ]
    if wrong_types:
        problem = "the leaves of a state must be arrays or numbers."
        raise TypeError(format_error(config.strategy, problem, wrong_types, _FIX))
    converted = with_leaves(state, arrays)
    compiled = _programs_for(cache, converted.params)
    check_structure(config, compiled.abstract, converted)
    expected_leaves = jax.tree.leaves(compiled.abstract)
    wrong_values = [
        f"{path}: {_text(array)}, not {_text(expected)}"
        for (path, leaf), array, expected in zip(
            paths_and_leaves, arrays, expected_leaves, strict=True
        )
        if not isinstance(leaf, jax.Array) and not _fits(array, expected)
    ]
    if wrong_values:
        problem = "values of the state do not fit the leaves that they replace."
        raise ValueError(format_error(config.strategy, problem, wrong_values, _FIX))
    shardings = jax.tree.leaves(compiled.shardings)
    with jax.transfer_guard("allow"):
        placed = [
            put(array.astype(expected.dtype), sharding)
            if _is_unplaced(array) and _fits(array, expected)
            else array
            for array, expected, sharding in zip(arrays, expected_leaves, shardings, strict=True)
        ]
    return with_leaves(state, placed)


def _programs_for(cache: LayoutCache[CompiledStep], params: PyTree) -> CompiledStep:
    """Return the programs for parameters: the last ones if the shapes are equal, because numbers of
    the host may have another dtype.
    """
    last = cache.last_or_none()
    if last is not None and _shapes(last.abstract.params) == _shapes(params):
        return last
    return cache.of(params)


def _shapes(params: PyTree) -> tuple[PyTree, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(params)
    return structure, [np.shape(leaf) for leaf in leaves]


def _host_array(leaf: Any) -> Any:
    """Return a value as an array, None if it is none."""
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    array = leaf if isinstance(leaf, jax.Array | np.ndarray) else as_array(leaf)
    return None if array is None or getattr(array.dtype, "kind", "") in "OSUMm" else array


def _fits(array: Any, expected: jax.ShapeDtypeStruct) -> bool:
    """Return whether a leaf can hold a value: numbers of its kind or of a narrower one, in range."""
    if array.shape != expected.shape:
        return False
    if array.dtype == expected.dtype:
        return True
    if is_key(expected) or is_key(array):
        return array.dtype == expected.dtype
    kinds = [np.bool_, jnp.integer, jnp.floating, jnp.complexfloating]
    ranks = [
        next(rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))
        for dtype in (array.dtype, expected.dtype)
    ]
    if ranks[0] > ranks[1] or (0 in ranks and ranks[0] != ranks[1]):
        return False
    if not jnp.issubdtype(expected.dtype, jnp.integer) or not array.size:
        return True
    limits = jnp.iinfo(expected.dtype)
    values = np.asarray(array)
    return bool(values.min() >= limits.min and values.max() <= limits.max)


def _text(leaf: Any) -> str:
    value = f" {leaf.item()}" if isinstance(leaf, np.ndarray) and leaf.ndim == 0 else ""
    return f"{leaf.dtype}{list(leaf.shape)}{value}"
