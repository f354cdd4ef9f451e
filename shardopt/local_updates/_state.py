"""The state of replicas that train independently: its types, its first values, its shapes and its
specs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.config._sync import SyncConfig
from shardopt.config._transformation import refuse_unsupported
from shardopt.core import Arrays, PyTree, TrainState
from shardopt.partition import LeafPlan, shard_axes, state_specs
from shardopt.step._compressed import (
    CompressedOptState,
    CompressionPlan,
    compression_plan,
    compression_specs,
    init_compression,
)

REPLICA = "replica"


class PerReplica(NamedTuple):
    """Marks state whose leaves are [replicas, ...], sharded over the replica axis.

    Attributes:
      value: a tree of arrays.
    """

    value: PyTree


class ReplicaStates(NamedTuple):
    """The optimizer state of `local_sgd` and `diloco`.

    The shared parameters are the parameters of the train state.

    Attributes:
      params: the parameters of each replica.
      optimizer: the state of the wrapped optax transformation, of each replica.
      inner_reducer: the state of the strategy's reducer, or None.
      outer: the state of the outer optimizer for each fragment, placed like the parameters.
      pending: means of outer gradients that were sent and not yet applied, a list for each
        fragment; empty without a delay.
      reducer: the state of the reducer of outer gradients for each fragment, with a delay as
        `Delayed`; or None.
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
      now: the state after all sends.
      before: the state before the pending mean was sent, so that the send can be undone; a copy of
        `now` if nothing is pending.
    """

    now: PyTree
    before: PyTree


class Fragment(NamedTuple):
    """A fragment of the model, whose parameters are synchronized together.

    Attributes:
      number: f, counted from 0.
      stride: P, the number of fragments.
      leaves: the indices of the leaves of the parameters that have a part in the fragment, in
        order.
    """

    number: int
    stride: int
    leaves: tuple[int, ...]


class LocalLayout(NamedTuple):
    """The layout of replicas that train independently, for one structure of parameters.

    Attributes:
      config: the config of `local_sgd` or `diloco`.
      layout: the layout of one replica.
      fragments: the fragments of the model.
      compressions: the compression plan of each fragment's outer gradients; empty for an exact
        mean.
    """

    config: StrategyConfig
    layout: Layout
    fragments: tuple[Fragment, ...]
    compressions: tuple[CompressionPlan, ...]

    @property
    def sync(self) -> SyncConfig:
        """The config of the synchronization."""
        assert self.config.local_updates is not None
        return self.config.local_updates

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.config.mesh.shape[REPLICA]


def make_local_layout(config: StrategyConfig, layout: Layout) -> LocalLayout:
    """Split the model into fragments, and plan the compression of their outer gradients."""
    local_layout = LocalLayout(config, layout, (), ())
    fragments = make_fragments(config, layout.plans, local_layout.sync.fragments)
    if local_layout.sync.reducer is None:
        return local_layout._replace(fragments=fragments)
    sharded = config.placement.params
    parts = [fragment_plans(local_layout, fragment) for fragment in fragments]
    compressions = (
        compression_plan(local_layout.sync.reducer, config.mesh, (REPLICA,), part, sharded=sharded)
        for part in parts
    )
    return local_layout._replace(fragments=fragments, compressions=tuple(compressions))


def make_fragments(
    config: StrategyConfig, plans: Sequence[LeafPlan], count: int
) -> tuple[Fragment, ...]:
    """Assign the trained parameters to fragments: blocks f, f + P, f + 2P, ... of each stage, and
    other leaves in turn.

    Neighbouring blocks thus synchronize at different steps. Streaming DiLoCo found this better than
    consecutive blocks.
    """
    # -1: a stacked leaf has blocks in every fragment that is below the number of its blocks.
    numbers = deal_out([plan.stacked if plan.trainable else None for plan in plans], count)

    def has_leaf(i, number):
        return (
            number < _blocks_of_stage(config, plans[i])
            if numbers[i] == -1
            else numbers[i] == number
        )

    return tuple(
        Fragment(f, count, tuple(i for i in range(len(plans)) if has_leaf(i, f)))
        for f in range(count)
    )


def deal_out(stacked: Iterable[bool | None], count: int) -> list[int | None]:
    """Assign leaves to `count` fragments in turn; return the number of the fragment of each leaf.

    Args:
      stacked: for each leaf, whether it is stacked; None for a leaf without a fragment.
      count: the number of fragments.

    Returns:
      The fragment of each leaf; -1 for a stacked leaf, which has a part in every fragment; None for
      None.
    """
    turn = itertools.count()
    return [
        None if is_stacked is None else -1 if is_stacked else next(turn) % count
        for is_stacked in stacked
    ]


def fragment_shape(config: StrategyConfig, plan: LeafPlan, fragment: Fragment) -> tuple[int, ...]:
    """Return the global shape of a leaf's part in a fragment, with the blocks of all stages."""
    if not plan.stacked:
        return plan.shape
    blocks = _blocks_of_stage(config, plan)
    stages = plan.shape[0] // blocks
    return (stages * len(range(fragment.number, blocks, fragment.stride)), *plan.shape[1:])


def take_fragment(fragment: Fragment, plan: LeafPlan, leaf: jax.Array) -> jax.Array:
    """Return the part of a device's local leaf that is in a fragment."""
    return leaf[fragment.number :: fragment.stride] if plan.stacked else leaf


def replace_fragment(
    fragment: Fragment, plan: LeafPlan, leaf: jax.Array, part: jax.Array
) -> jax.Array:
    """Return a device's local leaf with its part in a fragment replaced."""
    return leaf.at[fragment.number :: fragment.stride].set(part) if plan.stacked else part


def _blocks_of_stage(config: StrategyConfig, plan: LeafPlan) -> int:
    return plan.shape[0] // (config.mesh.shape["pipeline"] if plan.pipelined else 1)


def fragment_plans(local_layout: LocalLayout, fragment: Fragment) -> list[LeafPlan]:
    """Return the plans of the leaves of a fragment, with the shapes of their parts."""
    plans = [local_layout.layout.plans[i] for i in fragment.leaves]
    return [
        dataclasses.replace(plan, shape=fragment_shape(local_layout.config, plan, fragment))
        for plan in plans
    ]


def first_opt_state(
    local_layout: LocalLayout, params: PyTree, opt_state: PyTree, parts: list[Arrays]
) -> ReplicaStates:
    """Return the first optimizer state, when all replicas are equal.

    Args:
      local_layout: the layout of the replicas.
      params: the shared parameters.
      opt_state: the first optimizer state of one replica.
      parts: the shared parameters of each fragment.
    """

    def stack(x):
        return jnp.broadcast_to(x, (local_layout.replicas, *x.shape))

    optimizer, inner_reducer = (
        opt_state if isinstance(opt_state, CompressedOptState) else (opt_state, None)
    )
    delayed = local_layout.sync.delay > 0
    outer = local_layout.sync.outer
    reducer_states = [init_compression(plan) for plan in local_layout.compressions]
    return ReplicaStates(
        params=PerReplica(jax.tree.map(stack, params)),
        optimizer=PerReplica(jax.tree.map(stack, optimizer)),
        inner_reducer=inner_reducer,
        outer=tuple(map(outer.init, parts)),
        pending=tuple([jnp.zeros_like(x) for x in part] for part in parts) if delayed else (),
        reducer=tuple(Delayed(state, state) if delayed else state for state in reducer_states)
        or None,
    )


def abstract_state(local_layout: LocalLayout) -> tuple[TrainState, TrainState]:
    """Return the train state twice: as `jax.ShapeDtypeStruct`s and as `PartitionSpec`s."""
    abstract = local_layout.layout.abstract
    specs = local_layout.layout.specs
    sharded = local_layout.config.placement.params
    delayed = local_layout.sync.delay > 0
    stack = local_layout.config.axes.stack
    plans_by_fragment = [
        fragment_plans(local_layout, fragment) for fragment in local_layout.fragments
    ]
    shapes = [
        [jax.ShapeDtypeStruct(plan.shape, plan.dtype) for plan in plans]
        for plans in plans_by_fragment
    ]
    opt_state = jax.eval_shape(
        functools.partial(first_opt_state, local_layout),
        abstract.params,
        abstract.opt_state,
        shapes,
    )
    refuse_unsupported(local_layout.config.strategy, opt_state.outer)
    compressed = isinstance(specs.opt_state, CompressedOptState)
    optimizer, inner_reducer = specs.opt_state if compressed else (specs.opt_state, None)
    reducer_specs = [compression_specs(plan) for plan in local_layout.compressions]
    replica_specs = ReplicaStates(
        params=PerReplica(jax.tree.map(stack, specs.params)),
        optimizer=PerReplica(jax.tree.map(stack, optimizer)),
        inner_reducer=inner_reducer,
        outer=tuple(
            _outer_specs(local_layout.config, outer_state, plans)
            for outer_state, plans in zip(opt_state.outer, plans_by_fragment, strict=True)
        ),
        pending=(
            tuple([plan.spec(sharded=sharded) for plan in plans] for plans in plans_by_fragment)
            if delayed
            else ()
        ),
        reducer=tuple(Delayed(spec, spec) if delayed else spec for spec in reducer_specs) or None,
    )
    return abstract._replace(opt_state=opt_state), specs._replace(opt_state=replica_specs)


def _outer_specs(config: StrategyConfig, state: PyTree, plans: list[LeafPlan]) -> PyTree:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(list(range(len(plans))))]
    return state_specs(
        state,
        list(zip(paths, plans, strict=True)),
        sharded=config.placement.params,
        axes=shard_axes(config.mesh.shape),
        sizes=config.mesh_shape,
        min_shard_elements=config.layout.min_shard_elements,
    )
