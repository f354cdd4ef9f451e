"""Fragments: the parts of a model that replicas agree on at different steps, by depth, strided."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardopt.partition import LeafPlan
from shardopt.strategies.recipe import Recipe


class Fragment(NamedTuple):
    """A part of the model.

    Attributes:
      number: f, from 0.
      stride: P, how many fragments there are.
      leaves: which leaves of the parameters have a part in it, in order.
    """

    number: int
    stride: int
    leaves: tuple[int, ...]


def make_fragments(recipe: Recipe, plans: Sequence[LeafPlan], count: int) -> tuple[Fragment, ...]:
    """Deal the trained parameters out: blocks f, f + P, f + 2P, ... of each stage, and other leaves in turn.

    Neighbouring blocks thus agree at different times, which Streaming DiLoCo found better than runs of blocks.
    """
    trained = [i for i, plan in enumerate(plans) if plan.trainable]
    whole = [i for i in trained if not plans[i].stacked]
    turn = {i: place % count for place, i in enumerate(whole)}

    def has(i, number):
        if plans[i].stacked:
            return number < _blocks_of_stage(recipe, plans[i])
        return turn[i] == number

    return tuple(Fragment(f, count, tuple(i for i in trained if has(i, f))) for f in range(count))


def fragment_shape(recipe: Recipe, plan: LeafPlan, fragment: Fragment) -> tuple[int, ...]:
    """Return the shape of a leaf's part in a fragment, over all stages."""
    if not plan.stacked:
        return plan.shape
    blocks = _blocks_of_stage(recipe, plan)
    stages = plan.shape[0] // blocks
    return (stages * len(range(fragment.number, blocks, fragment.stride)), *plan.shape[1:])


def take(fragment: Fragment, plan: LeafPlan, leaf: Any) -> Any:
    """Return a local leaf's part in a fragment."""
    return leaf[fragment.number :: fragment.stride] if plan.stacked else leaf


def put(fragment: Fragment, plan: LeafPlan, leaf: Any, part: Any) -> Any:
    """Return the local leaf with its part in a fragment replaced."""
    return leaf.at[fragment.number :: fragment.stride].set(part) if plan.stacked else part


def _blocks_of_stage(recipe: Recipe, plan: LeafPlan) -> int:
    return plan.shape[0] // (recipe.mesh.shape["pipeline"] if plan.pipelined else 1)
