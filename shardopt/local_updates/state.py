"""What replicas that train apart carry from step to step, and where it lives."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardopt.core.types import PyTree, TrainState
from shardopt.engine.compression import (
    CompressedOptState,
    CompressionPlan,
    compression_plan,
    compression_specs,
    init_compression,
)
from shardopt.engine.config import StrategyConfig, SyncConfig
from shardopt.engine.layout import Layout
from shardopt.partition import LeafPlan, shard_axes, state_specs

REPLICA = "replica"


class PerReplica(NamedTuple):
    """State whose leaves are [replicas, ...], sharded over the replica axis.

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
    pending: tuple[PyTree, ...]
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


class LocalLayout(NamedTuple):
    """How replicas agree on one parameter structure.

    Attributes:
      config: of the combinator.
      layout: the layout of one replica.
      fragments: the parts of the model that agree together.
      compressions: how each fragment's outer gradients cross the wire; empty for an exact mean.
    """

    config: StrategyConfig
    layout: Layout
    fragments: tuple[Fragment, ...]
    compressions: tuple[CompressionPlan, ...]

    @property
    def sync(self) -> SyncConfig:
        """How replicas agree."""
        assert self.config.local_updates is not None
        return self.config.local_updates

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.config.mesh.shape[REPLICA]


def make_local_layout(config: StrategyConfig, layout: Layout) -> LocalLayout:
    """Cut the model into fragments, and plan how each crosses the wire."""
    local = LocalLayout(config, layout, (), ())
    fragments = make_fragments(config, layout.plans, local.sync.fragments)
    if local.sync.reducer is None:
        return local._replace(fragments=fragments)
    sharded = config.placement.params
    parts = [fragment_plans(local, fragment) for fragment in fragments]
    compressions = (
        compression_plan(local.sync.reducer, config.mesh, (REPLICA,), part, sharded=sharded) for part in parts
    )
    return local._replace(fragments=fragments, compressions=tuple(compressions))


def make_fragments(config: StrategyConfig, plans: Sequence[LeafPlan], count: int) -> tuple[Fragment, ...]:
    """Deal the trained parameters out: blocks f, f + P, f + 2P, ... of each stage, and other leaves in turn.

    Neighbouring blocks thus agree at different times, which Streaming DiLoCo found better than runs of blocks.
    """
    dealt = deal_out([plan.stacked if plan.trainable else None for plan in plans], count)

    def has(i, number):
        return number < _blocks_of_stage(config, plans[i]) if dealt[i] == -1 else dealt[i] == number

    return tuple(Fragment(f, count, tuple(i for i in range(len(plans)) if has(i, f))) for f in range(count))


def deal_out(stacked: Iterable[bool | None], count: int) -> list[int | None]:
    """Return of each leaf its fragment, in turn; -1 of a stacked leaf, which has a part in all; None where None is given."""
    turn = itertools.count()
    return [None if one is None else -1 if one else next(turn) % count for one in stacked]


def fragment_shape(config: StrategyConfig, plan: LeafPlan, fragment: Fragment) -> tuple[int, ...]:
    """Return the shape of a leaf's part in a fragment, over all stages."""
    if not plan.stacked:
        return plan.shape
    blocks = _blocks_of_stage(config, plan)
    stages = plan.shape[0] // blocks
    return (stages * len(range(fragment.number, blocks, fragment.stride)), *plan.shape[1:])


def take(fragment: Fragment, plan: LeafPlan, leaf: jax.Array) -> jax.Array:
    """Return a local leaf's part in a fragment."""
    return leaf[fragment.number :: fragment.stride] if plan.stacked else leaf


def put(fragment: Fragment, plan: LeafPlan, leaf: jax.Array, part: jax.Array) -> jax.Array:
    """Return the local leaf with its part in a fragment replaced."""
    return leaf.at[fragment.number :: fragment.stride].set(part) if plan.stacked else part


def _blocks_of_stage(config: StrategyConfig, plan: LeafPlan) -> int:
    return plan.shape[0] // (config.mesh.shape["pipeline"] if plan.pipelined else 1)


def fragment_plans(local: LocalLayout, fragment: Fragment) -> list[LeafPlan]:
    """Return plans of the leaves of a fragment, with the shapes that they have in it."""
    plans = [local.layout.plans[i] for i in fragment.leaves]
    return [dataclasses.replace(plan, shape=fragment_shape(local.config, plan, fragment)) for plan in plans]


def first_opt_state(local: LocalLayout, params: PyTree, opt_state: PyTree, parts: list[list[jax.Array]]) -> Replicas:
    """Return the optimizer state of replicas that are all equal.

    Args:
      local: how they agree.
      params: the shared parameters.
      opt_state: the first optimizer state of one replica.
      parts: the shared parameters by fragment.
    """
    stack = lambda x: jnp.broadcast_to(x, (local.replicas, *x.shape))  # noqa: E731
    optimizer, wire = opt_state if isinstance(opt_state, CompressedOptState) else (opt_state, None)
    delayed, outer = local.sync.delay > 0, local.sync.outer
    states = [init_compression(plan) for plan in local.compressions]
    return Replicas(
        params=PerReplica(jax.tree.map(stack, params)),
        optimizer=PerReplica(jax.tree.map(stack, optimizer)),
        inner_reducer=wire,
        outer=tuple(outer.init(part) for part in parts),
        pending=tuple([jnp.zeros_like(x) for x in part] for part in parts) if delayed else (),
        reducer=tuple(Delayed(state, state) if delayed else state for state in states) or None,
    )


def abstract_state(local: LocalLayout) -> tuple[TrainState, TrainState]:
    """Return the train state as shapes and as specs."""
    base, specs, sharded = local.layout.abstract, local.layout.specs, local.config.placement.params
    delayed, stack = local.sync.delay > 0, local.config.axes.stack
    parts = [fragment_plans(local, fragment) for fragment in local.fragments]
    shapes = [[jax.ShapeDtypeStruct(plan.shape, plan.dtype) for plan in plans] for plans in parts]
    state = jax.eval_shape(functools.partial(first_opt_state, local), base.params, base.opt_state, shapes)
    compressed = isinstance(specs.opt_state, CompressedOptState)
    optimizer, wire = specs.opt_state if compressed else (specs.opt_state, None)
    states = [compression_specs(plan) for plan in local.compressions]
    where = Replicas(
        params=PerReplica(_map_specs(stack, specs.params)),
        optimizer=PerReplica(_map_specs(stack, optimizer)),
        inner_reducer=wire,
        outer=tuple(_outer_specs(local.config, one, plans) for one, plans in zip(state.outer, parts, strict=True)),
        pending=tuple([plan.spec(sharded=sharded) for plan in plans] for plans in parts) if delayed else (),
        reducer=tuple(Delayed(one, one) if delayed else one for one in states) or None,
    )
    return base._replace(opt_state=state), specs._replace(opt_state=where)


def _outer_specs(config: StrategyConfig, state: PyTree, plans: list[LeafPlan]) -> PyTree:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(list(range(len(plans))))]
    return state_specs(
        state,
        list(zip(paths, plans, strict=True)),
        sharded=config.placement.params,
        axes=shard_axes(config.mesh.shape),
        sizes=config.mesh_shape,
        min_shard_elements=config.min_shard_elements,
    )


def _map_specs(f: Callable[[PartitionSpec], PartitionSpec], specs: PyTree) -> PyTree:
    return jax.tree.map(f, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
