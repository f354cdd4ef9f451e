"""What replicas that train apart carry from step to step, and where it lives."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardopt.core.types import PyTree, TrainState
from shardopt.engine.compression import (
    CompressedOptState,
    CompressionPlan,
    compression_plan,
    compression_specs,
    init_compression,
)
from shardopt.engine.config import StrategyConfig
from shardopt.engine.layout import Layout
from shardopt.partition import LeafPlan, state_specs

# Fragments: the parts of a model that replicas agree on at different steps, by depth, strided.


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


def make_fragments(recipe: StrategyConfig, plans: Sequence[LeafPlan], count: int) -> tuple[Fragment, ...]:
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


def fragment_shape(recipe: StrategyConfig, plan: LeafPlan, fragment: Fragment) -> tuple[int, ...]:
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


def _blocks_of_stage(recipe: StrategyConfig, plan: LeafPlan) -> int:
    return plan.shape[0] // (recipe.mesh.shape["pipeline"] if plan.pipelined else 1)


REPLICA = "replica"


class PerReplica(NamedTuple):
    """State whose leaves are [replicas, ...], split over the replica axis.

    Attributes:
      value: a tree.
    """

    value: PyTree


class Replicas(NamedTuple):
    """The optimizer state of `local_sgd` and `diloco`; the parameters of the train state are the shared ones.

    Attributes:
      params: each replica's own parameters.
      optimizer: the state of the wrapped optax transformation, each replica's own.
      inner_reducer: the state of the strategy's own reducer, or None.
      outer: the state of the outer optimizer, one a fragment, placed like the parameters.
      pending: means of outer gradients that are on their way, a list a fragment; empty without delay.
      reducer: the state of the reducer of outer gradients, one a fragment, with a delay as `Delayed`; or None.
    """

    params: PerReplica
    optimizer: PerReplica
    inner_reducer: PyTree
    outer: tuple[PyTree, ...]
    pending: tuple[list[Any], ...]
    reducer: tuple[PyTree, ...] | None


class Delayed(NamedTuple):
    """The state of a reducer whose means are applied some steps after they were sent.

    Attributes:
      now: after all that was sent.
      before: as it was before what is on its way was sent, so that this can be taken back; a copy of `now` where
        nothing is on its way.
    """

    now: PyTree
    before: PyTree


class SyncConfig(NamedTuple):
    """How replicas agree.

    Attributes:
      outer: the outer optimizer.
      sync_every: H, steps between two agreements of the same fragment.
      warmup_steps: steps at first in which gradients are averaged over replicas.
      delay: steps from when a fragment is sent to when it is applied.
      mix: the share of its own parameters that a replica keeps.
      fragments: the parts of the model that agree together.
      reducers: how each fragment's outer gradients cross the wire; empty for an exact mean.
    """

    outer: optax.GradientTransformation
    sync_every: int
    warmup_steps: int
    delay: int
    mix: float
    fragments: tuple[Fragment, ...]
    reducers: tuple[CompressionPlan, ...]


def rows(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of a leaf with a first dim of one row a replica."""
    return PartitionSpec(REPLICA, *spec)


def reducer_plans(recipe: StrategyConfig, layout: Layout, reducer: Any, fragments: tuple[Fragment, ...]) -> Any:
    """Return how the outer gradients of each fragment go through a reducer; nothing without one."""
    if reducer is None:
        return ()
    parts = [fragment_plans(recipe, layout, fragment) for fragment in fragments]
    split = recipe.placement.params
    return tuple(compression_plan(reducer, recipe.mesh, (REPLICA,), part, split=split) for part in parts)


def fragment_plans(recipe: StrategyConfig, layout: Layout, fragment: Fragment) -> list[LeafPlan]:
    """Return plans of the leaves of a fragment, with the shapes that they have in it."""
    plans = [layout.plans[i] for i in fragment.leaves]
    return [dataclasses.replace(plan, shape=fragment_shape(recipe, plan, fragment)) for plan in plans]


def abstract_state(recipe: StrategyConfig, layout: Layout, sync: SyncConfig) -> tuple[TrainState, TrainState]:
    """Return the train state as shapes and as specs."""
    replicas = recipe.mesh.shape[REPLICA]
    stack = lambda leaf: jax.ShapeDtypeStruct((replicas, *leaf.shape), leaf.dtype)  # noqa: E731
    base, specs = layout.abstract, layout.specs
    inner, inner_specs, wire, wire_specs = base.opt_state, specs.opt_state, None, None
    if layout.reducer is not None:
        (inner, wire), (inner_specs, wire_specs) = inner, inner_specs
    parts = [fragment_plans(recipe, layout, fragment) for fragment in sync.fragments]
    shapes = [[jax.ShapeDtypeStruct(plan.shape, plan.dtype) for plan in plans] for plans in parts]
    outer = tuple(jax.eval_shape(sync.outer.init, leaves) for leaves in shapes)
    split = recipe.placement.params
    state = Replicas(
        params=PerReplica(jax.tree.map(stack, base.params)),
        optimizer=PerReplica(jax.tree.map(stack, inner)),
        inner_reducer=wire,
        outer=outer,
        pending=tuple(shapes) if sync.delay else (),
        reducer=tuple(_kept(sync, jax.eval_shape(lambda plan=plan: init_compression(plan))) for plan in sync.reducers)
        or None,
    )
    where = Replicas(
        params=PerReplica(_map_specs(rows, specs.params)),
        optimizer=PerReplica(_map_specs(rows, inner_specs)),
        inner_reducer=wire_specs,
        outer=tuple(_outer_specs(recipe, one, plans) for one, plans in zip(outer, parts, strict=True)),
        pending=tuple([plan.spec(split=split) for plan in plans] for plans in parts) if sync.delay else (),
        reducer=tuple(_kept(sync, compression_specs(plan)) for plan in sync.reducers) or None,
    )
    return base._replace(opt_state=state), specs._replace(opt_state=where)


def first_state(
    recipe: StrategyConfig, layout: Layout, sync: SyncConfig, state: TrainState, parts: list[list[Any]]
) -> Replicas:
    """Return the first state of replicas that are all equal; `parts` are the shared parameters by fragment."""
    replicas = recipe.mesh.shape[REPLICA]
    stack = lambda x: jnp.broadcast_to(x, (replicas, *x.shape))  # noqa: E731
    inner = state.opt_state.optimizer if isinstance(state.opt_state, CompressedOptState) else state.opt_state
    return Replicas(
        params=PerReplica(jax.tree.map(stack, state.params)),
        optimizer=PerReplica(jax.tree.map(stack, inner)),
        inner_reducer=None if layout.reducer is None else init_compression(layout.reducer),
        outer=tuple(sync.outer.init(one) for one in parts),
        pending=tuple([jnp.zeros_like(x) for x in one] for one in parts) if sync.delay else (),
        reducer=tuple(_kept(sync, init_compression(plan)) for plan in sync.reducers) or None,
    )


def _kept(sync: SyncConfig, state: PyTree) -> PyTree:
    return Delayed(state, state) if sync.delay else state


def _outer_specs(recipe: StrategyConfig, state: PyTree, plans: list[LeafPlan]) -> PyTree:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(list(range(len(plans))))]
    return state_specs(
        state,
        list(zip(paths, plans, strict=True)),
        split=recipe.placement.params,
        data_size=recipe.mesh.shape["data"],
        min_shard_elements=recipe.min_shard_elements,
    )


def _map_specs(f: Any, specs: PyTree) -> PyTree:
    return jax.tree.map(f, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
