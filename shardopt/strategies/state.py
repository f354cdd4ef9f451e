"""Checking the train state that is handed to a step."""

from typing import Any

import jax
from jax.core import Tracer

from shardopt.core.errors import complaint, plural
from shardopt.core.types import TrainState
from shardopt.partition.paths import leaves_with_paths
from shardopt.strategies.layout import Layout
from shardopt.strategies.recipe import Recipe


def check_state(recipe: Recipe, state: Any) -> None:
    """Refuse what is not a live train state.

    Raises:
      TypeError: if it is not a `TrainState`.
      ValueError: if it was given to a step before, which took over its memory.
    """
    if not isinstance(state, TrainState):
        what = f"the state must be the TrainState that init or step returned, got {type(state).__name__}."
        raise TypeError(complaint(recipe.who, what, fix="call step(state, batch) with state = opt.init(params)."))
    is_array = isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer)
    if is_array and state.step.is_deleted():
        what = "this state was given to step already, which takes over its memory."
        raise ValueError(complaint(recipe.who, what, fix="go on with the state that step returned."))


def check_placement(recipe: Recipe, layout: Layout, placed: TrainState, state: TrainState) -> None:
    """Refuse a state of another optimizer, strategy or mesh.

    Raises:
      ValueError: if the optimizer state has another structure, or a leaf another shape, dtype or sharding.
    """
    fix = "move a state between strategies and meshes with so.save and so.restore, or so.to_bytes and so.from_bytes."
    if jax.tree.structure(state) != jax.tree.structure(layout.abstract):
        what = "the optimizer state is not that of this optimizer: its structure differs."
        raise ValueError(complaint(recipe.who, what, fix=fix))
    problems = []
    wanted = zip(jax.tree.leaves(layout.abstract), jax.tree.leaves(placed), strict=True)
    for (path, leaf), (promised, sharding) in zip(leaves_with_paths(state), wanted, strict=True):
        if (leaf.shape, leaf.dtype) != (promised.shape, promised.dtype):
            problems.append(f"{path}: {leaf.dtype}{list(leaf.shape)}, not {promised.dtype}{list(promised.shape)}")
        elif isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            continue
        elif not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            problems.append(f"{path}: placed as {leaf.sharding}, not {sharding.spec} on this mesh")
    if problems:
        what = f"the state does not live where this strategy keeps it ({plural(len(problems), 'leaf')})."
        raise ValueError(complaint(recipe.who, what, problems, fix))
